"""What `scheduler_machine` checks of a plan, and who proposes drafts in it."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.engine.config import BatchingPolicy, SchedulerConfig
from headrace.engine.kv.manager import KVCacheManager
from headrace.engine.scheduling.plan import DraftWork, RowResult, ScheduledSequence
from headrace.engine.scheduling.scheduler import Scheduler
from headrace.engine.sequence import Sequence, SequenceId, SequenceStatus
from headrace.engine.speculative.proposer import Drafts
from tests.support.fake_runner import half_right_draft

MAX_DRAFTS = 4


class GuessingProposer:
    """Proposes what `half_right_draft` says, so that every number of kept drafts occurs."""

    learns_by_judging = False
    seconds_per_draft = 0.0
    usual_chance = 0.5

    def note_time(self, seconds: float, num_drafts: int) -> None:
        raise AssertionError("nobody took any time to propose")

    def note_catch_up(self, seconds: float, num_tokens: int, num_drafts: int) -> None:
        raise AssertionError("there is nothing to catch up with")

    def seconds_to_catch_up(self, sequence: Sequence) -> float:
        return 0.0

    def offer(self, sequence: Sequence, most: int, least_gain: float = 0.0) -> tuple[float, ...]:
        return (0.5,) * min(most, MAX_DRAFTS)

    def drafts(self, sequence: Sequence, num_tokens: int, least_chance: float = 0.0) -> Drafts:
        drafts: list[int] = []
        for _ in range(num_tokens):
            drafts.append(half_right_draft([*sequence.token_ids, *drafts], sequence.request.sampling.seed))
        return Drafts(tuple(drafts))

    def catch_up(self, sequence: Sequence, end_position: int) -> DraftWork | None:
        return None

    def observe(self, sequence: Sequence, row: ScheduledSequence, outcome: RowResult) -> None:
        assert outcome.num_draft_tokens == row.num_draft_tokens

    def begin(self, sequence: Sequence) -> None:
        assert sequence.status is not SequenceStatus.FINISHED

    def forget(self, sequence: Sequence) -> None:
        assert sequence.status is not SequenceStatus.FINISHED


class Before:
    """How things stood before a step was planned."""

    def __init__(self, scheduler: Scheduler, clients: Iterable[str], now_s: float) -> None:
        waiting = scheduler.waiting
        self.step_s = now_s
        self.running = list(scheduler.running)
        self.parked = [s for s in (*scheduler.parking.paused, *waiting) if s.num_computed_tokens]
        self.classes = {s.sequence_id: waiting.class_of(s, now_s) for s in waiting}
        self.skips = {s.sequence_id: s.num_skips for s in waiting}
        self.led = {s.sequence_id for s in waiting if s.is_waiting_for_leader}
        self.fresh = [s for s in waiting if s.first_scheduled_s is None]
        self.counters = {client: scheduler.ledger.counter(client) for client in clients}


def check_preemptions(
    kv: KVCacheManager, num_preempted: int, planned: set[SequenceId], before: Before
) -> None:
    """Blocks of those that run go to better ranks only, and to nobody while others hold some that don't run;
    the best of all goes on in every step."""
    preempted = [s for s in before.running if s.status is SequenceStatus.WAITING]
    kept = [s for s in before.running if s.status is SequenceStatus.RUNNING]
    stripped = [s for s in before.parked if not s.num_computed_tokens]
    # One that is stripped may find its beginning again in the cache, and join in the same step.
    assert len(preempted) + len(stripped) <= num_preempted <= len(preempted) + len(before.parked)
    if preempted:
        assert len(stripped) == len(before.parked), "others held blocks that did not run"
    for victim in preempted:
        assert all(other.rank < victim.rank for other in kept)
        assert victim.num_computed_tokens == 0
        assert kv.block_ids(victim.sequence_id) == ()
    if before.running:
        best = min(before.running, key=lambda s: s.rank)
        assert best.sequence_id in planned, "the best of all stands still"


def check_admissions(
    scheduler: Scheduler,
    config: SchedulerConfig,
    num_preempted: int,
    before: Before,
    *,
    is_batch_closed: bool,
) -> None:
    """Whoever was passed was passed for its size, and no oftener than is allowed."""
    admitted = [s for s in scheduler.running if s.sequence_id in before.classes]
    is_pressed = any(s.status is SequenceStatus.WAITING for s in before.running)
    assert not admitted or not is_pressed, "took blocks that somebody had just been made to give up"
    if config.batching is BatchingPolicy.STATIC and before.running and admitted:
        assert not is_batch_closed
    for waiting in scheduler.waiting:
        assert waiting.num_skips <= config.max_num_skips
        if waiting.sequence_id not in before.classes or waiting.is_waiting_for_leader:
            continue
        mine = before.classes[waiting.sequence_id]
        for other in admitted:
            theirs = before.classes[other.sequence_id]
            is_mine = other.request.client == waiting.request.client
            goes_behind = theirs < mine or (
                theirs == mine and is_mine and other.sequence_id > waiting.sequence_id
            )
            was_passed = waiting.num_skips > before.skips[waiting.sequence_id]
            assert not goes_behind or was_passed or waiting.sequence_id in before.led


def check_wait(scheduler: Scheduler, config: SchedulerConfig, now_s: float) -> None:
    """Nothing was planned though somebody is there: a static batch waits to be filled, and not for long."""
    assert config.batching is BatchingPolicy.STATIC
    assert not scheduler.running
    assert len(scheduler.waiting) < config.max_num_seqs
    oldest_s = min(sequence.arrival_s for sequence in scheduler.waiting)
    assert scheduler.due_s == oldest_s + config.static_batch_wait_s > now_s


def check_sequence(kv: KVCacheManager, sequence: Sequence, num_ends: int) -> None:
    """What must hold of a sequence between steps, live or over."""
    table = kv.block_ids(sequence.sequence_id)
    assert num_ends == sequence.is_finished
    assert 0 <= sequence.num_computed_tokens <= len(sequence.token_ids) <= sequence.max_len
    if sequence.status is SequenceStatus.RUNNING:
        known = len(sequence.token_ids)
        least = max(1, kv.layout.num_blocks_for(sequence.num_computed_tokens))
        assert least <= len(table) <= kv.layout.num_blocks_for(known + MAX_DRAFTS)
    else:
        assert sequence.batch_slot is None
        # One that was paused may still have the blocks of what it has computed, and no more.
        num_held = 0 if sequence.is_finished else sequence.num_computed_tokens
        assert len(table) == kv.layout.num_blocks_for(num_held)
    assert sequence.num_cached_tokens < sequence.num_prompt_tokens
    assert sequence.num_cached_tokens % kv.layout.block_size == 0
