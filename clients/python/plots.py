"""Pictures of measurements. matplotlib comes with an extra, and is imported when a picture is drawn."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.clients.bench_stats import RequestRecord, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INSTALL_COMMAND = "pip install 'headrace[bench]'"
FORMATS = (".png", ".svg")
_NUM_BINS = 120


class PlotError(Exception):
    """No picture can be drawn; the message says what would be right."""


def require_plots(paths: Sequence[Path]) -> None:
    """Check before a long measurement that its pictures can be drawn.

    Raises:
        PlotError: matplotlib is missing, or a file's name says no known format.
    """
    for path in paths:
        if path.suffix not in FORMATS:
            raise PlotError(f"{path}: pictures are {' or '.join(FORMATS)}: use one of these endings")
    if paths and importlib.util.find_spec("matplotlib") is None:
        raise PlotError(f"pictures need matplotlib, which is not installed. Install it: {INSTALL_COMMAND}")


def new_figure(num_panels: int, title: str) -> tuple[Figure, list[Axes]]:
    """A figure of panels beside each other."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(6.0 * num_panels, 4.2), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    panels = [figure.add_subplot(1, num_panels, place) for place in range(1, num_panels + 1)]
    for panel in panels:
        panel.grid(visible=True, alpha=0.3)
    return figure, panels


def save(figure: Figure, path: Path) -> None:
    """Write a figure; the file's ending says the format. The same figure makes the same file."""
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(path, dpi=150, metadata=metadata)


def draw_bench(records: Sequence[RequestRecord], summary: Summary, title: str, paths: Sequence[Path]) -> None:
    """Two panels: how latencies are distributed, and how the run went.

    Raises:
        PlotError: as `require_plots`, or no request was complete.
    """
    require_plots(paths)
    complete = [record for record in records if record.is_complete and record.arrivals]
    if not complete:
        raise PlotError("no request was complete: there is nothing to draw")
    figure, (left, right) = new_figure(2, title)
    curves = (
        ("TTFT", [record.ttft_s for record in complete]),
        ("ITL", [gap for record in complete for gap in record.itls_s]),
        ("TPOT", [record.tpot_s for record in complete]),
        ("end to end", [record.e2e_s for record in complete]),
    )
    for name, values in curves:
        known = sorted(value * 1e3 for value in values if value is not None and value > 0)
        if known:
            left.step(
                known, [(place + 1) / len(known) for place in range(len(known))], where="post", label=name
            )
    left.set(xscale="log", xlabel="ms", ylabel="share of requests (ITL: of gaps above zero)", ylim=(0, 1.01))
    left.legend(loc="lower right")
    _draw_timeline(right, records, summary)
    for path in paths:
        save(figure, path)


def _draw_timeline(panel: Axes, records: Sequence[RequestRecord], summary: Summary) -> None:
    """Tokens per second and open requests over the run."""
    end_s = max((record.end_s or 0.0 for record in records), default=0.0) or 1.0
    width_s = end_s / _NUM_BINS
    tokens = [0] * _NUM_BINS
    open_ones = [0] * _NUM_BINS
    for record in records:
        for time_s, count in record.arrivals:
            tokens[min(int(time_s / width_s), _NUM_BINS - 1)] += count
        if record.sent_s is not None and record.end_s is not None:
            last = min(int(record.end_s / width_s), _NUM_BINS - 1)
            for place in range(int(record.sent_s / width_s), last + 1):
                open_ones[min(place, _NUM_BINS - 1)] += 1
    middles = [(place + 0.5) * width_s for place in range(_NUM_BINS)]
    panel.plot(middles, [count / width_s for count in tokens], color="tab:blue", label="output tokens/s")
    panel.axhline(summary.output_tokens_per_s, color="tab:blue", linestyle=":", label="mean")
    panel.set(xlabel="seconds", ylabel="output tokens/s", ylim=(0, None))
    beside = panel.twinx()
    beside.plot(middles, open_ones, color="tab:orange", alpha=0.7, label="open requests")
    beside.set(ylabel="open requests", ylim=(0, None))
    lines = [*panel.get_lines(), *beside.get_lines()]
    panel.legend(lines, [str(line.get_label()) for line in lines], loc="lower center")
