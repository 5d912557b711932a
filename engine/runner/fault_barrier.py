"""Keeps one bad row, or one bad step, from taking everybody with it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from headrace.engine.errors import EngineDead, IntegrityError, LibraryPanic, is_panic
from headrace.engine.kv.block_pool import NULL_BLOCK
from headrace.engine.runner.protocol import LaunchedStep, Runner
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.scheduling.plan import RowResult, ScheduledSequence, StepPlan, StepResult, as_known
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


@dataclass(slots=True, eq=False)
class _StepUnderWay:
    """A step that has not been brought in; `launched` is None before it is launched, and once what it
    computes has been thrown away."""

    plan: StepPlan
    launched: LaunchedStep | None = None


class FaultBarrier:
    """A runner around a runner. A step that raises is run again row by row, which the idempotence of
    `Runner` allows: the rows that raise alone fail alone, the others keep their results.

    A step that was launched behind one that raises has computed with what that one left behind: it is waited
    for, nothing of it is used, and it is run anew in its turn, with the tokens that were drawn in the end.

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
        self._under_way: deque[_StepUnderWay] = deque()
        self._drawn: list[int] = []

    def advance(self, *plans: StepPlan) -> StepResult:
        """Launch steps, one behind the other, and bring in the oldest that is under way.

        Args:
            plans: none are needed where a step is under way already. Each has the number behind that of the
                one before it.

        Raises:
            EngineDead: for too many steps in a row the runner could run nothing.
        """
        self._under_way.extend(_StepUnderWay(plan) for plan in plans)
        first, is_broken = self._under_way[0], False
        try:
            self._launch_first(first)
            self._launch_others()
            result = self._checked(first.plan, self._fetch(first))
        except Exception:
            plan = first.plan
            logger.exception("step %d of %d rows failed, running them one by one", plan.step, len(plan.rows))
            self._throw_away_what_follows()
            plan = as_known(plan, self._drawn)
            alone = [self._execute_alone(plan, i) for i in range(len(plan.rows))]
            result = StepResult(tuple(row or _raised(error) for row, error in alone))
            is_broken = all(row is None for row, _ in alone) and not self._can_run_anything()
        self._under_way.popleft()
        # What may follow it is under way already.
        self._drawn = _drawn(first.plan, result) if self._under_way else []
        self._num_failed_steps = self._num_failed_steps + 1 if is_broken else 0
        if self._num_failed_steps >= self._max_failed_steps:
            raise EngineDead(
                f"{self._num_failed_steps} steps in a row failed for every request in them, and so did a test"
            )
        return result

    def _launch_first(self, first: _StepUnderWay) -> None:
        if first.launched is None:
            # What it follows has been brought in: nothing is unknown any more.
            first.plan = as_known(first.plan, self._drawn)
            first.launched = self._launch(first.plan)

    def _launch_others(self) -> None:
        """Launch what follows the first; what can't be is launched in its turn."""
        for other in islice(self._under_way, 1, None):
            if other.launched is None:
                try:
                    other.launched = self._launch(other.plan)
                except Exception:
                    logger.exception("step %d can't be launched ahead: it waits its turn", other.plan.step)
                    return

    def _throw_away_what_follows(self) -> None:
        """Wait for what was launched behind the first, so that nothing of it writes any more."""
        for other in islice(self._under_way, 1, None):
            try:
                if other.launched is not None:
                    self._fetch(other)
            except Exception:
                logger.exception("step %d, launched behind a step that failed, failed too", other.plan.step)
            other.launched = None

    def close(self) -> None:
        """See `Runner.close`. What is under way is not waited for."""
        self._under_way.clear()
        self._runner.close()

    def _execute_alone(self, plan: StepPlan, i: int) -> tuple[RowResult | None, Exception | None]:
        """The row's result, or what was raised for it."""
        try:
            return self._execute(StepPlan(plan.step, plan.rows[i : i + 1])).rows[0], None
        except Exception as error:
            logger.exception("sequence %d of step %d fails alone too", plan.rows[i].sequence_id, plan.step)
            return None, error

    def _can_run_anything(self) -> bool:
        try:
            self._execute(_TEST_STEP)
        except Exception:
            logger.exception("a test step fails, too")
            return False
        return True

    def _execute(self, plan: StepPlan) -> StepResult:
        return self._checked(plan, self._fetch(_StepUnderWay(plan, self._launch(plan))))

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        with _panics_told():
            return self._runner.launch(plan)

    def _fetch(self, step: _StepUnderWay) -> StepResult:
        if step.launched is None:
            raise IntegrityError(f"step {step.plan.step} is fetched and was never launched")
        with _panics_told():
            return step.launched.fetch()

    def _checked(self, plan: StepPlan, result: StepResult) -> StepResult:
        if len(result.rows) != len(plan.rows):
            raise ValueError(f"the runner answered {len(result.rows)} rows for a plan of {len(plan.rows)}")
        for row, outcome in zip(plan.rows, result.rows, strict=True):
            if outcome.failure is None and bool(outcome.token_ids) != row.is_sampled:
                raise ValueError(
                    f"sequence {row.sequence_id}: sampled={row.is_sampled}, got {outcome.token_ids}"
                )
        return result


@contextmanager
def _panics_told() -> Iterator[None]:
    try:
        yield
    except BaseException as fault:
        if is_panic(fault):
            raise LibraryPanic(type(fault).__name__) from fault
        raise


def _drawn(plan: StepPlan, result: StepResult) -> list[int]:
    """The token of each sampled row. One that has failed has none: who follows it is void, whatever stands
    there."""
    return [
        outcome.token_ids[-1] if outcome.token_ids else 0
        for row, outcome in zip(plan.rows, result.rows, strict=True)
        if row.is_sampled
    ]


def _raised(error: Exception | None) -> RowResult:
    return RowResult(failure=f"the model step failed ({type(error).__name__})")
