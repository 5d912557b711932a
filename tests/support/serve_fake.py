"""The real service program over a fake model: ``python -m tests.support.serve_fake PLAN [flags]``.

PLAN says what is to go wrong, if anything; see `PLANS`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import MappingProxyType

from headrace.engine import LoadedModel, LoadProgress, ModelLoadError
from headrace.engine.scheduling.plan import StepPlan
from headrace.service.commands import serve
from headrace.service.config import ServiceConfig
from tests.support.fake_runner import make_fake_model

STEP_S = 0.01
_never = threading.Event()


def _served(before_step: Callable[[StepPlan], None]) -> LoadedModel:
    return make_fake_model(num_blocks=4096, block_size=16, max_model_len=16384, before_step=before_step)


def fine(config: ServiceConfig, progress: LoadProgress) -> LoadedModel:
    """All goes well; each step takes a hundredth of a second."""
    for done in range(5):
        progress("reading weights", done, 4)
    return _served(lambda plan: _wait(STEP_S))


def hangs_in_load(config: ServiceConfig, progress: LoadProgress) -> LoadedModel:
    """The load never ends."""
    _never.wait()
    raise AssertionError("unreachable")


def fails_in_load(config: ServiceConfig, progress: LoadProgress) -> LoadedModel:
    """The model can't be served."""
    raise ModelLoadError("/models/x: config.json is missing")


def fails_in_warm_up(config: ServiceConfig, progress: LoadProgress) -> LoadedModel:
    """Every step fails, the first included."""

    def fail(plan: StepPlan) -> None:
        raise RuntimeError("tell-nobody")

    return _served(fail)


def dies(config: ServiceConfig, progress: LoadProgress) -> LoadedModel:
    """The step that computes a prompt of 13 tokens takes the engine down."""

    def exit_on_thirteen(plan: StepPlan) -> None:
        if any(len(row.token_ids) == 13 for row in plan.rows):
            raise SystemExit("tell-nobody")
        _wait(STEP_S)

    return _served(exit_on_thirteen)


def hangs(config: ServiceConfig, progress: LoadProgress) -> LoadedModel:
    """The step that computes a prompt of 13 tokens never ends."""

    def hang_on_thirteen(plan: StepPlan) -> None:
        if any(len(row.token_ids) == 13 for row in plan.rows):
            _never.wait()

    return _served(hang_on_thirteen)


def _wait(duration_s: float) -> None:
    _never.wait(duration_s)


PLANS = MappingProxyType(
    {plan.__name__: plan for plan in (fine, hangs_in_load, fails_in_load, fails_in_warm_up, dies, hangs)}
)

if __name__ == "__main__":
    sys.exit(serve(["--model", "fake", *sys.argv[2:]], PLANS[sys.argv[1]]))
