"""The command line of `headrace bench`. What it runs is imported when it runs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headrace.clients import bench_options as opt
from headrace.clients import cli_access as access
from headrace.clients.cli_outcome import FAILED, INTERRUPTED, USAGE, fail, fail_because, require_options
from headrace.clients.cli_times import duration_in

if TYPE_CHECKING:
    from headrace.clients.bench import BenchResult, BenchSettings
    from headrace.clients.bench_backend import Backend


def bench(
    *,
    target: opt.Target = "127.0.0.1:50051",
    control_target: opt.ControlTarget = None,
    streams: opt.Streams = False,
    openai: opt.Openai = None,
    chat: opt.Chat = False,
    openai_extra: opt.OpenaiExtra = None,
    api_key_file: opt.ApiKeyFile = None,
    model: opt.Model = None,
    bypass_cache: opt.BypassCache = False,
    dataset: opt.Dataset = None,
    prompt_len: opt.PromptLen = None,
    output_len: opt.OutputLen = None,
    shared_prefix_len: opt.SharedPrefixLen = 0,
    num_prefixes: opt.NumPrefixes = 1,
    turns: opt.Turns = 1,
    vocabulary_size: opt.VocabularySize = None,
    natural_length: opt.NaturalLength = False,
    temperature: opt.Temperature = 0.0,
    seed: opt.Seed = 0,
    concurrency: opt.Concurrency = None,
    rate: opt.Rate = None,
    arrivals: opt.Arrivals = "poisson",
    burstiness: opt.Burstiness = 1.0,
    num_requests: opt.NumRequests = None,
    duration: opt.Duration = None,
    request_timeout: opt.RequestTimeout = None,
    warm_up: opt.WarmUp = 4,
    goodput: opt.Goodput = None,
    json_path: opt.JsonPath = None,
    plot: opt.Plot = None,
) -> None:
    """Put load on a server and measure what its callers would see.

    Latencies count from when a request was due, so that a server that falls
    behind can't hide it. Failed requests are counted by their codes. Exit status:
    0 when every request was complete, 1 when one failed.
    """
    from headrace.clients import bench as measuring  # noqa: PLC0415
    from headrace.clients.bench_backend import BackendError  # noqa: PLC0415
    from headrace.clients.bench_workload import WorkloadError  # noqa: PLC0415
    from headrace.clients.plots import PlotError, require_plots  # noqa: PLC0415

    require_options({"temperature": temperature})
    try:
        require_plots(plot or [])
        settings = measuring.BenchSettings(
            dataset=dataset,
            prompt_len=prompt_len,
            output_len=output_len,
            shared_prefix_len=shared_prefix_len,
            num_prefixes=num_prefixes,
            num_turns=turns,
            vocabulary_size=vocabulary_size,
            num_requests=num_requests,
            duration_s=None if duration is None else duration_in(duration, "--duration"),
            concurrency=concurrency,
            rate_per_s=rate,
            arrivals=arrivals,
            burstiness=burstiness,
            num_warm_up=warm_up,
            is_length_forced=not natural_length,
            targets=opt.targets_in(goodput),
            timeout_s=None if request_timeout is None else duration_in(request_timeout, "--request-timeout"),
            seed=seed,
        )
        settings.check()
        if openai is None:
            _refuse_openai_only(chat, openai_extra, api_key_file)
            backend = _grpc(
                target, control_target, model, temperature, streams=streams, bypass_cache=bypass_cache
            )
        else:
            _refuse_grpc_only(control_target, streams=streams, bypass_cache=bypass_cache)
            backend = _openai(openai, model, temperature, openai_extra, api_key_file, chat=chat)
        result = _measured(backend, settings)
        _report(result, json_path, plot or [])
    except (WorkloadError, PlotError) as error:
        fail(str(error), USAGE)
    except BackendError as error:
        fail_because(error)
    if result.is_interrupted:
        raise typer.Exit(INTERRUPTED)
    if result.summary.num_failed:
        raise typer.Exit(FAILED)


def _grpc(
    target: str,
    control_target: str | None,
    model: str | None,
    temperature: float,
    *,
    streams: bool,
    bypass_cache: bool,
) -> Backend:
    from headrace.clients.bench_backend import GrpcBackend  # noqa: PLC0415

    return GrpcBackend(
        target,
        control_target,
        is_multiplexed=not streams,
        bypass_cache=bypass_cache,
        model=model,
        temperature=temperature,
        connection=access.connection(),
    )


def _openai(
    url: str, model: str | None, temperature: float, extra: str | None, key_file: Path | None, *, chat: bool
) -> Backend:
    from headrace.clients.bench_openai import OpenAiBackend  # noqa: PLC0415

    if not re.match("https?://[^/]", url):
        fail(f"--openai: {url!r} is no URL: use http://HOST:PORT", USAGE)
    fields: object = {}
    api_key: str | None = None
    try:
        fields = json.loads(extra or "{}")
        api_key = None if key_file is None else key_file.read_text(encoding="utf-8").strip()
    except ValueError as error:
        fail(f"--openai-extra is no JSON: {error}", USAGE)
    except OSError as error:
        fail(f"--api-key-file {key_file}: {error.strerror}", USAGE)
    if not isinstance(fields, dict):
        fail('--openai-extra must be a JSON object, as in {"top_k": 1}', USAGE)
    return OpenAiBackend(url, chat, model, temperature, api_key, fields)


def _refuse_openai_only(chat: bool, extra: str | None, key_file: Path | None) -> None:
    given = [
        name
        for name, is_given in (("--chat", chat), ("--openai-extra", extra), ("--api-key-file", key_file))
        if is_given
    ]
    if given:
        fail(f"{', '.join(given)}: means something with --openai alone", USAGE)


def _refuse_grpc_only(control_target: str | None, *, streams: bool, bypass_cache: bool) -> None:
    flags = (("--control-target", control_target), ("--streams", streams), ("--bypass-cache", bypass_cache))
    if given := [name for name, is_given in flags if is_given]:
        fail(f"{', '.join(given)}: means nothing with --openai", USAGE)


def _measured(backend: Backend, settings: BenchSettings) -> BenchResult:
    import asyncio  # noqa: PLC0415

    from rich.console import Console  # noqa: PLC0415

    from headrace.clients.bench import run_bench  # noqa: PLC0415

    return asyncio.run(run_bench(backend, settings, Console(stderr=True, highlight=False)))


def _report(result: BenchResult, json_path: Path | None, plots: list[Path]) -> None:
    from rich.console import Console  # noqa: PLC0415

    from headrace.clients.bench_report import print_result, result_as_json  # noqa: PLC0415
    from headrace.clients.plots import PlotError, draw_bench  # noqa: PLC0415

    print_result(Console(highlight=False), result)
    try:
        if json_path is not None:
            text = json.dumps(result_as_json(result, sys.argv), allow_nan=False)
            json_path.write_text(text + "\n", encoding="utf-8")
        if plots:
            draw_bench(result.records, result.summary, result.workload, plots)
    except OSError as error:
        fail(f"{error.filename}: can't be written: {error.strerror}", FAILED)
    except PlotError as error:
        fail(str(error), FAILED)
