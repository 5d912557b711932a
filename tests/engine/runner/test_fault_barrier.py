import pytest

from headrace.engine.errors import EngineDead
from headrace.engine.runner.fault_barrier import FaultBarrier
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.scheduling.ahead import row_behind
from headrace.engine.scheduling.plan import RowResult, ScheduledSequence, StepPlan, StepResult
from headrace.engine.sequence import SequenceId
from tests.support.blocking import Blocking
from tests.support.fake_runner import expected_output, make_fake_model
from tests.support.faults import Panic
from tests.support.requests import GREEDY
from tests.support.staged_runner import StagedRunner


def make_row(number: int, *, is_sampled: bool = True) -> ScheduledSequence:
    return ScheduledSequence(
        sequence_id=SequenceId(number),
        first_position=0,
        token_ids=(number,),
        num_draft_tokens=0,
        block_ids=(number,),
        is_sampled=is_sampled,
        sampling=SamplingParams(temperature=0.0),
    )


def make_plan(*numbers: int, **options: bool) -> StepPlan:
    return StepPlan(0, tuple(make_row(number, **options) for number in numbers))


class ScriptedRunner(Blocking):
    """Draws 10 x number; fails as told."""

    def __init__(self, *, bad=(), max_rows=99, answer=None):
        self.bad = set(bad)
        self.max_rows = max_rows
        self.answer = answer
        self.num_rows_of_calls = []

    def execute(self, plan):
        self.num_rows_of_calls.append(len(plan.rows))
        if len(plan.rows) > self.max_rows:
            raise MemoryError
        if self.bad & {row.sequence_id for row in plan.rows}:
            raise RuntimeError("secret prompt")
        if self.answer is not None:
            return self.answer
        return StepResult(tuple(RowResult((10 * row.sequence_id,)) for row in plan.rows))

    def close(self):
        self.num_rows_of_calls.append(-1)


def test_a_healthy_step_is_run_once_and_passed_on():
    runner = ScriptedRunner()
    result = FaultBarrier(runner).advance(make_plan(1, 2))
    assert result.rows == (RowResult((10,)), RowResult((20,)))
    assert runner.num_rows_of_calls == [2]


def test_only_the_row_that_raises_alone_fails():
    result = FaultBarrier(ScriptedRunner(bad={2})).advance(make_plan(1, 2, 3))
    assert [row.token_ids for row in result.rows] == [(10,), (), (30,)]
    assert [row.failure is None for row in result.rows] == [True, False, True]
    assert result.rows[1].failure == "the model step failed (RuntimeError)"


def test_a_batch_too_big_for_memory_is_run_in_parts():
    runner = ScriptedRunner(max_rows=1)
    result = FaultBarrier(runner).advance(make_plan(1, 2, 3))
    assert [row.token_ids for row in result.rows] == [(10,), (20,), (30,)]
    assert runner.num_rows_of_calls == [3, 1, 1, 1]


@pytest.mark.parametrize(
    ("answer", "is_sampled"),
    [
        (StepResult(()), True),
        (StepResult((RowResult((1,)), RowResult((2,)))), True),
        (StepResult((RowResult(),)), True),
        (StepResult((RowResult((1,)),)), False),
    ],
)
def test_an_answer_of_the_wrong_shape_is_a_failure(answer, is_sampled):
    result = FaultBarrier(ScriptedRunner(answer=answer)).advance(make_plan(1, is_sampled=is_sampled))
    assert result.rows == (RowResult(failure="the model step failed (ValueError)"),)


def test_a_runner_that_can_run_nothing_again_and_again_is_declared_dead():
    runner = ScriptedRunner(max_rows=0)
    barrier = FaultBarrier(runner, max_failed_steps=3)
    barrier.advance(make_plan(1, 2))
    barrier.advance(make_plan(1))
    with pytest.raises(EngineDead, match="3 steps in a row"):
        barrier.advance(make_plan(2))


def test_one_healthy_row_resets_the_count():
    runner = ScriptedRunner(max_rows=0)
    barrier = FaultBarrier(runner, max_failed_steps=2)
    for _ in range(5):
        runner.max_rows = 0
        barrier.advance(make_plan(1))
        runner.max_rows = 99
        barrier.advance(make_plan(1, 2))


def test_requests_that_the_runner_can_not_run_never_make_it_broken():
    runner = ScriptedRunner(bad={1})
    barrier = FaultBarrier(runner, max_failed_steps=2)
    for _ in range(5):
        assert barrier.advance(make_plan(1)).rows[0].failure == "the model step failed (RuntimeError)"
    # The step, its row alone, and a step that nobody asked for.
    assert runner.num_rows_of_calls == [1, 1, 1] * 5


def test_rows_that_were_computed_and_refused_never_make_the_runner_broken():
    refused = StepResult((RowResult(failure="nothing is left to draw", is_own_doing=True),))
    barrier = FaultBarrier(ScriptedRunner(answer=refused), max_failed_steps=2)
    for _ in range(5):
        assert barrier.advance(make_plan(1)) == refused


def test_closing_closes_the_runner():
    runner = ScriptedRunner()
    FaultBarrier(runner).close()
    assert runner.num_rows_of_calls == [-1]


PROMPTS = ((5, 6, 7), (8,), (9, 9))


def first_plan(step=0):
    rows = (
        ScheduledSequence(SequenceId(i), 0, prompt, 0, (1 + 2 * i, 2 + 2 * i), True, GREEDY)
        for i, prompt in enumerate(PROMPTS)
    )
    return StepPlan(step, tuple(rows))


def plan_behind(plan):
    rows = (row_behind(row, i, row.block_ids) for i, row in enumerate(plan.rows))
    return StepPlan(plan.step + 1, tuple(rows), follows=plan.step)


FIRST = first_plan()
SECOND = plan_behind(FIRST)
THIRD = plan_behind(SECOND)


def failing_once(*stages):
    """Fails at each of these stages of a step, the first time."""
    left = set(stages)

    def on(stage, plan):
        if (stage, plan.step) in left:
            left.remove((stage, plan.step))
            raise RuntimeError(f"{stage} of step {plan.step}")

    return on


def tokens_of(barrier, plans=((FIRST, SECOND), (THIRD,), ())):
    """What is drawn in three steps that are advanced like this, sequence by sequence."""
    results = [barrier.advance(*each) for each in plans]
    return [
        [result.rows[i].token_ids[0] if result.rows[i].token_ids else None for result in results]
        for i in range(len(PROMPTS))
    ]


def staged(on=lambda stage, plan: None):
    return StagedRunner(make_fake_model(num_blocks=16).runner, on)


EXPECTED = [expected_output(prompt, 3) for prompt in PROMPTS]


def test_the_next_step_is_launched_before_the_last_one_is_fetched():
    runner = staged()
    assert tokens_of(FaultBarrier(runner)) == EXPECTED
    assert runner.log == [
        ("launch", 0),
        ("launch", 1),
        ("fetch", 0),
        ("launch", 2),
        ("fetch", 1),
        ("fetch", 2),
    ]


def test_what_was_launched_behind_a_step_that_fails_is_thrown_away_and_run_anew():
    runner = staged(failing_once(("fetch", 0)))
    barrier = FaultBarrier(runner)
    assert tokens_of(barrier) == EXPECTED
    rows_alone = [("launch", 0), ("fetch", 0)] * 3
    assert runner.log == [
        ("launch", 0),
        ("launch", 1),
        ("fetch", 0),
        ("fetch", 1),  # waited for, so that it writes no more
        *rows_alone,
        ("launch", 1),
        ("launch", 2),
        ("fetch", 1),
        ("fetch", 2),
    ]


@pytest.mark.parametrize(
    "stages",
    [
        [("launch", 0)],
        [("launch", 1)],
        [("fetch", 1)],
        [("launch", 2)],
        [("fetch", 0), ("fetch", 1)],
        [("fetch", 0), ("launch", 2)],
        [("launch", 1), ("fetch", 0)],
        [("launch", 1), ("fetch", 1)],
        [("launch", 1), ("launch", 2), ("fetch", 2)],
    ],
    ids=str,
)
def test_wherever_a_fault_strikes_the_tokens_are_those_without_it(stages):
    runner = staged(failing_once(*stages))
    assert tokens_of(FaultBarrier(runner)) == EXPECTED


def test_whoever_follows_a_row_that_has_failed_hurts_nobody():
    def on(stage, plan):
        if plan.step == 0 and any(row.sequence_id == 1 for row in plan.rows):
            raise RuntimeError("the second row, whenever")

    made = tokens_of(FaultBarrier(staged(on)))
    assert made[0] == EXPECTED[0]
    assert made[1][0] is None
    assert made[2] == EXPECTED[2]


def test_a_panic_at_a_launch_ahead_costs_that_launch_alone():
    def on(stage, plan):
        if (stage, plan.follows) == ("launch", 0):
            raise Panic

    assert tokens_of(FaultBarrier(staged(on))) == EXPECTED


def test_a_step_that_waits_to_be_fetched_is_dropped_when_the_barrier_is_closed():
    runner = staged()
    barrier = FaultBarrier(runner)
    barrier.advance(FIRST, SECOND)
    barrier.close()
    assert runner.log[-1] == ("fetch", 0)
