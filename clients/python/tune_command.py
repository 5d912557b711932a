"""The command line of `headrace tune`. What it runs is imported when it runs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.clients import bench_options as opt
from headrace.clients import cli_access as access
from headrace.clients.cli_outcome import INTERRUPTED, USAGE, fail, fail_because, require_server
from headrace.clients.cli_times import latency_in

if TYPE_CHECKING:
    from headrace.clients.bench_backend import GrpcBackend
    from headrace.clients.tune import TuneSettings, Tuning
    from headrace.clients.tune_curve import LatencyBudget

DEFAULT_CONCURRENCY = "1,2,4,8,16,32"
CURVE = "Curve"
BUDGET = "Budget"


def tune(
    *,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="What to serve, as for `headrace serve --model`.",
            rich_help_panel=opt.SERVER,
        ),
    ] = "smollm2-135m-instruct",
    serve: Annotated[
        str,
        typer.Option(
            "--serve",
            metavar="FLAGS",
            help="Further flags of the server, one word: --serve '--dtype bfloat16'.",
            rich_help_panel=opt.SERVER,
        ),
    ] = "",
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-t",
            metavar="HOST:PORT",
            help="Measure this running server instead; then concurrency alone is swept.",
            rich_help_panel=opt.SERVER,
        ),
    ] = None,
    concurrency: Annotated[
        str,
        typer.Option(
            "--concurrency", "-c", metavar="LIST", help="Requests at a time.", rich_help_panel=CURVE
        ),
    ] = DEFAULT_CONCURRENCY,
    batched_tokens: Annotated[
        str | None,
        typer.Option(
            "--batched-tokens",
            metavar="LIST",
            help="Values of --max-num-batched-tokens, a server each: 128,256,512. The default one otherwise.",
            rich_help_panel=CURVE,
        ),
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(
            "--rounds",
            min=1,
            help="Requests for each place; at least 16 a point.",
            rich_help_panel=CURVE,
        ),
    ] = 4,
    dataset: opt.Dataset = None,
    prompt_len: opt.PromptLen = None,
    output_len: opt.OutputLen = None,
    seed: opt.Seed = 0,
    tpot: Annotated[
        str | None,
        typer.Option(
            "--tpot",
            metavar="TIME",
            help="Time per output token that 95 % of requests must keep, such as 30ms.",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    ttft: Annotated[
        str | None,
        typer.Option(
            "--ttft",
            metavar="TIME",
            help="Time to first token that 95 % of requests must keep, such as 500ms.",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="FOLDER",
            help="For curve.json, .png and .svg. What lies there is not measured again.",
            rich_help_panel=opt.REPORT,
        ),
    ] = Path("headrace-tune"),
    restart: Annotated[
        bool, typer.Option("--restart", help="Forget what lies there.", rich_help_panel=opt.REPORT)
    ] = False,
) -> None:
    """Find out how many requests at a time a server should take, and print the flags for it.

    Measures throughput and latency at growing concurrency, marks the knee of the
    curve, and the best point that keeps a latency budget. Ctrl-C keeps what is
    measured; the same command goes on from there.
    """
    from headrace.clients.bench import BenchSettings  # noqa: PLC0415
    from headrace.clients.plots import PlotError, require_plots  # noqa: PLC0415
    from headrace.clients.tune import TuneSettings, Tuning  # noqa: PLC0415
    from headrace.clients.tune_curve import LatencyBudget  # noqa: PLC0415

    budget = LatencyBudget(
        tpot_s=None if tpot is None else latency_in(tpot, "--tpot"),
        ttft_s=None if ttft is None else latency_in(ttft, "--ttft"),
    )
    pictures = [out / "curve.png", out / "curve.svg"]
    try:
        require_plots(pictures)
        bench = BenchSettings(dataset=dataset, prompt_len=prompt_len, output_len=output_len, seed=seed)
        bench.check()
    except (PlotError, ValueError) as error:
        fail(str(error), USAGE)
    if target is None:
        require_server("tune")
    elif serve:
        fail("--serve: a running server can't be given flags: leave out --target, or it", USAGE)
    settings = TuneSettings(
        concurrencies=_numbers(concurrency, "--concurrency"),
        batched_tokens=(None,) if batched_tokens is None else _numbers(batched_tokens, "--batched-tokens"),
        backend=_backend(target),
        model=model if target is None else "",
        serve_arguments=tuple(shlex.split(serve)),
        bench=bench,
        num_rounds=rounds,
    )
    tuning = Tuning(out, settings.key(), sys.argv)
    if restart:
        tuning.path.unlink(missing_ok=True)
    _run(settings, tuning, budget, pictures)


def _run(settings: TuneSettings, tuning: Tuning, budget: LatencyBudget, pictures: list[Path]) -> None:
    import asyncio  # noqa: PLC0415

    from rich.console import Console  # noqa: PLC0415

    from headrace.clients.bench_backend import BackendError  # noqa: PLC0415
    from headrace.clients.bench_workload import WorkloadError  # noqa: PLC0415
    from headrace.clients.demo_server import ServerFailedError  # noqa: PLC0415
    from headrace.clients.tune import TuneError, advice, run_tune  # noqa: PLC0415
    from headrace.clients.tune_plot import draw_curve  # noqa: PLC0415

    try:
        settings.check()
        tuning.resume()
        is_complete = asyncio.run(run_tune(settings, tuning, Console(stderr=True, highlight=False)))
    except (TuneError, WorkloadError) as error:
        fail(str(error), USAGE)
    except (BackendError, ServerFailedError) as error:
        fail_because(error)
    if tuning.points:
        tuning.write(budget)
        draw_curve(tuning.points, budget, settings.model or "running server", pictures)
        for line in advice(settings, tuning.points, budget):
            typer.echo(line)
        typer.echo(f"Written: {tuning.path}, {', '.join(map(str, pictures))}")
    if not is_complete:
        typer.echo("headrace: ended early; the same command goes on from here", err=True)
        raise typer.Exit(INTERRUPTED)


def _backend(target: str | None) -> GrpcBackend | None:
    from headrace.clients.bench_backend import GrpcBackend  # noqa: PLC0415

    return None if target is None else GrpcBackend(target, connection=access.connection())


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        fail(f"{option}: {text!r} is no list of numbers: use 1,2,4,8", USAGE)
    if len(set(numbers)) < len(numbers):
        fail(f"{option}: {text!r} names a number twice", USAGE)
    return numbers
