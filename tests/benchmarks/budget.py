"""Whether promised latencies are kept, and at what price: real servers under Poisson load, many settings.

    .venv/bin/python -m tests.benchmarks.budget --out budget.json
    .venv/bin/python -m tests.benchmarks.budget --out budget.json --report

Measures the capacity of the default settings (requests per second with a queue that never runs dry), then
each load and each setting for a while: the budget, the defaults without one, and a grid of fixed
`max_num_seqs` and `max_num_batched_tokens`. Each cell is a fresh server and the same arrivals; what is in
--out already is not measured again, so a run may be broken off at any time. Goodput is requests per second
that met all targets (DistServe, OSDI '24), at the client; a request that isn't over --grace seconds after the
load is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.clients.bench_arrivals import arrival_times
from headrace.clients.bench_backend import GrpcBackend
from headrace.clients.bench_load import LoadOptions, LoadRun
from headrace.clients.bench_stats import RequestRecord
from headrace.clients.bench_workload import Conversation, Lengths, Turn, Workload
from headrace.clients.control import ControlClient
from headrace.clients.demo_server import running_server
from tests.benchmarks.options import numbers, reals, words

DEFAULT = (16, 512)
BUDGET = "budget"
LEAD_S = 8.0
"""Load before what is measured: the engine learns, the batch fills up."""


@dataclass(frozen=True)
class Cell:
    """What came of one load and one setting. Times are seconds.

    Args:
        goodput: requests per second that met all targets.
        offered: requests per second that came.
        steps_over: of the server's steps, those that took longer than the targets left them.
        server_tpot_p95_s: of the server's last 256 sequences, by its own clock.
    """

    goodput: float
    offered: float
    num_requests: int
    num_refused: int
    met_tpot: float
    met_ttft: float
    tpot_p50_s: float
    tpot_p95_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    steps_over: int = 0
    mean_step_s: float = 0.0
    server_tpot_p95_s: float = 0.0


def workload() -> Workload:
    """A chat service: prompts of 16 to 128 tokens, answers of 70 on average; no two prompts alike."""
    prompts, outputs = Lengths("16-128"), Lengths("geometric:70:8-256")

    def make(number: int) -> Conversation:
        rng = random.Random(number)
        ids = tuple(rng.randrange(100, 40_000) for _ in range(prompts.draw(rng)))
        return Conversation((Turn(ids, outputs.draw(rng)),))

    return Workload("chat", None, make)


def percentile(values: Iterable[float], percent: float) -> float:
    """Nearest rank; infinite without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(percent / 100 * len(ordered)))] if ordered else float("inf")


def judge(records: Sequence[RequestRecord], seconds: float, tpot_s: float, ttft_s: float) -> Cell:
    """The figures of what was due after the lead."""
    due = [record for record in records if record.due_s >= LEAD_S]
    over = [record for record in due if record.is_complete]
    tpots = [record.tpot_s for record in over if record.tpot_s is not None]
    # One without a first token has waited for one until the end.
    ttfts = [float("inf") if record.ttft_s is None else record.ttft_s for record in due]
    good = [r for r in over if (r.tpot_s or 0.0) <= tpot_s and r.ttft_s is not None and r.ttft_s <= ttft_s]
    return Cell(
        goodput=len(good) / seconds,
        offered=len(due) / seconds,
        num_requests=len(due),
        num_refused=sum(record.error == "RESOURCE_EXHAUSTED" for record in due),
        met_tpot=sum(value <= tpot_s for value in tpots) / max(1, len(tpots)),
        met_ttft=sum(value <= ttft_s for value in ttfts) / max(1, len(ttfts)),
        tpot_p50_s=percentile(tpots, 50),
        tpot_p95_s=percentile(tpots, 95),
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p95_s=percentile(ttfts, 95),
    )


class Bench:
    """Measures cells and keeps them in a file.

    Args:
        options: the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._kept: dict[str, object] = json.loads(options.out.read_text()) if options.out.exists() else {}

    def keep(self, name: str, value: object) -> None:
        """Write it down at once."""
        self._kept[name] = value
        self._options.out.write_text(json.dumps(self._kept, indent=1) + "\n")

    def cell(self, name: str) -> Cell | None:
        """What was measured already."""
        kept = self._kept.get(name)
        return Cell(**kept) if isinstance(kept, dict) else None

    async def capacity(self) -> float:
        """Requests per second of the default settings while the queue never runs dry."""
        kept = self._kept.get("capacity")
        if isinstance(kept, int | float):
            return float(kept)
        seconds = self._options.capacity_seconds
        records = await self._load(self._flags("default"), rate=float("inf"), seconds=seconds, num=4000)
        ends = [record.end_s or 0.0 for record in records if record.is_complete]
        done = [end_s for end_s in ends if LEAD_S <= end_s <= LEAD_S + seconds]
        self.keep("capacity", len(done) / seconds)
        return len(done) / seconds

    async def measure(self, load: float, setting: str) -> None:
        """One cell, unless it is known."""
        name = f"{load:g} {setting}"
        if self.cell(name) is None:
            seconds, options = self._options.seconds, self._options
            rate = load * await self.capacity()
            records = await self._load(self._flags(setting), rate=rate, seconds=seconds)
            cell = judge(records, seconds, options.tpot_ms / 1e3, options.ttft_ms / 1e3)
            self.keep(name, asdict(cell) | self._told)
        print(line(name, self.cell(name)), flush=True)

    def _flags(self, setting: str) -> list[str]:
        flags = ["--model", self._options.model, "--max-num-waiting", "100000", "--log-level", "warning"]
        flags += shlex.split(self._options.serve)
        if setting.startswith(BUDGET):
            targets = ("--target-tpot-ms", f"{self._options.tpot_ms:g}", "--target-ttft-ms")
            flags += ["--max-num-seqs", "64", *targets, f"{self._options.ttft_ms:g}"]
            return [*flags, "--refuse-late"] if setting.endswith("refuse") else flags
        num_seqs, num_tokens = DEFAULT if setting == "default" else map(int, setting.split("/"))
        return [*flags, "--max-num-seqs", str(num_seqs), "--max-num-batched-tokens", str(num_tokens)]

    async def _load(
        self, flags: list[str], *, rate: float, seconds: float, num: int | None = None
    ) -> list[RequestRecord]:
        options = LoadOptions(
            arrivals=arrival_times(rate, seed=7), num_conversations=num, duration_s=LEAD_S + seconds
        )
        async with running_server(flags) as server:
            backend = GrpcBackend(server.target, server.control_target, bypass_cache=True)
            async with backend.connect() as connection:
                run = LoadRun(connection, workload(), options)
                with suppress(TimeoutError):
                    async with asyncio.timeout(LEAD_S + seconds + self._options.grace):
                        await run.run()
            async with ControlClient(server.control_target) as control:
                load = await control.load()
        steps = max(1, load.totals.num_steps)
        self._told = {
            "steps_over": load.latency.num_steps_over,
            "mean_step_s": load.totals.step_s / steps,
            "server_tpot_p95_s": load.latency.classes[0].attained_tpot_p95_s or 0.0,
        }
        return run.records


def line(name: str, cell: Cell | None) -> str:
    """A cell in one line."""
    if cell is None:
        return f"{name:22s} not measured"
    return (
        f"{name:22s} goodput {cell.goodput:6.2f} of {cell.offered:6.2f} /s, refused {cell.num_refused}, "
        f"TPOT ms p50 {1e3 * cell.tpot_p50_s:5.1f} p95 {1e3 * cell.tpot_p95_s:5.1f} met {cell.met_tpot:.1%} "
        f"(server p95 {1e3 * cell.server_tpot_p95_s:.1f}), "
        f"TTFT ms p50 {1e3 * cell.ttft_p50_s:6.0f} p95 {1e3 * cell.ttft_p95_s:6.0f} met {cell.met_ttft:.1%}"
    )


def report(bench: Bench, loads: Sequence[float], grid: Sequence[str], tpot_ms: float) -> None:
    """What the budget gives, beside the best of the grid."""
    for load in loads:
        budget, default = bench.cell(f"{load:g} {BUDGET}"), bench.cell(f"{load:g} default")
        fixed = {name: cell for name in grid if (cell := bench.cell(f"{load:g} {name}")) is not None}
        if budget is None or default is None:
            continue
        best = max(fixed, key=lambda name: fixed[name].goodput, default=None)
        told = "" if best is None else f", {budget.goodput / fixed[best].goodput:5.2f} x best fixed ({best})"
        print(
            f"load {load:g}: p95 TPOT {1e3 * budget.tpot_p95_s:.1f} ms = "
            f"{1e3 * budget.tpot_p95_s / tpot_ms:.2f} x target; goodput {budget.goodput:.2f} /s{told}, "
            f"{budget.goodput / max(default.goodput, 1e-9):.2f} x default"
        )


async def run(options: argparse.Namespace) -> None:
    """Measure what is missing."""
    bench = Bench(options)
    grid = [f"{n}/{b}" for n in options.grid_seqs for b in options.grid_tokens]
    loads: list[float] = options.loads
    if not options.report:
        print(f"capacity {await bench.capacity():.2f} requests/s", flush=True)
        for load in loads:
            for setting in [BUDGET, "default", *options.also, *(grid if options.grid else [])]:
                await bench.measure(load, setting)
    report(bench, loads, grid, options.tpot_ms)


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="JSON file of what is measured, kept up to date"
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--serve", default="", help="more flags for all servers: --serve=--weight-dtype=int4")
    parser.add_argument("--tpot-ms", type=float, default=25.0)
    parser.add_argument("--ttft-ms", type=float, default=1000.0)
    parser.add_argument("--loads", type=reals, default=[0.5, 0.8, 1, 1.5], help="shares of the capacity")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each cell, after the lead")
    parser.add_argument("--capacity-seconds", type=float, default=30.0)
    parser.add_argument(
        "--grace", type=float, default=5.0, help="how long the last requests may take, seconds"
    )
    parser.add_argument("--grid", action="store_true", help="measure fixed settings as well")
    parser.add_argument("--grid-seqs", type=numbers, default=[8, 16, 24, 32])
    parser.add_argument("--grid-tokens", type=numbers, default=[64, 128, 512])
    parser.add_argument("--also", type=words, default=[], help=f"further settings: '{BUDGET} refuse', 12/256")
    parser.add_argument("--report", action="store_true", help="only tell what is in the file")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
