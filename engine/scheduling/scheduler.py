"""Chooses, anew for every step, which tokens of which sequences are computed.

Iteration-level scheduling (Orca, OSDI '22) with chunked, stall-free prefill (Sarathi-Serve, OSDI '24).
There is no prefill phase and no decode phase: each sequence has known tokens and `num_computed_tokens`,
and every step lets the second catch up with the first under one token budget.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from headrace.engine.config import BatchingPolicy, SchedulerConfig
from headrace.engine.errors import IntegrityError
from headrace.engine.kv.manager import NO_MATCH, KVCacheManager, PrefixMatch
from headrace.engine.scheduling.plan import ScheduledSequence, StepPlan
from headrace.engine.scheduling.queue import SequenceQueue
from headrace.engine.sequence import Sequence, SequenceStatus


class Scheduler:
    """Owner of the waiting and the running sequences and of their slots.

    Args:
        config: limits of a step.
        kv: where blocks come from.
        prefix_caching: whether sequences share the KV of equal beginnings.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, *, prefix_caching: bool = True) -> None:
        self.waiting = SequenceQueue()
        self.running = SequenceQueue()
        self._config = config
        self._kv = kv
        self._prefix_caching = prefix_caching
        self._free_slots = list(range(config.max_num_seqs))
        heapify(self._free_slots)
        self._static_places = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.add(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence, wherever it stands; slot and blocks are free at once. A second call does nothing.

        Never called while a step that may write to its blocks is under way.
        """
        if sequence.is_finished:
            return
        if sequence.status is SequenceStatus.RUNNING:
            if not (self._prefix_caching and sequence.request.uses_prefix_cache):
                self._kv.withdraw(sequence.sequence_id)
            self._leave_batch(sequence)
            self._static_places = 0
        else:
            self.waiting.remove(sequence)
        self._kv.free(sequence.sequence_id, is_over=True)
        sequence.transition(SequenceStatus.FINISHED)

    def schedule(self, step: int, now_s: float) -> tuple[StepPlan | None, int]:
        """Plan one step.

        Order: decodes of running sequences, oldest first; then prefill of running ones; then, in order of
        arrival, waiting ones. A running sequence that can't grow makes the youngest give up its blocks.

        Args:
            step: its number.
            now_s: monotonic seconds, noted in sequences that are scheduled for the first time.

        Returns:
            The plan (None when there is nothing to do) and how many sequences were preempted for it.

        Raises:
            IntegrityError: somebody waits, nobody runs, and still nothing can be planned.
        """
        draft = _DraftPlan(self._config.max_num_batched_tokens)
        for sequence in self.running:
            if sequence.is_decoding:
                self._grow(sequence, draft)
        for sequence in self.running:
            if not sequence.is_decoding:
                self._grow(sequence, draft)
        if draft.num_preempted == 0:
            self._admit(draft)
        if not draft.num_tokens_of:
            if self.waiting:
                raise IntegrityError(
                    f"{len(self.waiting)} sequences wait, nobody runs, and none can be admitted"
                )
            return None, draft.num_preempted
        return StepPlan(step, tuple(self._rows(draft, now_s))), draft.num_preempted

    def offer_blocks(self, sequence: Sequence) -> None:
        """Let others share what a finished step has filled for a running sequence."""
        key = self._sharing_key(sequence)
        if key is not None:
            self._kv.offer(sequence.sequence_id, sequence.token_ids, sequence.num_computed_tokens, key)

    def _grow(self, sequence: Sequence, draft: _DraftPlan) -> None:
        """Schedule the next tokens of a running sequence, at the expense of younger ones if need be."""
        num_tokens = self._chunk_len(sequence, draft.budget)
        while num_tokens > 0 and sequence.status is SequenceStatus.RUNNING:
            if (
                self._kv.allocate_slots(sequence.sequence_id, sequence.num_computed_tokens + num_tokens)
                is not None
            ):
                draft.take(sequence, num_tokens)
                return
            # The youngest goes first, so the oldest always progresses: no request is larger than the pool.
            self._preempt(self.running.last, draft)

    def _chunk_len(self, sequence: Sequence, budget: int) -> int:
        limit = self._config.max_prefill_chunk
        num_tokens = min(sequence.num_new_tokens, budget)
        return num_tokens if limit is None else min(num_tokens, limit)

    def _preempt(self, victim: Sequence, draft: _DraftPlan) -> None:
        """Preemption by recompute: all blocks back, all known tokens to be computed again."""
        draft.drop(victim)
        draft.num_preempted += 1
        self._leave_batch(victim)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        victim.transition(SequenceStatus.WAITING)
        self.waiting.add(victim)

    def _admit(self, draft: _DraftPlan) -> None:
        """Let waiting sequences join, oldest first.

        One joins only when its whole known length fits beside what the running ones are about to need, so
        that nobody is admitted only to be preempted. One that doesn't fit lets others pass, `max_num_skips`
        times; then nobody passes it.
        """
        if not self.waiting or not self._free_slots:
            return
        if self._config.batching is BatchingPolicy.STATIC and not self.running:
            self._static_places = min(self._config.max_num_seqs, len(self.waiting))
        reserved = sum(self._num_blocks_soon(sequence) for sequence in self.running)
        passed: list[Sequence] = []
        is_barred = False
        for sequence in self.waiting:
            available = self._kv.num_available_blocks - reserved
            if not self._free_slots or draft.budget == 0 or not self._may_join():
                break
            if is_barred or (available <= 0 and self.running):
                break
            if sequence.is_waiting_for_leader:
                continue
            match = self._match_prefix(sequence)
            needed = self._kv.num_missing_blocks(sequence.sequence_id, len(sequence.token_ids))
            if needed - len(match.block_ids) + match.num_unused > available:
                self._static_places = 0
                passed.append(sequence)
                is_barred = sequence.num_skips >= self._config.max_num_skips
                continue
            for other in passed:
                other.num_skips += 1
                is_barred = is_barred or other.num_skips >= self._config.max_num_skips
            self._join_batch(sequence, match)
            self._grow(sequence, draft)
            if sequence.status is not SequenceStatus.RUNNING:
                raise IntegrityError(f"sequence {sequence.sequence_id} was found to fit and then did not")
            reserved += self._num_blocks_soon(sequence)

    def _num_blocks_soon(self, sequence: Sequence) -> int:
        """Blocks that a running sequence still needs for what is known and one block's worth of growth."""
        soon = min(len(sequence.token_ids) + self._kv.layout.block_size, sequence.max_len)
        return max(0, self._kv.num_missing_blocks(sequence.sequence_id, soon))

    def _may_join(self) -> bool:
        return self._config.batching is BatchingPolicy.CONTINUOUS or self._static_places > 0

    def _sharing_key(self, sequence: Sequence) -> str | None:
        """Under which key a sequence shares KV; None when it shares none."""
        request = sequence.request
        if self._prefix_caching and request.uses_prefix_cache:
            return f"shared {request.isolation_key}"
        # The sequences of one request share its prompt, whatever it wants of others.
        return f"private {request.request_id}" if request.best_of > 1 else None

    def _match_prefix(self, sequence: Sequence) -> PrefixMatch:
        key = self._sharing_key(sequence)
        # Prompt logprobs come out of the computation that a match would save.
        if key is None or sequence.num_prompt_logprobs is not None:
            return NO_MATCH
        return self._kv.match_prefix(sequence.sequence_id, sequence.token_ids, key)

    def _join_batch(self, sequence: Sequence, match: PrefixMatch) -> None:
        self._kv.adopt(sequence.sequence_id, match)
        sequence.num_computed_tokens = match.num_tokens
        if sequence.first_scheduled_s is None:
            # What it finds of its own after a preemption is no gift of others.
            sequence.num_cached_tokens = match.num_tokens
        self.waiting.remove(sequence)
        sequence.transition(SequenceStatus.RUNNING)
        sequence.slot = heappop(self._free_slots)
        self.running.add(sequence)
        self._static_places -= 1

    def _leave_batch(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._kv.free(sequence.sequence_id)
        if sequence.slot is not None:
            heappush(self._free_slots, sequence.slot)
            sequence.slot = None

    def _rows(self, draft: _DraftPlan, now_s: float) -> list[ScheduledSequence]:
        rows = []
        for sequence, num_tokens in draft.num_tokens_of.items():
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = now_s
            request, first = sequence.request, sequence.num_computed_tokens
            is_sampled = first + num_tokens == len(sequence.token_ids)
            needs_history = request.sampling.needs_history or sequence.num_prompt_logprobs is not None
            rows.append(
                ScheduledSequence(
                    sequence_id=sequence.sequence_id,
                    first_position=first,
                    token_ids=tuple(sequence.token_ids[first : first + num_tokens]),
                    num_draft_tokens=0,
                    block_ids=self._kv.block_ids(sequence.sequence_id),
                    is_sampled=is_sampled,
                    sampling=request.sampling,
                    index=sequence.index,
                    num_prompt_tokens=sequence.num_prompt_tokens,
                    known_token_ids=tuple(sequence.token_ids) if needs_history else (),
                    suppressed_token_ids=sequence.suppressed_token_ids,
                    num_logprobs=sequence.num_logprobs,
                    num_prompt_logprobs=sequence.num_prompt_logprobs,
                    constraint=sequence.row_constraint if is_sampled else None,
                )
            )
        return rows


class _DraftPlan:
    """A plan while it is being made: who gets how many tokens, and what is left of the budget."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_tokens_of: dict[Sequence, int] = {}
        self.num_preempted = 0

    def take(self, sequence: Sequence, num_tokens: int) -> None:
        self.num_tokens_of[sequence] = num_tokens
        self.budget -= num_tokens

    def drop(self, sequence: Sequence) -> None:
        self.budget += self.num_tokens_of.pop(sequence, 0)
