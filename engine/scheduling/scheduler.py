"""Chooses, anew for every step, which tokens of which sequences are computed.

Iteration-level scheduling (Orca, OSDI '22) with chunked, stall-free prefill (Sarathi-Serve, OSDI '24).
There is no prefill phase and no decode phase: each sequence has known tokens and `num_computed_tokens`,
and every step lets the second catch up with the first under one token budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as List
from heapq import heapify, heappop, heappush
from itertools import islice

from headrace.engine.config import BatchingPolicy, SchedulerConfig, SpeculationConfig
from headrace.engine.errors import IntegrityError
from headrace.engine.kv.manager import NO_MATCH, KVCacheManager, PrefixMatch
from headrace.engine.scheduling.budget import LatencyBudget
from headrace.engine.scheduling.fairness import ClientLedger
from headrace.engine.scheduling.plan import DraftWork, RowResult, ScheduledSequence, StepLimits, StepPlan
from headrace.engine.scheduling.planning import PlanInProgress
from headrace.engine.scheduling.queue import SequenceQueue, WaitingQueue, rank_of
from headrace.engine.sequence import Request, Sequence, SequenceStatus
from headrace.engine.speculative.proposer import NO_DRAFTS
from headrace.engine.speculative.speculator import Speculator

_MAX_MISFITS = 16
"""So many waiting sequences that don't fit are looked at in one step; those behind them wait for the next."""


class Scheduler:
    """Owner of the waiting and the running sequences and of their places in the batch.

    Among running sequences a fixed rank decides, among waiting ones class, share and arrival (see `queue`).
    What holds whatever happens: a sequence loses its blocks only to one of better rank; one that has lost
    them comes back only when all that it knows fits again, beside what the others are about to need. So
    between two preemptions of one sequence somebody else has given up blocks, and the best of all always
    progresses.

    Args:
        config: limits of a step.
        kv: where blocks come from.
        prefix_caching: whether sequences share the KV of equal beginnings.
        budget: which latencies are promised; None promises none.
        speculator: who gets drafts; None gives none to anybody.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        *,
        prefix_caching: bool = True,
        budget: LatencyBudget | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        self.ledger = ClientLedger(config.client_weights)
        self.waiting = WaitingQueue(self.ledger, config.priority_ageing_s)
        self.running = SequenceQueue()
        self._config = config
        self._kv = kv
        self._prefix_caching = prefix_caching
        self._budget = budget or LatencyBudget()
        self._speculator = speculator or Speculator(
            SpeculationConfig(), None, self._budget.costs.seconds_of_decodes
        )
        self._limits = StepLimits(
            config.max_num_batched_tokens, config.max_num_seqs, config.max_prefill_chunk
        )
        self.num_computed_tokens = 0
        """Tokens of running sequences whose KV is valid, those of shared blocks once for each sequence."""
        self._free_batch_slots = list(range(config.max_num_seqs))
        heapify(self._free_batch_slots)
        self._static_places = 0
        self.due_s: float | None = None
        """When the next step is to be planned though nothing comes meanwhile: by then a static batch begins
        that is not full. None while none is waited for."""

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        sequence.rank = rank_of(sequence, self._config.priority_ageing_s)
        sequence.sharing_key = self._sharing_key(sequence.request)
        self.ledger.arrive(sequence.request.client)
        self.waiting.add(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence, wherever it stands; its place and its blocks are free at once. A second call does
        nothing.

        Never called while a step that may write to its blocks is under way.
        """
        if sequence.is_finished:
            return
        client = sequence.request.client
        if sequence.status is SequenceStatus.RUNNING:
            if not (self._prefix_caching and sequence.request.uses_prefix_cache):
                self._kv.withdraw(sequence.sequence_id)
            self._leave_batch(sequence)
            self._static_places = 0
        else:
            self.waiting.remove(sequence)
            self.ledger.stop_waiting(client)
        self.ledger.depart(client)
        self._kv.free(sequence.sequence_id, is_over=True)
        self._speculator.forget(sequence)
        sequence.transition(SequenceStatus.FINISHED)

    def schedule(self, step: int, now_s: float) -> tuple[StepPlan | None, int]:
        """Plan one step.

        Order: decodes of running sequences, best rank first, and drafts for them; then prefill of running
        ones; then waiting ones. A running sequence that can't grow makes the one of lowest rank give up its
        blocks.

        Args:
            step: its number.
            now_s: monotonic seconds, by which those that wait gain classes; noted in sequences that are
                scheduled for the first time.

        Returns:
            The plan (None when there is nothing to do before `due_s`) and how many sequences were preempted
            for it.

        Raises:
            IntegrityError: somebody waits, nobody runs, and still nothing can be planned.
        """
        self.due_s = None
        allowance = self._budget.begin_step(self.running, len(self.waiting), now_s)
        plan = PlanInProgress(self._limits, allowance)
        block_size, reading = self._kv.layout.block_size, []
        for sequence in self.running:
            place = sequence.num_computed_tokens
            if not sequence.is_decoding:
                reading.append(sequence)
            elif plan.num_tokens_left and (
                # The usual case: the block of the token before it has room for one more, or there is another.
                place % block_size or self._kv.allocate_slots(sequence.sequence_id, place + 1) is not None
            ):
                plan.take_decode(sequence)
            else:
                self._grow(sequence, plan)
        if plan.num_preempted == 0 and self._speculator.is_active:
            if self.waiting:
                self._reclaim_lookahead(plan)
            self._add_drafts(plan)
        for sequence in reading:
            self._grow(sequence, plan)
        if plan.num_preempted == 0:
            self._admit(plan, now_s)
        if not plan.num_tokens_of:
            if self.waiting and self.due_s is None:
                raise IntegrityError(
                    f"{len(self.waiting)} sequences wait, nobody runs, and none can be admitted"
                )
            return None, plan.num_preempted
        return StepPlan(step, plan.rows(self._kv, self._catch_up, now_s)), plan.num_preempted

    def take_in_decodes(self, sequences: List[Sequence]) -> None:
        """What `take_in` does, for sequences that have computed one token and got one, without any drafts."""
        block_size = self._kv.layout.block_size
        num_made: dict[str, int] = {}
        for sequence in sequences:
            sequence.num_computed_tokens = num_computed = sequence.num_computed_tokens + 1
            client = sequence.request.client
            num_made[client] = num_made.get(client, 0) + 1
            if num_computed % block_size == 0 and sequence.sharing_key is not None:
                self._kv.offer(sequence.sequence_id, sequence.token_ids, num_computed, sequence.sharing_key)
        self.num_computed_tokens += len(sequences)
        for client, num_tokens in num_made.items():
            self.ledger.charge_output(client, num_tokens)

    def take_in(
        self, sequence: Sequence, row: ScheduledSequence, outcome: RowResult, num_output_tokens: int
    ) -> None:
        """Count what a step has computed for a running sequence, and charge its client for what it has made.

        The sequence holds the tokens that it got already. The KV of drafts that were refused, or that stand
        behind the end, lies beyond what is counted.
        """
        if num_output_tokens:
            self.ledger.charge_output(sequence.request.client, num_output_tokens)
        num_before = sequence.num_computed_tokens
        if row.num_draft_tokens or outcome.num_draft_tokens:
            num_kept = row.known_end + outcome.num_accepted_tokens
            num_computed = min(num_kept, len(sequence.token_ids))
        else:
            num_computed = row.first_position + len(row.token_ids)
        sequence.num_computed_tokens = num_computed
        self.num_computed_tokens += num_computed - num_before
        if self._speculator.is_active:
            self._speculator.observe(sequence, row, outcome)
        key = sequence.sharing_key
        if key is not None and num_computed % self._kv.layout.block_size < num_computed - num_before:
            # At least one block has been filled: others may share it.
            self._kv.offer(sequence.sequence_id, sequence.token_ids, num_computed, key)

    def _grow(self, sequence: Sequence, plan: PlanInProgress) -> None:
        """Schedule the next tokens of a running sequence, at the expense of lower ones if need be."""
        num_tokens = plan.chunk_len(sequence)
        while num_tokens > 0 and sequence.status is SequenceStatus.RUNNING:
            if (
                self._kv.allocate_slots(sequence.sequence_id, sequence.num_computed_tokens + num_tokens)
                is not None
            ):
                plan.take(sequence, num_tokens)
                return
            if self._reclaim_lookahead(plan):
                continue
            # The lowest goes first, so the best always progresses: no request is larger than the pool.
            self._preempt(self.running.last, plan)

    def _add_drafts(self, plan: PlanInProgress) -> None:
        """Let sequences that decode have drafts, where nobody has to wait or give way for them."""
        decoding = list(plan.num_tokens_of)
        reading = [sequence for sequence in self.running if not sequence.is_decoding]
        # Prompts that are under way or wait get at least half of what is left.
        most = plan.num_tokens_left // 2 if reading or self.waiting else plan.num_tokens_left
        drafts_of = self._speculator.plan(decoding, most)
        if not drafts_of:
            return
        missing = (self._kv.num_missing_blocks(each.sequence_id, len(each.token_ids)) for each in reading)
        spare = self._kv.num_available_blocks - sum(max(0, number) for number in missing)
        is_awaited = bool(self.waiting) and bool(self._free_batch_slots)
        for sequence, drafts in drafts_of.items():
            num_tokens = sequence.num_computed_tokens + plan.num_tokens_of[sequence] + drafts.num_tokens
            needed = max(0, self._kv.num_missing_blocks(sequence.sequence_id, num_tokens))
            if is_awaited and needed > self._num_blocks_soon(sequence):
                # Those that it is about to need anyway are kept from whoever waits, others are not.
                continue
            if needed <= spare and self._kv.allocate_slots(sequence.sequence_id, num_tokens) is not None:
                spare -= needed
                plan.add_drafts(sequence, drafts)

    def _reclaim_lookahead(self, plan: PlanInProgress) -> int:
        """Take back the blocks that earlier drafts were given and that the next tokens don't need; returns
        how many."""
        if not self._speculator.is_active:
            return 0
        return sum(
            self._kv.free(
                sequence.sequence_id,
                num_kept_tokens=sequence.num_computed_tokens
                + max(1, plan.num_tokens_of.get(sequence, 0))
                + plan.drafts_of.get(sequence, NO_DRAFTS).num_tokens,
            )
            for sequence in self.running
        )

    def _preempt(self, victim: Sequence, plan: PlanInProgress) -> None:
        """Preemption by recompute: all blocks back, all known tokens to be computed again."""
        plan.drop(victim)
        plan.num_preempted += 1
        self._leave_batch(victim)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        victim.transition(SequenceStatus.WAITING)
        self.waiting.add(victim)
        self.ledger.wait(victim.request.client)

    def _admit(self, plan: PlanInProgress, now_s: float) -> None:
        """Let waiting sequences join, in their order.

        One joins only when its whole known length fits beside what the running ones are about to need, so
        that nobody is admitted only to be preempted. One that doesn't fit lets others pass, `max_num_skips`
        times; then nobody behind it passes.
        """
        if not self.waiting or not self._has_room(plan):
            return
        if self._config.batching is BatchingPolicy.STATIC and not self.running:
            self._open_static_batch(now_s)
        reserved = sum(self._num_blocks_soon(sequence) for sequence in self.running)
        passed: list[Sequence] = []
        is_barred = False
        for sequence in self._candidates(now_s):
            available = self._kv.num_available_blocks - reserved
            if not self._has_room(plan) or not self._may_join():
                break
            if is_barred or len(passed) == _MAX_MISFITS or (available <= 0 and self.running):
                break
            if sequence.is_waiting_for_leader:
                continue
            if not self._budget.may_join(sequence):
                break
            match = self._match_prefix(sequence)
            needed = self._kv.num_missing_blocks(sequence.sequence_id, len(sequence.token_ids))
            if needed - len(match.block_ids) + match.num_unused > available:
                self._static_places = 0
                passed.append(sequence)
                is_barred = sequence.num_skips >= self._config.max_num_skips
                continue
            if plan.chunk_len(sequence, match.num_tokens) == 0:
                break
            for other in passed:
                other.num_skips += 1
                is_barred = is_barred or other.num_skips >= self._config.max_num_skips
            self._join_batch(sequence, match)
            self._grow(sequence, plan)
            self._budget.join(sequence, now_s)
            if sequence.status is not SequenceStatus.RUNNING:
                raise IntegrityError(f"sequence {sequence.sequence_id} was found to fit and then did not")
            reserved += self._num_blocks_soon(sequence)

    def _candidates(self, now_s: float) -> Iterator[Sequence]:
        """Who waits, in order: those whose first token can still come in time before those that are late."""
        if self._budget.is_turn_of_late:
            yield from islice(self.waiting.in_order(now_s, late=True), 1)
        for sequence in self.waiting.in_order(now_s):
            if self._budget.is_late(sequence, now_s):
                self.waiting.put_off(sequence)
            else:
                yield sequence
        yield from self.waiting.in_order(now_s, late=True)

    def _has_room(self, plan: PlanInProgress) -> bool:
        """Whether one more sequence may have a place in the step, and a token."""
        return (
            bool(self._free_batch_slots)
            and plan.num_tokens_left > 0
            and len(self.running) < plan.limits.max_num_seqs
        )

    def _num_blocks_soon(self, sequence: Sequence) -> int:
        """Blocks that a running sequence still needs for what is known and one block's worth of growth."""
        soon = min(len(sequence.token_ids) + self._kv.layout.block_size, sequence.max_len)
        return max(0, self._kv.num_missing_blocks(sequence.sequence_id, soon))

    def _open_static_batch(self, now_s: float) -> None:
        """Give places to as many as wait, or to nobody yet if more would have room and may still come."""
        self._static_places = min(self._config.max_num_seqs, len(self.waiting))
        if self._static_places < self._config.max_num_seqs:
            due_s = min(each.arrival_s for each in self.waiting) + self._config.static_batch_wait_s
            if now_s < due_s:
                self.due_s, self._static_places = due_s, 0

    def _may_join(self) -> bool:
        return self._config.batching is BatchingPolicy.CONTINUOUS or self._static_places > 0

    def _sharing_key(self, request: Request) -> str | None:
        """Under which key a request's sequences share KV; None when they share none."""
        if self._prefix_caching and request.uses_prefix_cache:
            return f"shared {request.isolation_key}"
        # The sequences of one request share its prompt, whatever it wants of others.
        return f"private {request.request_id}" if request.best_of > 1 else None

    def _match_prefix(self, sequence: Sequence) -> PrefixMatch:
        key = sequence.sharing_key
        # Prompt logprobs come out of the computation that a match would save.
        if key is None or sequence.num_prompt_logprobs is not None:
            return NO_MATCH
        return self._kv.match_prefix(sequence.sequence_id, sequence.token_ids, key)

    def _join_batch(self, sequence: Sequence, match: PrefixMatch) -> None:
        self._kv.adopt(sequence.sequence_id, match)
        sequence.num_computed_tokens = match.num_tokens
        self.num_computed_tokens += match.num_tokens
        self._speculator.begin(sequence)
        client = sequence.request.client
        if sequence.first_scheduled_s is None:
            # What it finds of its own after a preemption is no gift of others, and what has to be computed
            # again is not its client's doing.
            sequence.num_cached_tokens = match.num_tokens
            self.ledger.charge_prompt(client, len(sequence.token_ids) - match.num_tokens)
        self.waiting.remove(sequence)
        self.ledger.stop_waiting(client)
        sequence.transition(SequenceStatus.RUNNING)
        sequence.batch_slot = heappop(self._free_batch_slots)
        self.running.add(sequence)
        self._static_places -= 1

    def _leave_batch(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.num_computed_tokens -= sequence.num_computed_tokens
        self._kv.free(sequence.sequence_id)
        if sequence.batch_slot is not None:
            heappush(self._free_batch_slots, sequence.batch_slot)
            sequence.batch_slot = None

    def _catch_up(self, sequence: Sequence, end_position: int) -> DraftWork | None:
        """What the draft model reads of a prompt beside the target."""
        if sequence.is_decoding or sequence.is_read_only:
            return None
        return self._speculator.catch_up(sequence, end_position, len(self.running))
