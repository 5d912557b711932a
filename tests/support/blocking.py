"""Runners that compute on the host itself: a step is over when it has been launched."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engine.runner.protocol import LaunchedStep
from headrace.engine.scheduling.plan import StepPlan, StepResult


@dataclass(frozen=True)
class Returned:
    """A step whose result is there."""

    result: StepResult

    def fetch(self) -> StepResult:
        return self.result


class Blocking:
    """A runner that has only to say what `execute` does."""

    def execute(self, plan: StepPlan) -> StepResult:
        raise NotImplementedError

    def launch(self, plan: StepPlan) -> LaunchedStep:
        return Returned(self.execute(plan))
