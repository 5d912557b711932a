"""`headrace top` as it is seen: a picture that is drawn anew on a terminal, plain lines or JSON elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace.clients.events import KvBlocks, Load
from headrace.clients.latency import LatencyClass
from headrace.clients.step_log import Work, short_label
from headrace.clients.top import Lane, Snapshot

_BARS = "▁▂▃▄▅▆▇█"
_HEADER_LINES = 10
"""Lines of the picture that are no lanes."""


class TopView(Protocol):
    """Shows snapshots; used as a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def show(self, snapshot: Snapshot) -> None:
        """Show how things stand."""
        ...

    def say(self, message: str) -> None:
        """Tell that nothing can be shown, and why."""
        ...


class LiveTop:
    """A picture that fills the terminal, which is as before in the end."""

    def __init__(self, console: Console, target: str) -> None:
        self._console = console
        self._target = target
        self._live = Live(console=console, auto_refresh=False, screen=True, vertical_overflow="crop")
        self._last: Snapshot | None = None

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, traceback)

    def show(self, snapshot: Snapshot) -> None:
        """Draw."""
        self._last = snapshot
        self._draw(snapshot, "")

    def say(self, message: str) -> None:
        """Draw what was last seen, dimmed, below the message."""
        self._draw(self._last, message)

    def _draw(self, snapshot: Snapshot | None, message: str) -> None:
        parts: list[RenderableType] = []
        if message:
            parts.append(Text(message, style="bold red"))
        if snapshot is not None:
            num_promises = sum(1 for _ in _promises(snapshot.load.latency.classes))
            most = max(1, self._console.height - _HEADER_LINES - num_promises - bool(message))
            parts.append(render(snapshot, self._target, self._console.width, most))
        self._live.update(Group(*parts), refresh=True)


class PlainTop:
    """A line for each snapshot."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def show(self, snapshot: Snapshot) -> None:
        """Print."""
        self._line(plain_line(snapshot))

    def say(self, message: str) -> None:
        """Print."""
        self._line(message)

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class WholeTop(PlainTop):
    """All that is known, lane by lane, for each snapshot: what `--once` prints."""

    def __init__(self, console: Console, target: str) -> None:
        super().__init__(console)
        self._target = target

    def show(self, snapshot: Snapshot) -> None:
        """Print."""
        width = self._console.width
        self._console.print(render(snapshot, self._target, width, len(snapshot.lanes)))


class JsonTop(PlainTop):
    """An object for each snapshot, a line each."""

    def show(self, snapshot: Snapshot) -> None:
        """Print."""
        self._line(json.dumps(as_json(snapshot), ensure_ascii=False))

    def say(self, message: str) -> None:
        """Print an object with the message alone."""
        self._line(json.dumps({"message": message}, ensure_ascii=False))


def as_json(snapshot: Snapshot) -> dict[str, object]:
    """The object that `--json` prints: the names are those of `Snapshot` and `Load`."""
    told = asdict(snapshot)
    load = told.pop("load")
    load.pop("totals")
    lanes = [{**asdict(lane), "work": lane.work.value} for lane in snapshot.lanes if lane.request is not None]
    return {**load, **told, "lanes": lanes}


def plain_line(snapshot: Snapshot) -> str:
    """How things stand, in a line."""
    load = snapshot.load
    line = (
        f"up {_span(load.uptime_s)}  {load.num_running}/{load.max_num_seqs} running, "
        f"{load.num_waiting} waiting, {_resting(load, ', ')}{snapshot.prefill_tokens_per_s:.1f} prefill + "
        f"{snapshot.output_tokens_per_s:.1f} output tokens/s, {_kv(snapshot.blocks)}, "
        f"{snapshot.num_preemptions} preemptions"
    )
    if snapshot.parts:
        step = snapshot.parts[0]
        line += f", step {_ms(step.p50_s)} (p99 {_ms(step.p99_s)})"
    if snapshot.num_missed:
        line += f", {snapshot.num_missed} steps not seen"
    return line


def render(snapshot: Snapshot, target: str, width: int, max_lanes: int) -> RenderableType:
    """The picture.

    Args:
        width: of the terminal, characters.
        max_lanes: lines that lanes may take, one more for what is left out.
    """
    load = snapshot.load
    head = Text(no_wrap=True, overflow="ellipsis")
    head.append(load.model or "headrace", style="bold")
    head.append(f"  {target}  up {_span(load.uptime_s)}  {load.batching} batching", style="dim")
    lines = [
        head,
        Text(
            f"{load.num_running} running of {load.max_num_seqs}   {load.num_waiting} waiting   "
            f"{_resting(load, '   ')}"
            f"{snapshot.num_preemptions} preemptions ({snapshot.num_recent_preemptions} lately)   "
            f"{snapshot.steps_per_s:.1f} steps/s",
            no_wrap=True,
            overflow="ellipsis",
        ),
        _throughput(snapshot, width),
        _kv_bar(snapshot.blocks, width),
        _times(snapshot),
        *_promises(load.latency.classes),
    ]
    if snapshot.num_missed:
        lines.append(Text(f"{snapshot.num_missed} steps were not seen: this watcher is too slow for them"))
    return Group(*lines, Text(""), _lanes(snapshot.lanes, width, max_lanes))


def _resting(load: Load, behind: str) -> str:
    """Whatever neither runs nor waits, if there is any, each with `behind` behind it."""
    counts = ((load.num_paused, "paused"), (load.num_detached, "detached"))
    return "".join(f"{count} {what}{behind}" for count, what in counts if count)


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as bars, the highest one full."""
    shown = values[-width:] if width > 0 else ()
    most = max(shown, default=0.0)
    if most <= 0:
        return _BARS[0] * len(shown)
    return "".join(_BARS[min(len(_BARS) - 1, int(value / most * len(_BARS)))] for value in shown)


def _throughput(snapshot: Snapshot, width: int) -> Text:
    text = Text(no_wrap=True, overflow="crop")
    text.append("tokens/s  ", style="dim")
    text.append(f"{snapshot.output_tokens_per_s:8.1f} output {snapshot.prefill_tokens_per_s:8.1f} prefill  ")
    text.append(sparkline(snapshot.history, width - text.cell_len), style="green")
    return text


def _kv_bar(blocks: KvBlocks, width: int) -> Text:
    told = f" {_blocks(blocks)}"
    room = max(8, min(60, width - len(told) - 10))
    live = round(room * blocks.live / blocks.total) if blocks.total else 0
    cached = min(room - live, round(room * blocks.cached / blocks.total)) if blocks.total else 0
    text = Text(no_wrap=True, overflow="crop")
    text.append("KV        ", style="dim")
    text.append("█" * live, style="blue")
    text.append("▒" * cached, style="cyan")
    text.append("·" * (room - live - cached), style="dim")
    text.append(told)
    return text


def _kv(blocks: KvBlocks) -> str:
    return f"KV {_blocks(blocks)}"


def _blocks(blocks: KvBlocks) -> str:
    return f"{blocks.live} live, {blocks.cached} cached, {blocks.free} free of {blocks.total} blocks"


def _times(snapshot: Snapshot) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("p50/99 ms ", style="dim")
    told = [f"{part.name} {_short_ms(part.p50_s)}/{_short_ms(part.p99_s)}" for part in snapshot.parts]
    text.append("  ".join(told) or "no step lately")
    return text


def _short_ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2g}"


def _promises(classes: Sequence[LatencyClass]) -> Iterator[Text]:
    """Lines of the latency budget: what is promised to whom, and how it is kept; a line for each target."""
    for promised in classes:
        who = "" if promised.priority is None else f"priority {promised.priority}: "
        targets = [
            (name, target_s, p95_s, num_over)
            for name, target_s, p95_s, num_over in (
                ("TPOT", promised.tpot_s, promised.attained_tpot_p95_s, promised.num_over_tpot),
                ("TTFT", promised.ttft_s, promised.attained_ttft_p95_s, promised.num_over_ttft),
            )
            if target_s is not None
        ]
        if not targets:
            yield _promise(f"{who}nothing", is_kept=True)
        for name, target_s, p95_s, num_over in targets:
            attained = "" if p95_s is None else f"p95 {_ms(p95_s)}, "
            told = f"{who}{name} {_ms(target_s)} ({attained}{num_over} of {promised.num_sequences} over)"
            if not promised.is_attainable:
                told += "  can't be kept here"
            yield _promise(told, is_kept=promised.is_attainable and (p95_s is None or p95_s <= target_s))


def _promise(told: str, *, is_kept: bool) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("promised  ", style="dim")
    text.append(told, style="" if is_kept else "red")
    return text


def _lanes(lanes: Sequence[Lane], width: int, most: int) -> RenderableType:
    table = Table(box=None, expand=True, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("slot", justify="right", min_width=4, no_wrap=True)
    table.add_column("phase", width=7)
    table.add_column("prefill", justify="right", width=8)
    table.add_column("made", justify="right", width=8)
    table.add_column("tok/s", justify="right", width=7)
    table.add_column("request", ratio=1, no_wrap=True, overflow="ellipsis")
    shown, left = _grouped(lanes), list[list[Lane]]()
    if len(shown) > most:
        # The busy ones are what is looked for.
        shown.sort(key=lambda group: (group[0].request is None, group[0].slot))
        shown, left = shown[: max(1, most - 1)], shown[max(1, most - 1) :]
    for group in shown:
        table.add_row(*_cells(group))
    if left:
        hidden = [lane for group in left for lane in group]
        num_busy = sum(lane.request is not None for lane in hidden)
        table.add_row("…", Text(f"{len(hidden)} more", style="dim"), "", "", "", f"{num_busy} busy")
    return table


def _grouped(lanes: Sequence[Lane]) -> list[list[Lane]]:
    """Each busy lane by itself; idle ones that stand together, together."""
    groups: list[list[Lane]] = []
    for lane in lanes:
        if groups and lane.request is None and groups[-1][0].request is None:
            groups[-1].append(lane)
        else:
            groups.append([lane])
    return groups


def _cells(group: Sequence[Lane]) -> tuple[RenderableType, ...]:
    lane = group[0]
    if lane.request is None:
        slots = f"{lane.slot}" if len(group) == 1 else f"{lane.slot}-{group[-1].slot}"
        return (Text(slots, style="dim"), Text("idle", style="dim"), "", "", "", "")
    # What was made before the watch began is not known.
    least = "" if lane.is_whole else "≥"
    label = short_label(lane.request) + (f" [{lane.index}]" if lane.index else "")
    return (
        str(lane.slot),
        Text(lane.work.value, style="yellow" if lane.work is Work.PREFILL else "green"),
        f"{least}{lane.num_prefill_tokens}",
        f"{least}{lane.num_output_tokens}",
        "" if lane.tokens_per_s is None else f"{lane.tokens_per_s:.1f}",
        Text(label),
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.01 else f"{seconds * 1e3:.1f} ms"


def _span(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days} d " if days else "") + f"{hours}:{minutes:02}:{rest:02}"
