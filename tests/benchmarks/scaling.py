"""How a step grows: with slots, with context, and not with the size of the KV pool.

    .venv/bin/python -m tests.benchmarks.scaling
    .venv/bin/python -m tests.benchmarks.scaling --weight-dtype int8 --json scaling.json --plot scaling.png

Whole decode steps of the model on random KV, without a server.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from headrace.clients.plots import new_figure, require_plots, save
from headrace.engine import ModelConfig, SamplingParams
from headrace.engine.runner.host import prepare_host
from headrace.engine.scheduling.plan import StepPlan
from tests.benchmarks.options import add_compute_options, add_model_options, model_path, numbers
from tests.benchmarks.steps import Bench, Clock

BLOCK_SIZE = 4
Points = list[tuple[int, float]]
"""Size of a step or of the pool, and seconds of the step."""


def draw(slots: Points, contexts: Points, pools: Points, title: str, path: Path) -> None:
    """Three panels: tokens per second over slots, and step times over context and pool."""
    figure, (left, middle, right) = new_figure(3, title)
    left.plot([size for size, _ in slots], [size / seconds for size, seconds in slots], marker="o")
    left.set(xlabel="slots", ylabel="tokens/s", xscale="log", ylim=(0, None))
    for panel, points, label in (
        (middle, contexts, "tokens of context"),
        (right, pools, "blocks of the pool"),
    ):
        panel.plot([size for size, _ in points], [1e3 * seconds for _, seconds in points], marker="o")
        panel.set(xlabel=label, ylabel="ms per step", ylim=(0, None))
    right.set(xscale="log")
    save(figure, path)


class Scaling:
    """Decode steps of one model.

    Args:
        seconds: of each measurement.
    """

    def __init__(self, model: ModelConfig, seconds: float) -> None:
        self._model, self._seconds = model, seconds

    def points(self, sizes: Sequence[tuple[int, int]], num_blocks: int | None = None) -> list[float]:
        """Seconds of a step, for each of (slots, context).

        Args:
            num_blocks: of the pool; None makes it as large as the largest step needs.
        """
        needed = max(slots * (context // BLOCK_SIZE + 1) for slots, context in sizes) + 1
        clock = Clock(time.perf_counter)
        bench = Bench(
            self._model, max(needed, num_blocks or 0) * BLOCK_SIZE, BLOCK_SIZE, clock, is_whole=True
        )
        greedy = SamplingParams(temperature=0.0)
        taken = []
        for slots, context in sizes:
            rows = tuple(bench.row(i, context, 1, greedy) for i in range(slots))
            name = f"{slots} at {context}" if num_blocks is None else f"pool of {num_blocks}"
            taken.append(bench.measure(name, StepPlan(0, rows), self._seconds))
        return taken


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_model_options(parser)
    add_compute_options(parser)
    parser.add_argument("--slots", type=numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--contexts", type=numbers, default=[64, 512, 1024, 2048, 4096, 8000])
    parser.add_argument("--pools", type=numbers, default=[1000, 4000, 16_000], help="blocks of 4 tokens")
    parser.add_argument("--seconds", type=float, default=1.0, help="per measurement")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help=".png or .svg")
    options = parser.parse_args()
    require_plots([] if options.plot is None else [options.plot])
    prepare_host(options.threads)
    path = model_path(options)
    scaling = Scaling(
        ModelConfig(path, dtype=options.dtype, weight_dtype=options.weight_dtype), options.seconds
    )
    by_slots = scaling.points([(slots, 256) for slots in options.slots])
    by_context = scaling.points([(1, context) for context in options.contexts])
    by_pool = [scaling.points([(8, 256)], num_blocks)[0] for num_blocks in options.pools]
    slots = list(zip(options.slots, by_slots, strict=True))
    contexts = list(zip(options.contexts, by_context, strict=True))
    pools = list(zip(options.pools, by_pool, strict=True))
    if options.json is not None:
        results = {"slots": slots, "contexts": contexts, "pools": pools}
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if options.plot is not None:
        draw(
            slots, contexts, pools, f"{options.model}, {options.dtype}, {options.weight_dtype}", options.plot
        )


if __name__ == "__main__":
    main()
