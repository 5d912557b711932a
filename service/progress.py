"""How loading goes, for whoever waits: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from headrace.service.telemetry import lines_through, log

_LINE_EVERY = 0.25
"""Share of a stage after which another line is written."""


class ShownProgress:
    """Obeys `headrace.engine.LoadProgress` and `DistillationProgress`, inside ``with``.

    On a terminal it draws a bar per stage; the lines of the log stand above the bars.
    """

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not self._is_terminal,
        )
        self._above = ExitStack()
        self._lock = threading.Lock()
        self._tasks: dict[str, TaskID] = {}
        self._told: dict[str, float] = {}

    def __enter__(self) -> Self:
        if self._is_terminal:
            self._above.enter_context(lines_through(self._tell))
        self._bars.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bars.stop()
        self._above.close()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show that `done` of `total` units of `stage` are through; called from any thread."""
        with self._lock:
            if self._is_terminal:
                self._draw(stage, done, total)
            else:
                self._write(stage, done, total)

    def note(self, text: str) -> None:
        """Tell a line between the bars."""
        if self._is_terminal:
            self._bars.console.print(text, markup=False, highlight=False)
        else:
            log.info(text)

    def _tell(self, line: str) -> None:
        # By way of the bars, which draw themselves anew below it; a line stays one, however long it is.
        self._bars.console.print(Text.from_ansi(line), soft_wrap=True)

    def _draw(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total or None)
        self._bars.update(self._tasks[stage], completed=done, total=total or None)

    def _write(self, stage: str, done: int, total: int) -> None:
        share = done / total if total else 0.0
        if share < self._told.get(stage, 0.0):
            return
        self._told[stage] = (share // _LINE_EVERY + 1) * _LINE_EVERY if share < 1 else 2.0
        log.info("loading", stage=stage, percent=round(100 * share))
