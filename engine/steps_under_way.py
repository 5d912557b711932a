"""Steps under way: planned, and not returned yet. One, or two where the second was planned ahead.

No moment is counted for two of them. A step that was planned ahead begins when the one before it has been
taken in: until then it was planned and launched, and has waited on the device, in that one's time. It lasts
until the next one begins, so all that happens in between counts, too: it makes its tokens' gap longer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from headrace.engine.errors import IntegrityError
from headrace.engine.outputs import BlockCounts, RowStats, StepStats
from headrace.engine.scheduling.allowance import StepAllowance
from headrace.engine.scheduling.budget import LatencyBudget
from headrace.engine.scheduling.plan import StepPlan, StepResult, as_run
from headrace.engine.sequence import SequenceId


@dataclass(slots=True)
class StepUnderWay:
    """A step under way.

    Args:
        allowance: what it could take on.
        num_preemptions: see `StepStats`, as `num_waiting`.
        started_s: when it began, by the engine's clock; of one that was planned ahead, when it was planned,
            until it begins.
        planned_s: when its plan was made, likewise.
        is_ahead: whether it was planned behind one that had not returned.
    """

    plan: StepPlan
    allowance: StepAllowance
    num_preemptions: int
    num_waiting: int
    started_s: float
    planned_s: float
    is_ahead: bool = False

    def stats(
        self,
        result: StepResult,
        rows: tuple[RowStats, ...],
        blocks: BlockCounts,
        *,
        num_kv_slots_allocated: int,
        num_kv_slots_used: int,
        executed_s: float,
        updated_s: float,
    ) -> StepStats:
        """What it did.

        Args:
            executed_s: when it had returned, by the engine's clock.
            updated_s: when it had been taken in.
        """
        return StepStats(
            step=self.plan.step,
            num_waiting=self.num_waiting,
            num_preemptions=self.num_preemptions,
            blocks=blocks,
            num_kv_slots_allocated=num_kv_slots_allocated,
            num_kv_slots_used=num_kv_slots_used,
            schedule_s=self.planned_s - self.started_s,
            execute_s=executed_s - self.planned_s,
            update_s=updated_s - executed_s,
            rows=rows,
            started_s=self.started_s,
            num_draft_failures=sum([row.is_draft_failed for row in result.rows]),
            is_ahead=self.is_ahead,
        )


class StepsUnderWay:
    """Keeps account of them, and of their times.

    Args:
        budget: what learns from the steps that have run.
    """

    def __init__(self, budget: LatencyBudget) -> None:
        self._budget = budget
        self._under_way: deque[StepUnderWay] = deque()
        # The step that has returned last, what it did, and how much of its time the draft model took.
        self._last: tuple[StepUnderWay, StepPlan, float] | None = None

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def newest(self) -> StepUnderWay:
        """The one that was planned last; one is under way."""
        return self._under_way[-1]

    def begin(self, now_s: float) -> None:
        """The next step begins, with none under way.

        Raises:
            IntegrityError: one is.
        """
        if self._under_way:
            raise IntegrityError(f"step {self._under_way[0].plan.step} was never finished")
        self._learn(now_s)

    def add(self, step: StepUnderWay) -> None:
        """A step has been planned."""
        self._under_way.append(step)

    def take(self) -> StepUnderWay:
        """The oldest has returned.

        Raises:
            IntegrityError: none was under way.
        """
        if not self._under_way:
            raise IntegrityError("no step was begun")
        return self._under_way.popleft()

    def note_end(self, step: StepUnderWay, result: StepResult, now_s: float) -> None:
        """One that was taken has been taken in; if the next one is under way, it begins now."""
        self._last = step, as_run(step.plan, result), result.propose_s
        if self._under_way:
            self._learn(now_s)
            self._under_way[0].started_s = self._under_way[0].planned_s = now_s

    @property
    def sequence_ids(self) -> frozenset[SequenceId]:
        """Whose KV those under way write."""
        return frozenset(row.sequence_id for step in self._under_way for row in step.plan.rows)

    def _learn(self, now_s: float) -> None:
        if self._last is None:
            return
        # What a draft model takes is another matter than what the step cost.
        step, plan, propose_s = self._last
        self._budget.observe(plan, now_s - step.started_s - propose_s, step.allowance)
        self._last = None
