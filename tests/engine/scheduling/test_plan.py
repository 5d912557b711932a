from __future__ import annotations

from headrace.engine.scheduling.plan import (
    DraftWork,
    RowResult,
    ScheduledSequence,
    StepPlan,
    StepResult,
    as_run,
)
from headrace.engine.sequence import SequenceId
from tests.support.requests import GREEDY


def row(number: int, num_drafts: int | None) -> ScheduledSequence:
    work = None if num_drafts is None else DraftWork(4, (9,), num_drafts)
    return ScheduledSequence(SequenceId(number), 4, (9,), 0, (1, 2), True, GREEDY, draft=work)


def test_a_step_counts_as_what_was_run_where_fewer_drafts_were_made_than_planned() -> None:
    plan = StepPlan(3, (row(1, 4), row(2, None), row(3, 2), row(4, 0)))
    assert plan.num_tokens == 10
    result = StepResult(
        (
            RowResult((1,), num_draft_tokens=1),
            RowResult((1,)),
            RowResult((1, 2, 3), num_draft_tokens=2),
            RowResult((1,)),
        )
    )
    run = as_run(plan, result)
    assert run.step == 3
    assert [each.num_planned_tokens for each in run.rows] == [2, 1, 3, 1]


def test_a_step_that_went_as_planned_stays_as_it_is() -> None:
    plan = StepPlan(3, (row(1, 2), row(2, None)))
    result = StepResult((RowResult((1,), num_draft_tokens=2), RowResult((1,))))
    assert as_run(plan, result) is plan
