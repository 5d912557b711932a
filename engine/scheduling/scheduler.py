"""Chooses, anew for every step, which tokens of which sequences are computed.

Iteration-level scheduling (Orca, OSDI '22) with chunked, stall-free prefill (Sarathi-Serve, OSDI '24).
There is no prefill phase and no decode phase: each sequence has known tokens and `num_computed_tokens`,
and every step lets the second catch up with the first under one token budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import islice

from headrace.engine.config import SchedulerConfig, SpeculationConfig
from headrace.engine.errors import IntegrityError
from headrace.engine.kv.manager import NO_MATCH, KVCacheManager, PrefixMatch
from headrace.engine.scheduling.budget import LatencyBudget
from headrace.engine.scheduling.computed_tokens import ComputedTokens
from headrace.engine.scheduling.fairness import ClientLedger
from headrace.engine.scheduling.lookahead import Lookahead
from headrace.engine.scheduling.parking import Parking
from headrace.engine.scheduling.plan import DraftWork, StepLimits, StepPlan
from headrace.engine.scheduling.planning import PlanInProgress
from headrace.engine.scheduling.queue import SequenceQueue, WaitingQueue, rank_of, sharing_key_of
from headrace.engine.scheduling.static_batch import StaticBatch
from headrace.engine.sequence import Sequence, SequenceStatus
from headrace.engine.speculative.speculator import Speculator

_MAX_MISFITS = 16
"""So many waiting sequences that don't fit are looked at in one step; those behind them wait for the next."""


class Scheduler:
    """Owner of the waiting and the running sequences and of their places in the batch.

    Among running sequences a fixed rank decides, among waiting ones class, share and arrival (see `queue`).
    What holds whatever happens: a running sequence loses its blocks only to one of better rank; one that has
    lost them comes back only when all that it knows fits again, beside what the others are about to need. So
    between two preemptions of one sequence somebody else has given up blocks, and the best of all always
    progresses. A sequence that is paused loses its blocks to whoever needs them, and has no place in the
    batch; the other rules know nothing of it until it waits again.

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
        self.parking = Parking(kv, config.paused_hold_s)
        self._config = config
        self._kv = kv
        self._prefix_caching = prefix_caching
        self._budget = budget or LatencyBudget()
        self._speculator = speculator or Speculator(
            SpeculationConfig(), None, self._budget.costs.seconds_of_decodes
        )
        self._lookahead = Lookahead(kv, self._speculator)
        self.limits = StepLimits(config.max_num_batched_tokens, config.max_num_seqs, config.max_prefill_chunk)
        self.computed = ComputedTokens(kv, self.ledger, self._speculator)
        self._free_batch_slots = list(range(config.max_num_seqs))
        heapify(self._free_batch_slots)
        self._batch = StaticBatch(config)
        self.due_s: float | None = None
        """When the next step is to be planned though nothing comes meanwhile: by then a static batch begins
        that is not full, or a paused sequence has held its blocks for long enough. None for never."""

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        sequence.rank = rank_of(sequence, self._config.priority_ageing_s)
        sequence.sharing_key = sharing_key_of(sequence.request, prefix_caching=self._prefix_caching)
        self.ledger.arrive(sequence.request.client)
        self.waiting.add(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence, wherever it stands; its place is free at once, and so are the blocks that no step
        under way may write to. A second call does nothing.
        """
        if sequence.is_finished:
            return
        client = sequence.request.client
        if not (self._prefix_caching and sequence.request.uses_prefix_cache):
            self._kv.withdraw(sequence.sequence_id)
        if sequence.status is SequenceStatus.RUNNING:
            self._leave_batch(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
            self.ledger.stop_waiting(client)
        self.parking.forget(sequence)
        self.computed.note_end(sequence)
        self.ledger.depart(client)
        self._kv.free(sequence.sequence_id, is_over=True)
        self._speculator.forget(sequence)
        sequence.transition(SequenceStatus.FINISHED)

    def pause(self, sequence: Sequence, now_s: float) -> None:
        """Compute nothing for a sequence until `resume`. It leaves the batch, or the queue, and holds its
        blocks until others need them. Nothing happens to one that is paused or over.
        """
        if sequence.status is SequenceStatus.RUNNING:
            self._leave_batch(sequence)
            # What drafts were given, nobody is going to write to.
            self._kv.free(sequence.sequence_id, num_kept_tokens=sequence.num_computed_tokens)
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
            sequence.is_late = False  # When it goes on, it may not be.
            self.ledger.stop_waiting(sequence.request.client)
        else:
            return
        self.parking.pause(sequence, now_s)
        sequence.transition(SequenceStatus.PAUSED)

    def resume(self, sequence: Sequence, now_s: float) -> None:
        """Let a paused sequence wait for a place in the batch, where its arrival puts it. Nothing happens to
        one that isn't paused."""
        if sequence.status is not SequenceStatus.PAUSED:
            return
        sequence.note_pause(now_s - self.parking.resume(sequence))
        sequence.transition(SequenceStatus.WAITING)
        self.waiting.add(sequence)
        self.ledger.come_back(sequence.request.client)

    def schedule(self, step: int, now_s: float) -> tuple[StepPlan | None, int]:
        """Plan one step.

        Order: decodes of running sequences, best rank first, and drafts for them; then prefill of running
        ones; then waiting ones. A running sequence that can't grow makes one that has left the batch give up
        its blocks, and with none left the running one of lowest rank.

        Args:
            step: its number.
            now_s: monotonic seconds, by which those that wait gain classes; noted in sequences that are
                scheduled for the first time.

        Returns:
            The plan (None when there is nothing to do before `due_s`) and how many sequences have lost their
            blocks meanwhile.

        Raises:
            IntegrityError: somebody waits, nobody runs, and still nothing can be planned.
        """
        self.due_s = None
        allowance = self._budget.begin_step(self.running, len(self.waiting), now_s)
        plan = PlanInProgress(self.limits, allowance)
        for sequence in self.parking.overdue(now_s):
            self._strip(sequence, plan)
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
                self._lookahead.reclaim(plan, self.running)
            is_awaited = bool(self.waiting) and bool(self._free_batch_slots)
            self._lookahead.add_drafts(plan, reading, has_waiting=bool(self.waiting), is_awaited=is_awaited)
        plan.end_decodes()
        for sequence in reading:
            self._grow(sequence, plan)
        if plan.num_preempted == 0:
            self.admit(plan, now_s)
        if not plan.num_tokens_of:
            if self.waiting and self.due_s is None:
                raise IntegrityError(
                    f"{len(self.waiting)} sequences wait, nobody runs, and none can be admitted"
                )
            moments = (self.due_s, self.parking.due_s)
            self.due_s = min((due_s for due_s in moments if due_s is not None), default=None)
            return None, plan.num_preempted + plan.num_stripped
        rows = plan.rows(self._kv, self._catch_up, now_s)
        return StepPlan(step, rows), plan.num_preempted + plan.num_stripped

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
            if self._lookahead.reclaim(plan, self.running):
                continue
            parked = self.parking.victim(among_waiting=True)
            if parked is not None:
                self._strip(parked, plan)
                continue
            # The lowest goes first, so the best always progresses: no request is larger than the pool.
            self._preempt(self.running.last, plan)

    def _preempt(self, victim: Sequence, plan: PlanInProgress) -> None:
        """Preemption by recompute: all blocks back, all known tokens to be computed again."""
        plan.drop(victim)
        plan.num_preempted += 1
        self._leave_batch(victim)
        self._give_up_blocks(victim)
        victim.transition(SequenceStatus.WAITING)
        self.waiting.add(victim)
        self.ledger.wait(victim.request.client)

    def _strip(self, sequence: Sequence, plan: PlanInProgress) -> None:
        """Let one that has left the batch lose the blocks that it still holds."""
        plan.num_stripped += 1
        self.parking.leave(sequence)
        self._give_up_blocks(sequence)

    def _give_up_blocks(self, sequence: Sequence) -> None:
        self._kv.free(sequence.sequence_id)
        self.computed.lose(sequence)
        sequence.num_preemptions += 1

    def admit(self, plan: PlanInProgress, now_s: float) -> None:
        """Let waiting sequences join a plan, in their order.

        One joins only when its whole known length fits beside what the running ones are about to need, so
        that nobody is admitted only to be preempted. One that doesn't fit lets others pass, `max_num_skips`
        times; then nobody behind it passes.
        """
        if not self.waiting or not plan.has_room(len(self.running)):
            return
        if not self.running:
            self.due_s = self._batch.open(self.waiting, now_s)
        reserved = sum(self._lookahead.num_blocks_soon(sequence) for sequence in self.running)
        passed: list[Sequence] = []
        is_barred = False
        for sequence in self._candidates(now_s):
            available = self._kv.num_available_blocks - reserved
            if not plan.has_room(len(self.running)) or not self._batch.may_join:
                break
            is_full = available <= 0 and not self.parking.is_holding
            if is_barred or len(passed) == _MAX_MISFITS or (is_full and self.running):
                break
            if sequence.is_waiting_for_leader or sequence.sequence_id in self._kv.under_way:
                continue
            if not self._budget.may_join(sequence):
                break
            match = self._room_for(sequence, reserved, plan)
            if match is None:
                self._batch.close()
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
            reserved += self._lookahead.num_blocks_soon(sequence)

    def _room_for(self, sequence: Sequence, reserved: int, plan: PlanInProgress) -> PrefixMatch | None:
        """What a waiting sequence finds of its beginning, once there is room for all that it knows; None if
        there isn't. For its sake those that are paused give up their blocks; and those that wait, too, where
        it is to be passed by nobody, or is let in before all.

        Args:
            reserved: blocks that are not for it.
        """
        among_waiting = not self.running or sequence.num_skips >= self._config.max_num_skips
        may_strip = False
        while True:
            match = self._match_prefix(sequence)
            needed = self._kv.num_missing_blocks(sequence.sequence_id, len(sequence.token_ids))
            missing = needed - len(match.block_ids) + match.num_unused
            missing -= self._kv.num_available_blocks - reserved
            if missing <= 0:
                return match
            # Nobody loses anything for one that would not fit even then.
            may_strip = may_strip or self.parking.can_give(
                missing, match, among_waiting=among_waiting, but=sequence
            )
            parked = self.parking.victim(among_waiting=among_waiting, but=sequence) if may_strip else None
            if parked is None or parked.sequence_id in self._kv.under_way:
                # What a step under way may write to comes free when that one has returned, and no sooner:
                # nobody else loses anything in its place.
                return None
            self._strip(parked, plan)

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

    def _match_prefix(self, sequence: Sequence) -> PrefixMatch:
        key = sequence.sharing_key
        # Prompt logprobs come out of the computation that a match would save.
        if key is None or sequence.num_prompt_logprobs is not None or self.parking.holds(sequence):
            return NO_MATCH
        return self._kv.match_prefix(sequence.sequence_id, sequence.token_ids, key)

    def _join_batch(self, sequence: Sequence, match: PrefixMatch) -> None:
        if self.parking.holds(sequence):
            self.parking.leave(sequence)
        else:
            self._kv.adopt(sequence.sequence_id, match)
            self.computed.adopt(sequence, match.num_tokens)
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
        self._batch.join()

    def _leave_batch(self, sequence: Sequence) -> None:
        """Its place is free; its blocks are not."""
        self.running.remove(sequence)
        self._batch.close()
        if sequence.batch_slot is not None:
            heappush(self._free_batch_slots, sequence.batch_slot)
            sequence.batch_slot = None

    def _catch_up(self, sequence: Sequence, end_position: int) -> DraftWork | None:
        """What the draft model reads of a prompt beside the target."""
        if sequence.is_decoding or sequence.is_read_only:
            return None
        return self._speculator.catch_up(sequence, end_position, len(self.running))
