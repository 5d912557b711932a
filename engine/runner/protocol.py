"""What the engine asks of whatever runs the model. No torch here: tests run the engine over a fake."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace.engine.config import CacheLayout, ModelInfo
from headrace.engine.scheduling.plan import StepPlan, StepResult
from headrace.engine.tokenizer import Tokenizer


class LaunchedStep(Protocol):
    """A step that is under way."""

    def fetch(self) -> StepResult:
        """Wait for its result. Called once. Steps that were launched after it are not waited for.

        Raises:
            Exception: the step as a whole failed; nothing of its result may be used.
        """
        ...


class Runner(Protocol):
    """Runs steps, in the order in which they are launched. Called from one worker thread, one call at a time.

    Idempotent: a plan whose tokens are all known, or a part of its rows, run a second time writes the same KV
    to the same slots and draws the same tokens. The fault barrier rests on it.
    """

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Have the plan's tokens computed, their KV written, next tokens drawn for the sampled rows. Does not
        wait for a device that computes while the host goes on.

        Args:
            plan: one that follows another (`StepPlan.follows`) is launched right behind it.

        Raises:
            Exception: the step as a whole failed; nothing of it may be used.
        """
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Launch a plan, and wait for its result.

        Raises:
            Exception: the step as a whole failed; nothing of its result may be used.
        """
        ...

    def close(self) -> None:
        """Give back memory and threads. No call follows."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run: what `load_model` returns and `AsyncEngine` takes.

    Args:
        draft_max_len: longest sequence of the draft model that the runner has with it, tokens; None without.
        computes_apart: whether steps are computed by a device, while the host goes on.
    """

    info: ModelInfo
    layout: CacheLayout
    runner: Runner
    tokenizer: Tokenizer
    draft_max_len: int | None = None
    computes_apart: bool = False


class LoadProgress(Protocol):
    """Told how loading goes; may be called from any thread."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Say that `done` of `total` units of `stage` are through.

        Args:
            stage: words for a person, such as "reading weights".
            done, total: same unit (bytes, tensors); total is 0 where it isn't known.
        """
        ...
