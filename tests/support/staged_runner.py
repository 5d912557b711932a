"""A runner whose launches and fetches are noted, and can be made to fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.engine.runner.protocol import LaunchedStep, Runner
from headrace.engine.scheduling.plan import StepPlan, StepResult

LAUNCH, FETCH = "launch", "fetch"


@dataclass
class StagedRunner:
    """A runner that does what another does.

    Args:
        log: what was asked of it, in order: stage and number of the step.
        on: called at each stage with it and the plan; what it raises is what the stage raises.
    """

    runner: Runner
    on: Callable[[str, StepPlan], None] = lambda stage, plan: None
    log: list[tuple[str, int]] = field(default_factory=list)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self.log.append((LAUNCH, plan.step))
        self.on(LAUNCH, plan)
        return _Staged(self, plan, self.runner.launch(plan))

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).fetch()

    def close(self) -> None:
        self.runner.close()


@dataclass
class _Staged:
    staged: StagedRunner
    plan: StepPlan
    launched: LaunchedStep

    def fetch(self) -> StepResult:
        self.staged.log.append((FETCH, self.plan.step))
        # As on a device: what goes wrong there has happened by then, or all of it has.
        result = self.launched.fetch()
        self.staged.on(FETCH, self.plan)
        return result
