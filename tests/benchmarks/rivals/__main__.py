"""`python -m tests.benchmarks.rivals`: see the package."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
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
        if name in found and not arguments.redo:
            continue
        pair = PAIRS[name](_place(arguments.cache))
        build()  # as `make` does
        if arguments.setup_only:
            continue
        found[name] = asyncio.run(compare(pair, works, arguments.passes))
        results.write(path, works, asdict(this_machine()), found)
    results.print_table(Console(highlight=False, width=max(120, Console().width)), works, found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.rivals", description=__doc__)
    parser.add_argument("--only", help=f"rivals to measure, of {', '.join(PAIRS)}; none: print the table")
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


async def compare(pair: Pair, works: list[Work], num_passes: int) -> results.Comparison:
    """Start both sides, let them work in turn, and end them."""
    rival, headrace = results.Side(pair.rival.name), results.Side(pair.headrace.name)
    async with pair.rival.start() as other:
        rival.start_s = other.start_s
        async with pair.headrace.start() as ours:
            headrace.start_s = ours.start_s
            sides = ((rival, other), (headrace, ours))
            for side, started in sides:
                side.idle_cpu = await _idle_cpu(started)
                await started.do(warm_up(works[0]))
            for work in works:
                for _ in range(num_passes):
                    for side, started in sides:
                        side.figures.setdefault(work.name, []).append(await _figure(started, work))
                for side, started in sides:
                    side.rss_mib = max(side.rss_mib, started.rss_mib())
            for side, started in sides:
                side.peak_mib = started.peak_mib()
    return results.Comparison(rival, headrace, datetime.now(UTC).isoformat(timespec="minutes"), _commit())


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
