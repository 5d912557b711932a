"""`headrace tune`: measures a server at growing concurrency and says which flags to serve with."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shlex
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from headrace.clients.bench import BenchResult, BenchSettings, run_bench
from headrace.clients.bench_backend import GrpcBackend
from headrace.clients.bench_machine import this_machine
from headrace.clients.bench_report import without_token
from headrace.clients.bench_stats import Summary
from headrace.clients.demo_server import running_server
from headrace.clients.tune_curve import CurvePoint, LatencyBudget, best_within, find_knee

SCHEMA = "headrace.tune/1"
CURVE_FILE = "curve.json"
_LEAST_REQUESTS = 16
_FREE_PORT = "our server takes a free port; leave it out"
_OWN_FLAGS = {
    "--port": _FREE_PORT,
    "--control-port": _FREE_PORT,
    "--ready-file": "leave it out",
    "--model": "use tune's own --model",
    "--max-num-seqs": "it is the largest of --concurrency",
    "--max-num-batched-tokens": "use --batched-tokens",
}


class TuneError(Exception):
    """Tuning can't be done so; the message says what would be right."""


@dataclass(frozen=True, slots=True)
class TuneSettings:
    """What is measured: a closed loop at each concurrency, on a server for each token budget.

    Args:
        backend: a running server; None: servers of our own.
        model, serve_arguments: of our own servers, as for `headrace serve`.
        concurrencies: requests at a time.
        batched_tokens: values of --max-num-batched-tokens; None is the server's default.
        bench: prompts and lengths; its load is set here.
        num_rounds: requests for each place: so often each caller comes again.
        command: starts the server, arguments follow; None is `headrace serve`.
    """

    concurrencies: tuple[int, ...]
    batched_tokens: tuple[int | None, ...] = (None,)
    backend: GrpcBackend | None = None
    model: str = ""
    serve_arguments: tuple[str, ...] = ()
    bench: BenchSettings = field(default_factory=BenchSettings)
    num_rounds: int = 4
    command: tuple[str, ...] | None = None

    def check(self) -> None:
        """Check what can be checked before.

        Raises:
            TuneError: there is nothing to measure, or a running server should be restarted.
        """
        if not self.concurrencies or min(self.concurrencies) < 1:
            raise TuneError("concurrencies begin at 1: use a list such as 1,2,4,8,16")
        if any(tokens is not None and tokens < 1 for tokens in self.batched_tokens):
            raise TuneError("token budgets begin at 1: use a list such as 256,512,1024")
        if self.backend is not None and self.batched_tokens != (None,):
            raise TuneError("the token budget of a running server can't change: leave out --target, or it")
        check_serve_arguments(self.serve_arguments)

    def key(self) -> dict[str, object]:
        """What must be equal for a point that was measured before to count."""
        return {
            "target": None if self.backend is None else self.backend.target,
            "model": self.model,
            "serve_arguments": list(self.serve_arguments),
            "num_rounds": self.num_rounds,
            "dataset": None if self.bench.dataset is None else str(self.bench.dataset),
            "prompt_len": self.bench.prompt_len,
            "output_len": self.bench.output_len,
            "seed": self.bench.seed,
        }


@dataclass
class Tuning:
    """What has been measured so far, kept in a file.

    Args:
        folder: of the file and of the pictures.
        key: see `TuneSettings.key`.
    """

    folder: Path
    key: Mapping[str, object]
    command: Sequence[str] = ()
    server: Mapping[str, object] = field(default_factory=dict)
    points: list[CurvePoint] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / CURVE_FILE

    def point(self, concurrency: int, batched_tokens: int | None) -> CurvePoint | None:
        """A point that is measured already."""
        for point in self.points:
            if (point.concurrency, point.max_num_batched_tokens) == (concurrency, batched_tokens):
                return point
        return None

    def resume(self) -> None:
        """Take over what an earlier run has left.

        Raises:
            TuneError: it measured something else.
        """
        if not self.path.is_file():
            return
        try:
            document = json.loads(self.path.read_text(encoding="utf-8"))
            earlier, points = document["settings"], [CurvePoint(**point) for point in document["points"]]
        except (ValueError, KeyError, TypeError) as error:
            raise TuneError(f"{self.path}: is no curve of ours ({error}): use another --out") from None
        if document.get("schema") != SCHEMA or earlier != self.key:
            raise TuneError(
                f"{self.path}: was measured with other settings: use another --out, or --restart to forget it"
            )
        self.points = points

    def add(self, point: CurvePoint) -> None:
        """Keep a point, in the file, too."""
        self.points.append(point)
        self.write(LatencyBudget())

    def write(self, budget: LatencyBudget) -> None:
        """Write the file: never half of it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        knee, best = find_knee(self.points), best_within(self.points, budget)
        document = {
            "schema": SCHEMA,
            "command": without_token(self.command),
            "settings": self.key,
            "machine": dataclasses.asdict(this_machine()),
            "server": self.server,
            "points": [dataclasses.asdict(point) for point in self.points],
            "knee": None if knee is None else dataclasses.asdict(knee),
            "budget": dataclasses.asdict(budget),
            "best_within_budget": dataclasses.asdict(best) if best is not None and budget.is_any else None,
        }
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        part.replace(self.path)


async def run_tune(settings: TuneSettings, tuning: Tuning, console: Console) -> bool:
    """Measure every point that is not there yet; False when it was ended before.

    Raises:
        TuneError, BackendError, WorkloadError, ServerFailedError: it can't be done.
    """
    settings.check()
    _end_in_order_on_signals()
    total = len(settings.concurrencies) * len(settings.batched_tokens)
    for batched_tokens in settings.batched_tokens:
        missing = [
            concurrency
            for concurrency in settings.concurrencies
            if tuning.point(concurrency, batched_tokens) is None
        ]
        if not missing:
            continue
        try:
            async with _server(settings, batched_tokens) as backend:
                for concurrency in missing:
                    title = f"point {len(tuning.points) + 1} of {total}: {concurrency} at a time"
                    if batched_tokens is not None:
                        title += f", {batched_tokens} tokens a step"
                    load = _load(settings, concurrency, len(tuning.points))
                    result = await run_bench(backend, load, console, title)
                    if result.is_interrupted:
                        return False
                    tuning.server = result.server.facts
                    tuning.add(point_of(result, concurrency, batched_tokens))
                    console.print(line_of(tuning.points[-1]), markup=False, highlight=False, soft_wrap=True)
        except asyncio.CancelledError:
            return False
    return True


def _end_in_order_on_signals() -> None:
    """SIGTERM and SIGHUP end it as Ctrl-C does: what is measured is kept, and our own server ends as well."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    if task is not None:
        for which in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(which, task.cancel)


@asynccontextmanager
async def _server(settings: TuneSettings, batched_tokens: int | None) -> AsyncIterator[GrpcBackend]:
    # Synthetic prompts are new at each point; those of a dataset come again: no cache may know them.
    comes_again = settings.bench.dataset is not None
    if settings.backend is not None:
        yield dataclasses.replace(settings.backend, bypass_cache=comes_again)
        return
    arguments = ["--model", settings.model, "--max-num-seqs", f"{max(settings.concurrencies)}"]
    if batched_tokens is not None:
        arguments += ["--max-num-batched-tokens", f"{batched_tokens}"]
    async with running_server([*arguments, *settings.serve_arguments], settings.command) as server:
        yield GrpcBackend(server.target, server.control_target, bypass_cache=comes_again)


def _load(settings: TuneSettings, concurrency: int, place: int) -> BenchSettings:
    """A closed loop; every point has prompts of its own, which no cache has seen."""
    return dataclasses.replace(
        settings.bench,
        concurrency=concurrency,
        num_requests=max(_LEAST_REQUESTS, concurrency * settings.num_rounds),
        num_warm_up=min(concurrency, 4),
        seed=settings.bench.seed * 1_000_003 + place,
    )


def point_of(result: BenchResult, concurrency: int, batched_tokens: int | None) -> CurvePoint:
    """The point that a run is.

    Raises:
        TuneError: no request was complete, or no answer has two tokens.
    """
    summary = result.summary
    if summary.ttft_s is None or summary.tpot_s is None:
        raise TuneError(f"at {concurrency} at a time nothing could be measured: {_failures(summary)}")
    return CurvePoint(
        concurrency=concurrency,
        max_num_batched_tokens=batched_tokens,
        output_tokens_per_s=summary.output_tokens_per_s,
        requests_per_s=summary.requests_per_s,
        tpot_p50_s=summary.tpot_s.at(50),
        tpot_p95_s=summary.tpot_s.at(95),
        ttft_p50_s=summary.ttft_s.at(50),
        ttft_p95_s=summary.ttft_s.at(95),
        num_requests=summary.num_requests,
        num_failed=summary.num_failed,
    )


def _failures(summary: Summary) -> str:
    if summary.errors:
        return ", ".join(f"{count} × {code}" for code, count in summary.errors)
    return "answers need at least two tokens"


def line_of(point: CurvePoint) -> str:
    """A point in one line."""
    budget = "" if point.max_num_batched_tokens is None else f", {point.max_num_batched_tokens} tokens a step"
    failed = f", {point.num_failed} of {point.num_requests} failed" if point.num_failed else ""
    return (
        f"{point.concurrency} at a time{budget}: {point.output_tokens_per_s:.0f} tokens/s, TPOT p50 "
        f"{point.tpot_p50_s * 1e3:.1f} ms, p95 {point.tpot_p95_s * 1e3:.1f} ms, TTFT p95 "
        f"{point.ttft_p95_s * 1e3:.0f} ms{failed}"
    )


def serve_command(settings: TuneSettings, point: CurvePoint) -> str:
    """The command that serves at a point."""
    words = ["headrace", "serve"]
    if settings.model:
        words += ["--model", settings.model]
    words += ["--max-num-seqs", f"{point.concurrency}"]
    if point.max_num_batched_tokens is not None:
        words += ["--max-num-batched-tokens", f"{point.max_num_batched_tokens}"]
    return shlex.join([*words, *settings.serve_arguments])


def check_serve_arguments(arguments: Sequence[str]) -> None:
    """Refuse flags of a server that are ours to set: given again, they would stand in what is recommended.

    Raises:
        TuneError: it names the flag.
    """
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag in _OWN_FLAGS:
            raise TuneError(f"--serve: {flag} is set here: {_OWN_FLAGS[flag]}")


def advice(settings: TuneSettings, points: Sequence[CurvePoint], budget: LatencyBudget) -> list[str]:
    """What the curve says, in sentences."""
    best = best_within(points, LatencyBudget())
    if best is None:
        return ["No point without failed requests: nothing to recommend."]
    knee = find_knee(points)
    if knee is not None:
        said = [f"Sweet spot (knee): {line_of(knee)}", f"  {serve_command(settings, knee)}"]
    else:
        top = max(point.concurrency for point in points)
        said = [
            "No knee within the range: up to its end, throughput grows as fast as latency. Measure further:",
            f"  --concurrency {top},{2 * top},{4 * top}",
            f"Highest throughput: {line_of(best)}",
            f"  {serve_command(settings, best)}",
        ]
    if budget.is_any:
        best = best_within(points, budget)
        if best is None:
            fastest = min(points, key=lambda point: point.tpot_p95_s)
            said.append(f"No measured point keeps the budget; the nearest in TPOT is {line_of(fastest)}")
        else:
            said += [f"Best within the budget: {line_of(best)}", f"  {serve_command(settings, best)}"]
    return said
