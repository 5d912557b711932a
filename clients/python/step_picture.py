"""A picture of a step log: a lane for each slot, a colour for each request. Needs matplotlib."""

from __future__ import annotations

import colorsys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from headrace.clients.step_log import Span, StepLog, Work, requests_in_order, short_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH_IN = 10.0
_LANE_IN = 0.26
_MAX_LANES_IN = 40.0
_LABELLED_LANE_IN = 0.13
_LEFT_IN, _RIGHT_IN, _TOP_IN, _BOTTOM_IN = 0.5, 0.15, 0.3, 0.8
_LANE_HEIGHT = 0.84
_PX_PER_CHARACTER = 7.0
_GOLDEN = 0.618034
_IDLE = "#ececec"
_UNSEEN = "#9a9a9a"
_INK = "#222222"
_BRIGHT = 0.62
_PNG_DPI = 150


Colour = tuple[float, float, float]
"""Red, green and blue, each from 0 to 1."""


def write_picture(path: Path, log: StepLog, *, num_steps: int | None = None) -> None:
    """Draw `log` into an SVG or PNG file, by the ending of its name. The same log makes the same bytes.

    Args:
        num_steps: steps that the width stands for, for pictures of one scale; None: those of the log.
    """
    with _styled():
        figure = _draw(log, max(log.num_steps, num_steps or 0))
        # A date would make each file another one.
        metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else {"Software": None}
        figure.savefig(path, dpi=_PNG_DPI, metadata=metadata)


def colours_of(log: StepLog) -> Mapping[str, Colour]:
    """A colour for each request, by the order in which they were first seen."""
    return {
        request: colorsys.hls_to_rgb((number * _GOLDEN) % 1.0, (0.56, 0.68, 0.46)[number % 3], 0.62)
        for number, request in enumerate(requests_in_order([log]))
    }


def _styled() -> AbstractContextManager[None]:
    return mpl.rc_context(
        {
            # Letters stay letters: small files, and no trace of the machine's fonts.
            "svg.fonttype": "none",
            # What is drawn alone decides the ids in the file.
            "svg.hashsalt": "headrace",
            "font.family": "sans-serif",
            "font.size": 9.0,
            "hatch.linewidth": 0.7,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.spines.left": False,
        }
    )


def _draw(log: StepLog, num_steps: int) -> Figure:
    lane_in = min(_LANE_IN, _MAX_LANES_IN / log.num_slots)
    lanes_in = lane_in * log.num_slots
    height_in = _TOP_IN + lanes_in + _BOTTOM_IN
    figure = Figure(figsize=(_WIDTH_IN, height_in))
    width = (_WIDTH_IN - _LEFT_IN - _RIGHT_IN) / _WIDTH_IN
    axes = figure.add_axes((_LEFT_IN / _WIDTH_IN, _BOTTOM_IN / height_in, width, lanes_in / height_in))
    axes.set_xlim(0, num_steps)
    axes.set_ylim(log.num_slots - 0.5, -0.5)
    for slot in range(log.num_slots):
        axes.broken_barh([(0, log.num_steps)], _lane(slot), facecolors=_IDLE, linewidth=0)
    colours = colours_of(log)
    for span in log.spans():
        _draw_span(axes, log, span, colours[span.request])
        if span.work is Work.PREFILL:
            # One pattern for all colours.
            _bar(axes, log, span, facecolors="none", edgecolor="white", hatch="/////")
    for gap in log.gaps():
        width = gap.end_step - gap.first_step
        axes.broken_barh(
            [(gap.first_step - log.first_step, width)],
            (-0.5, log.num_slots),
            facecolors="white",
            edgecolor=_UNSEEN,
            hatch="xxx",
            linewidth=0,
        )
    if lane_in >= _LABELLED_LANE_IN:
        _label(axes, log, num_steps, colours)
    _explain(figure, axes, log)
    return figure


def _draw_span(axes: Axes, log: StepLog, span: Span, colour: Colour) -> None:
    _bar(axes, log, span, facecolors=[colour])
    if span.is_finished:
        end = span.end_step - log.first_step
        half = _LANE_HEIGHT / 2
        axes.plot([end, end], [span.slot - half, span.slot + half], color=_INK, linewidth=1.2)


def _label(axes: Axes, log: StepLog, num_steps: int, colours: Mapping[str, Colour]) -> None:
    for span, where in _labelled(log, num_steps):
        red, green, blue = colours[span.request]
        is_bright = 0.3 * red + 0.59 * green + 0.11 * blue > _BRIGHT
        axes.text(
            where,
            span.slot,
            short_label(span.request),
            ha="center",
            va="center",
            color=_INK if is_bright else "white",
            fontsize=8,
        )


def _bar(axes: Axes, log: StepLog, span: Span, **style: Any) -> None:
    where = [(span.first_step - log.first_step, span.num_steps)]
    axes.broken_barh(where, _lane(span.slot), linewidth=0, **style)


def _lane(slot: int) -> tuple[float, float]:
    return (slot - _LANE_HEIGHT / 2, _LANE_HEIGHT)


def _labelled(log: StepLog, num_steps: int) -> Iterator[tuple[Span, float]]:
    """The widest span of each sequence in each slot, if its label fits in, and where that stands."""
    widest: dict[tuple[str, int, int], Span] = {}
    for span in log.spans():
        key = (span.request, span.index, span.slot)
        if key not in widest or span.num_steps > widest[key].num_steps:
            widest[key] = span
    px_per_step = _WIDTH_IN * 90 / num_steps
    for span in widest.values():
        if len(short_label(span.request)) * _PX_PER_CHARACTER < span.num_steps * px_per_step:
            yield span, span.first_step - log.first_step + span.num_steps / 2


def _explain(figure: Figure, axes: Axes, log: StepLog) -> None:
    axes.set_title(
        f"{log.batching} batching: {log.num_requests} requests over {log.num_slots} slots, "
        f"{log.num_steps} steps, {log.occupancy:.0%} of the slots busy",
        loc="left",
        fontsize=10,
    )
    axes.set_xlabel("step")
    axes.set_ylabel("slot")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    axes.tick_params(axis="y", length=0)
    grey = "#6f8fb5"
    handles = [
        Patch(facecolor=grey, edgecolor="white", hatch="/////", linewidth=0, label="prefill"),
        Patch(facecolor=grey, linewidth=0, label="decode"),
        Patch(facecolor=_IDLE, linewidth=0, label="idle"),
    ]
    if log.gaps():
        handles.append(
            Patch(facecolor="white", edgecolor=_UNSEEN, hatch="xxx", linewidth=0, label="steps not seen")
        )
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False, fontsize=8)
