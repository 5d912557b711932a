"""The picture of a throughput/latency curve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.clients.plots import new_figure, require_plots, save
from headrace.clients.tune_curve import CurvePoint, LatencyBudget, best_within, find_knee


def draw_curve(
    points: Sequence[CurvePoint], budget: LatencyBudget, title: str, paths: Sequence[Path]
) -> None:
    """Throughput over TPOT and over TTFT, a line for each token budget, the knee and the best point marked.

    Raises:
        PlotError: as `require_plots`.
    """
    require_plots(paths)
    figure, panels = new_figure(2, title)
    sizes = sorted({point.max_num_batched_tokens for point in points}, key=lambda size: size or 0)
    views = (
        ("time per output token, ms: median, and p95 as a bar", "tpot_p50_s", "tpot_p95_s", budget.tpot_s),
        ("time to first token, ms: median, and p95 as a bar", "ttft_p50_s", "ttft_p95_s", budget.ttft_s),
    )
    marks = [("knee", find_knee(points), "o", 190)]
    if budget.is_any:
        marks.append(("best within the budget", best_within(points, budget), "s", 120))
    for panel, (label, middle, high, limit_s) in zip(panels, views, strict=True):
        for size in sizes:
            line = sorted(
                (point for point in points if point.max_num_batched_tokens == size),
                key=lambda point: point.concurrency,
            )
            xs = [getattr(point, middle) * 1e3 for point in line]
            bars = [max(0.0, (getattr(point, high) - getattr(point, middle)) * 1e3) for point in line]
            panel.errorbar(
                xs,
                [point.output_tokens_per_s for point in line],
                xerr=[[0.0] * len(bars), bars],
                marker=".",
                capsize=2,
                elinewidth=0.6,
                label="" if size is None else f"{size} tokens a step",
            )
            for x, point in zip(xs, line, strict=True):
                panel.annotate(
                    f"{point.concurrency}",
                    (x, point.output_tokens_per_s),
                    textcoords="offset points",
                    xytext=(4, 5),
                    fontsize="small",
                )
        for name, marked, shape, area in marks:
            if marked is not None:
                place = ([getattr(marked, middle) * 1e3], [marked.output_tokens_per_s])
                panel.scatter(
                    *place,
                    s=area,
                    marker=shape,
                    facecolors="none",
                    edgecolors="tab:red",
                    label=name,
                    zorder=3,
                )
        if limit_s is not None:
            panel.axvline(limit_s * 1e3, color="tab:red", linestyle=":", label="budget")
        panel.set(xlabel=label, ylabel="output tokens/s", xlim=(0, None), ylim=(0, None))
        panel.legend(loc="lower right")
    for path in paths:
        save(figure, path)
