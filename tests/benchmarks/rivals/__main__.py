"""`python -m tests.benchmarks.rivals`: see the package."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from headrace.clients.bench_machine import this_machine
from headrace.engine.models.hub import resolve_model
from headrace.engine.native.build import build
from headrace.service.config import default_cache_dir
from tests.benchmarks.rivals import results
from tests.benchmarks.rivals.contender import Started
from tests.benchmarks.rivals.pairs import PAIRS, Pair, Place
from tests.benchmarks.rivals.work import Work, all_work, figure_of, warm_up

DEFAULT_MODEL = "smollm2-135m-instruct"
IDLE_S = 1.0
SETTLE_S = 1.0
"""Pause before each piece of work: the other side's threads may spin for a while after theirs."""


def main() -> None:
    """Measure what is asked for and not measured yet, then print the table of everything."""
    arguments = _parser().parse_args()
    names = arguments.only.split(",") if arguments.only else []
    if unknown := [name for name in names if name not in PAIRS]:
        raise SystemExit(f"no such rival: {', '.join(unknown)}; there is {', '.join(PAIRS)}")
    works = all_work(arguments.workload)
    path = arguments.results or arguments.cache / "results.json"
    found = results.read(path, works)
    for name in names:
        earlier = None if arguments.redo else found.get(name)
        missing = [work for work in works if work.name in arguments.work.split(",")]
        if earlier is not None:
            missing = [work for work in missing if not earlier.has(work.name, arguments.passes)]
        if not missing:
            continue
        pair = PAIRS[name](_place(arguments.cache))
        build()  # as `make` does
        if arguments.setup_only:
            continue
        found[name] = earlier or results.Comparison(
            results.Side(pair.rival.name), results.Side(pair.headrace.name)
        )

        def keep() -> None:
            results.write(path, works, asdict(this_machine()), found)

        asyncio.run(compare(pair, found[name], missing, arguments.passes, keep))
    results.print_table(Console(highlight=False, width=max(120, Console().width)), works, found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.rivals", description=__doc__)
    parser.add_argument("--only", help=f"rivals to measure, of {', '.join(PAIRS)}; none: print the table")
    parser.add_argument("--work", default="w1,w2,w3", help="which of it, to measure in short pieces")
    parser.add_argument("--workload", type=Path, help="JSON of the work; otherwise it is made from a seed")
    parser.add_argument("--passes", type=int, default=3, help="how often each side does each work, in turn")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "headrace-rivals")
    parser.add_argument("--results", type=Path, help="file of figures; results.json in the cache otherwise")
    parser.add_argument("--redo", action="store_true", help="measure again what is there")
    parser.add_argument("--setup-only", action="store_true", help="make environments and weights alone")
    return parser


def _place(cache: Path) -> Place:
    model = resolve_model(DEFAULT_MODEL, None, default_cache_dir())
    # The folder is named after the file that it was made from.
    digest = model.parent.name.partition("-")[0]
    (gguf,) = (default_cache_dir() / "files").glob(f"{digest}*.gguf")
    return Place(cache, model, gguf)


async def compare(
    pair: Pair,
    comparison: results.Comparison,
    works: list[Work],
    num_passes: int,
    keep: Callable[[], None],
) -> None:
    """Start both sides, let them work in turn, and end them; what is whole is kept at once."""
    async with pair.rival.start() as other, pair.headrace.start() as ours:
        sides = ((comparison.rival, other), (comparison.headrace, ours))
        for side, started in sides:
            side.start_s = started.start_s
            side.idle_cpu = await _idle_cpu(started)
            await started.do(warm_up(works[0]))
        for work in works:
            figures: list[list[float]] = [[], []]
            for _ in range(num_passes):
                for (_, started), measured in zip(sides, figures, strict=True):
                    measured.append(await _figure(started, work))
            for (side, started), measured in zip(sides, figures, strict=True):
                side.figures[work.name] = measured
                side.rss_mib = max(side.rss_mib, started.rss_mib())
                side.peak_mib = max(side.peak_mib, started.peak_mib())
            comparison.measured = datetime.now(UTC).isoformat(timespec="minutes")
            comparison.commit = _commit()
            keep()


async def _figure(started: Started, work: Work) -> float:
    await asyncio.sleep(SETTLE_S)
    return statistics.median([figure_of(work, await started.do(work)) for _ in range(work.num_repeats)])


async def _idle_cpu(started: Started) -> float:
    before_s = started.cpu_s()
    await asyncio.sleep(IDLE_S)
    return (started.cpu_s() - before_s) / IDLE_S


def _commit() -> str:
    command = ("git", "describe", "--always", "--dirty")
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
