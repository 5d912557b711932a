import pytest

from headrace.engine.errors import EngineDead
from headrace.engine.runner.fault_barrier import FaultBarrier
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.scheduling.plan import RowResult, ScheduledSequence, StepPlan, StepResult
from headrace.engine.sequence import SequenceId


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


class ScriptedRunner:
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
    result = FaultBarrier(runner).execute(make_plan(1, 2))
    assert result.rows == (RowResult((10,)), RowResult((20,)))
    assert runner.num_rows_of_calls == [2]


def test_only_the_row_that_raises_alone_fails():
    result = FaultBarrier(ScriptedRunner(bad={2})).execute(make_plan(1, 2, 3))
    assert [row.token_ids for row in result.rows] == [(10,), (), (30,)]
    assert [row.failure is None for row in result.rows] == [True, False, True]
    assert result.rows[1].failure == "the model step failed (RuntimeError)"


def test_a_batch_too_big_for_memory_is_run_in_parts():
    runner = ScriptedRunner(max_rows=1)
    result = FaultBarrier(runner).execute(make_plan(1, 2, 3))
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
    result = FaultBarrier(ScriptedRunner(answer=answer)).execute(make_plan(1, is_sampled=is_sampled))
    assert result.rows == (RowResult(failure="the model step failed (ValueError)"),)


def test_a_runner_that_can_run_nothing_again_and_again_is_declared_dead():
    runner = ScriptedRunner(max_rows=0)
    barrier = FaultBarrier(runner, max_failed_steps=3)
    barrier.execute(make_plan(1, 2))
    barrier.execute(make_plan(1))
    with pytest.raises(EngineDead, match="3 steps in a row"):
        barrier.execute(make_plan(2))


def test_one_healthy_row_resets_the_count():
    runner = ScriptedRunner(max_rows=0)
    barrier = FaultBarrier(runner, max_failed_steps=2)
    for _ in range(5):
        runner.max_rows = 0
        barrier.execute(make_plan(1))
        runner.max_rows = 99
        barrier.execute(make_plan(1, 2))


def test_requests_that_the_runner_can_not_run_never_make_it_broken():
    runner = ScriptedRunner(bad={1})
    barrier = FaultBarrier(runner, max_failed_steps=2)
    for _ in range(5):
        assert barrier.execute(make_plan(1)).rows[0].failure == "the model step failed (RuntimeError)"
    # The step, its row alone, and a step that nobody asked for.
    assert runner.num_rows_of_calls == [1, 1, 1] * 5


def test_rows_that_were_computed_and_refused_never_make_the_runner_broken():
    refused = StepResult((RowResult(failure="nothing is left to draw", is_own_doing=True),))
    barrier = FaultBarrier(ScriptedRunner(answer=refused), max_failed_steps=2)
    for _ in range(5):
        assert barrier.execute(make_plan(1)) == refused


def test_closing_closes_the_runner():
    runner = ScriptedRunner()
    FaultBarrier(runner).close()
    assert runner.num_rows_of_calls == [-1]
