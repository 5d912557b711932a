"""The task that answers a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class FakeCall:
    """Whoever asks is told when it is over."""

    callbacks: list[Callable[[object], None]] = field(default_factory=list)

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        """As `asyncio.Task` has it."""
        self.callbacks.append(callback)

    def end(self) -> None:
        """It is over."""
        for callback in self.callbacks:
            callback(self)
