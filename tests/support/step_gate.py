"""A step hook that a test lets steps through with."""

from __future__ import annotations

import asyncio
import threading

from headrace.engine.scheduling.plan import StepPlan

LONG_HOLD_S = 60.0


class StepGate:
    """Holds every step until it may run: for `before_step` of a runner, and for stages of one.

    Args:
        is_open: whether steps run at first.
    """

    def __init__(self, *, is_open: bool = False) -> None:
        self.num_steps = 0
        """That have come to it."""
        self._changed = threading.Condition()
        self._is_open = is_open
        self._num_permits = 0
        self._num_held = 0

    def __call__(self, plan: StepPlan) -> None:
        with self._changed:
            self.num_steps += 1
            self._num_held += 1
            self._changed.notify_all()
            try:
                if not self._changed.wait_for(lambda: self._is_open or self._num_permits, LONG_HOLD_S):
                    raise TimeoutError("the test never let the step run")
                self._num_permits -= not self._is_open
            finally:
                self._num_held -= 1

    def let(self, num_steps: int) -> None:
        """Let so many more run, of those that are held and of those to come."""
        with self._changed:
            self._num_permits += num_steps
            self._changed.notify_all()

    def open(self) -> None:
        """Let all run from now on."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def shut(self) -> None:
        """Hold all that come from now on."""
        with self._changed:
            self._is_open, self._num_permits = False, 0

    async def wait_held(self) -> None:
        """Wait until a step is held that nothing lets run yet."""
        if not await asyncio.to_thread(self._until_held):
            raise TimeoutError("no step ever came")

    def _until_held(self) -> bool:
        with self._changed:
            return self._changed.wait_for(self._holds, LONG_HOLD_S)

    def _holds(self) -> bool:
        return not self._is_open and self._num_held > self._num_permits
