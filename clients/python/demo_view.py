"""The demo while it runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace.clients.events import Load

_LOAD_LINE_EVERY_S = 5.0
_FIXED_WIDTH = 26
"""Characters of a table row that are neither question nor answer."""


@dataclass
class Row:
    """A request as it is seen now. Times are seconds since all were sent."""

    number: int
    question: str
    num_wanted: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    first_token_s: float | None = None
    end_s: float | None = None

    @property
    def state(self) -> str:
        """waiting, running or done."""
        if self.end_s is not None:
            return "done"
        return "waiting" if self.first_token_s is None else "running"

    def tokens_per_s(self, now_s: float) -> float | None:
        """Tokens after the first one, per second since then."""
        if self.first_token_s is None or len(self.token_ids) < 2:
            return None
        elapsed_s = (self.end_s if self.end_s is not None else now_s) - self.first_token_s
        return (len(self.token_ids) - 1) / elapsed_s if elapsed_s > 0 else None


class View(Protocol):
    """Shows a run; used as a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def show(self, now_s: float, rows: Sequence[Row], load: Load) -> None:
        """How things stand; called several times a second."""
        ...


def make_view(console: Console, title: str) -> View:
    """The view that suits where the output goes."""
    return LiveView(console, title) if console.is_terminal else PlainView(console, title)


class LiveView:
    """A table that is drawn anew in place: a row per request, and the totals below."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, traceback)

    def show(self, now_s: float, rows: Sequence[Row], load: Load) -> None:
        """Draw."""
        self._live.update(self._render(now_s, rows, load), refresh=True)

    def _render(self, now_s: float, rows: Sequence[Row], load: Load) -> RenderableType:
        table = Table(box=None, expand=True, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
        table.add_column("#", justify="right", width=2)
        table.add_column("state", width=7)
        table.add_column("tokens", justify="right", width=7)
        table.add_column("tok/s", justify="right", width=5)
        question_width = min(36, max(12, (self._console.width - _FIXED_WIDTH) * 2 // 5))
        table.add_column("question", width=question_width, no_wrap=True, overflow="ellipsis")
        table.add_column("answer", ratio=1, no_wrap=True, overflow="crop")
        answer_width = max(8, self._console.width - _FIXED_WIDTH - question_width)
        for row in rows:
            table.add_row(*_cells(row, now_s, answer_width))
        title = Text(self._title, style="bold", no_wrap=True, overflow="ellipsis")
        totals = Text(_totals(now_s, rows, load), style="bold", no_wrap=True, overflow="ellipsis")
        return Group(title, table, totals)


class PlainView:
    """A line when a request starts and one when it ends; the totals every five seconds."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._told: dict[int, str] = {}
        self._next_load_line_s = 0.0

    def __enter__(self) -> Self:
        self._line(self._title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def show(self, now_s: float, rows: Sequence[Row], load: Load) -> None:
        """Tell what is new."""
        for row in rows:
            if row.state != self._told.get(row.number, "waiting"):
                self._told[row.number] = row.state
                self._line(_event_line(row, now_s))
        is_over = all(row.state == "done" for row in rows)
        if now_s >= self._next_load_line_s or is_over:
            self._next_load_line_s = now_s + _LOAD_LINE_EVERY_S
            self._line(_totals(now_s, rows, load))

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _cells(row: Row, now_s: float, answer_width: int) -> tuple[RenderableType, ...]:
    style = {"waiting": "dim", "running": "green", "done": "blue"}[row.state]
    rate = row.tokens_per_s(now_s)
    said = " ".join(row.text.split())
    # While it is being made, what is new is at the end.
    answer = Text(_end_that_fits(said, answer_width) if row.state == "running" else said)
    if row.state == "done":
        answer.stylize("dim")
    return (
        str(row.number),
        Text(row.state, style=style),
        f"{len(row.token_ids)}/{row.num_wanted}",
        "" if rate is None else f"{rate:.1f}",
        Text(row.question, style=style),
        answer,
    )


def _end_that_fits(text: str, width: int) -> str:
    """The longest end of `text` that takes at most `width` cells of the terminal."""
    num_cells = 0
    for start in range(len(text) - 1, -1, -1):
        num_cells += cell_len(text[start])
        if num_cells > width:
            return text[start + 1 :]
    return text


def _event_line(row: Row, now_s: float) -> str:
    if row.state == "running":
        return f"{now_s:6.1f} s  #{row.number:<2} running  {row.question}"
    rate = row.tokens_per_s(now_s)
    speed = "" if rate is None else f", {rate:.1f} tokens/s"
    said = " ".join(row.text.split())
    return f"{now_s:6.1f} s  #{row.number:<2} done     {len(row.token_ids)} tokens{speed}: {said[:60]}"


def _totals(now_s: float, rows: Sequence[Row], load: Load) -> str:
    num_tokens = sum(len(row.token_ids) for row in rows)
    rate = num_tokens / now_s if now_s > 0 else 0.0
    used = load.blocks.live / load.blocks.total if load.blocks.total else 0.0
    return (
        f"{now_s:6.1f} s  {load.num_running} running, {load.num_waiting} waiting, "
        f"{sum(row.state == 'done' for row in rows)} done, {num_tokens} tokens, {rate:.1f} tokens/s, "
        f"KV {used:.1%} ({load.blocks.live} of {load.blocks.total} blocks)"
    )
