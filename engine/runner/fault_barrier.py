"""Keeps one bad row, or one bad step, from taking everybody with it."""

from __future__ import annotations

import logging

from headrace.engine.errors import EngineDead, LibraryPanic, is_panic
from headrace.engine.kv.block_pool import NULL_BLOCK
from headrace.engine.runner.protocol import Runner
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.scheduling.plan import RowResult, ScheduledSequence, StepPlan, StepResult
from headrace.engine.sequence import SequenceId

logger = logging.getLogger(__name__)

_TEST_STEP = StepPlan(
    -1,
    (
        ScheduledSequence(
            sequence_id=SequenceId(-1),
            first_position=0,
            token_ids=(0,),
            num_draft_tokens=0,
            block_ids=(NULL_BLOCK,),
            is_sampled=True,
            sampling=SamplingParams(temperature=0.0),
        ),
    ),
)


class FaultBarrier:
    """A runner around a runner. A step that raises is run again row by row, which the idempotence of
    `Runner.execute` allows: the rows that raise alone fail alone, the others keep their results.

    Rows that raise say nothing of the runner as long as it can do anything at all: on an idle server one
    request that it can't run would be every row of every step. So when all rows of a step have raised, the
    runner is given a step that nobody asked for, one token over the null block.

    Args:
        runner: the one that does the work.
        max_failed_steps: after so many steps in a row in which not even that one succeeded it is broken.
    """

    def __init__(self, runner: Runner, max_failed_steps: int = 3) -> None:
        self._runner = runner
        self._max_failed_steps = max_failed_steps
        self._num_failed_steps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step.

        Raises:
            EngineDead: for too many steps in a row the runner could run nothing.
        """
        is_broken = False
        try:
            result = self._checked(plan)
        except Exception:
            logger.exception("step %d of %d rows failed, running them one by one", plan.step, len(plan.rows))
            alone = [self._execute_alone(plan, i) for i in range(len(plan.rows))]
            result = StepResult(tuple(row or _raised(error) for row, error in alone))
            is_broken = all(row is None for row, _ in alone) and not self._can_run_anything()
        self._num_failed_steps = self._num_failed_steps + 1 if is_broken else 0
        if self._num_failed_steps >= self._max_failed_steps:
            raise EngineDead(
                f"{self._num_failed_steps} steps in a row failed for every request in them, and so did a test"
            )
        return result

    def close(self) -> None:
        """See `Runner.close`."""
        self._runner.close()

    def _execute_alone(self, plan: StepPlan, i: int) -> tuple[RowResult | None, Exception | None]:
        """The row's result, or what was raised for it."""
        try:
            return self._checked(StepPlan(plan.step, plan.rows[i : i + 1])).rows[0], None
        except Exception as error:
            logger.exception("sequence %d of step %d fails alone too", plan.rows[i].sequence_id, plan.step)
            return None, error

    def _can_run_anything(self) -> bool:
        try:
            self._checked(_TEST_STEP)
        except Exception:
            logger.exception("a test step fails, too")
            return False
        return True

    def _checked(self, plan: StepPlan) -> StepResult:
        try:
            result = self._runner.execute(plan)
        except BaseException as fault:
            if is_panic(fault):
                raise LibraryPanic(type(fault).__name__) from fault
            raise
        if len(result.rows) != len(plan.rows):
            raise ValueError(f"the runner answered {len(result.rows)} rows for a plan of {len(plan.rows)}")
        for row, outcome in zip(plan.rows, result.rows, strict=True):
            if outcome.failure is None and bool(outcome.token_ids) != row.is_sampled:
                raise ValueError(
                    f"sequence {row.sequence_id}: sampled={row.is_sampled}, got {outcome.token_ids}"
                )
        return result


def _raised(error: Exception | None) -> RowResult:
    return RowResult(failure=f"the model step failed ({type(error).__name__})")
