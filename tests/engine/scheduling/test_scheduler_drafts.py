"""Drafts take only what nobody else needs: blocks, tokens of a step, places."""

from __future__ import annotations

import pytest

from headrace.engine.config import BatchingPolicy, CacheLayout, SchedulerConfig, Speculation
from headrace.engine.kv.manager import KVCacheManager
from headrace.engine.scheduling.plan import RowResult, StepPlan
from headrace.engine.scheduling.scheduler import Scheduler
from headrace.engine.sequence import Sequence, SequenceId
from headrace.engine.speculative.speculator import Speculator
from tests.support.requests import speculating
from tests.support.scheduler_checks import MAX_DRAFTS, GuessingProposer
from tests.support.sequences import make_sequence


class Drafting:
    """A scheduler whose decoding sequences are offered drafts, none of which is ever right."""

    def __init__(
        self, *, num_blocks: int, num_drafts: int | None = MAX_DRAFTS, is_static: bool = False, **limits: int
    ) -> None:
        self.kv = KVCacheManager(CacheLayout(num_blocks + 1, 2))
        config = SchedulerConfig(
            batching=BatchingPolicy.STATIC if is_static else BatchingPolicy.CONTINUOUS,
            max_num_seqs=limits.get("max_num_seqs", 4),
            max_num_batched_tokens=limits.get("max_num_batched_tokens", 16),
            max_prefill_chunk=limits.get("max_prefill_chunk"),
        )
        speculator = Speculator(
            speculating(Speculation.PROMPT_LOOKUP, num_drafts),
            None if num_drafts is None else GuessingProposer(),
            lambda tokens, context: 1.0,
        )
        self.scheduler = Scheduler(config, self.kv, prefix_caching=False, speculator=speculator)
        self.num_steps = self.num_preemptions = 0

    def add(self, prompt_len: int, max_tokens: int) -> Sequence:
        sequence = make_sequence(prompt_len=prompt_len, max_tokens=max_tokens)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> dict[Sequence, int]:
        """Run one; how many drafts each of its rows had."""
        plan, num_preemptions = self.scheduler.schedule(self.num_steps, 0.0)
        self.num_steps += 1
        self.num_preemptions += num_preemptions
        assert plan is not None
        by_id = {sequence.sequence_id: sequence for sequence in self.scheduler.running}
        drafted = {by_id[row.sequence_id]: row.num_draft_tokens for row in plan.rows}
        self._take_in(plan, by_id)
        return drafted

    def _take_in(self, plan: StepPlan, by_id: dict[SequenceId, Sequence]) -> None:
        for row in plan.rows:
            sequence = by_id[row.sequence_id]
            run = (row.num_draft_tokens + 1000,) if row.is_sampled else ()
            sequence.token_ids += run
            outcome = RowResult(run, num_draft_tokens=row.num_draft_tokens)
            self.scheduler.computed.take_in(sequence, row, outcome, len(run))
            if len(sequence.token_ids) >= sequence.max_len:
                self.scheduler.finish(sequence)
        self.kv.check_integrity()


@pytest.mark.parametrize("num_spare", range(4))
def test_a_prompt_that_is_being_read_keeps_the_blocks_that_it_is_going_to_need(num_spare: int) -> None:
    """As many as are needed without drafts are enough; what is free beyond them is for drafts."""
    # Five blocks for the reader, and four for what the talker has said when the reader is through.
    h = Drafting(num_blocks=5 + 4 + num_spare, max_prefill_chunk=2)
    talker, reader = h.add(prompt_len=2, max_tokens=20), h.add(prompt_len=10, max_tokens=1)

    drafted = 0
    while not reader.is_finished:
        drafted += h.step().get(talker, 0)

    assert h.num_preemptions == 0
    assert h.num_steps == 5
    assert drafted > 0


@pytest.mark.parametrize("num_blocks", range(8, 16))
@pytest.mark.parametrize("others_tokens", range(1, 8))
def test_nobody_joins_later_or_gives_way_because_of_drafts(num_blocks: int, others_tokens: int) -> None:
    """Blocks that earlier drafts were given go back as soon as anybody else has a use for them."""
    courses = []
    for num_drafts in (None, MAX_DRAFTS):
        h = Drafting(num_blocks=num_blocks, num_drafts=num_drafts, max_num_batched_tokens=64)
        sequences = [h.add(2, 12), h.add(2, others_tokens)]
        h.step()
        h.step()
        sequences += [h.add(8, 3), h.add(3, others_tokens)]
        joined: list[tuple[int, bool]] = []
        drafted = 0
        while h.scheduler.running or h.scheduler.waiting:
            drafted += sum(h.step().values())
            joined += [(h.num_steps, each.first_scheduled_s is not None) for each in sequences]
        assert (drafted > 0) == (num_drafts is not None)
        courses.append((h.num_preemptions, joined))
    assert courses[0] == courses[1]
