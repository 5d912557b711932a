"""What a load test says: as JSON, as a table.

The JSON object, version 1. Times are seconds, rates are per second. A minor addition keeps the number; a
field that changes its meaning or goes away raises it.

- ``schema``: "headrace.bench/1".
- ``command``: the command line, as a list. ``began``: when the first measured request was due, ISO 8601, UTC.
- ``machine``: see `Machine`. ``server``: ``protocol``, ``address``, and ``facts``: what the server says of
itself.
- ``settings``: see `BenchSettings`. ``workload``: its name.
- ``latency_origin``: "due": latencies count from when a request was due, not from when it was sent.
- ``is_interrupted``, ``is_repeated``, ``num_warm_up``: see `BenchResult`.
- ``summary``: see `Summary`; each distribution is ``count``, ``mean``, ``minimum``, ``maximum``, ``p50``,
``p90``,
  ``p95``, ``p99``, or null where there is nothing to tell.
- ``requests``: one object each, see `RequestRecord`, with ``arrivals`` as [time, tokens], and ``ttft_s``,
``tpot_s``,
  ``e2e_s`` as derived.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from headrace.clients.bench import BenchResult
from headrace.clients.bench_machine import this_machine
from headrace.clients.bench_stats import PERCENTILES, Distribution, RequestRecord, Summary

SCHEMA = "headrace.bench/1"
_LATENCIES = (
    ("time to first token", "ttft_s"),
    ("inter-token latency", "itl_s"),
    ("time per output token", "tpot_s"),
    ("end to end", "e2e_s"),
    ("in the server's queue", "queued_s"),
    ("sent after it was due", "lateness_s"),
)


def result_as_json(result: BenchResult, command: Sequence[str]) -> dict[str, object]:
    """The object of this module's docstring.

    Args:
        command: the command line that made it.
    """
    return {
        "schema": SCHEMA,
        "command": without_token(command),
        "began": result.began.isoformat(),
        "machine": dataclasses.asdict(this_machine()),
        "server": {
            "protocol": result.server.protocol,
            "address": result.server.address,
            "facts": dict(result.server.facts),
        },
        "settings": _plain(dataclasses.asdict(result.settings)),
        "workload": result.workload,
        "latency_origin": "due",
        "is_interrupted": result.is_interrupted,
        "is_repeated": result.is_repeated,
        "num_warm_up": result.num_warm_up,
        "summary": summary_as_json(result.summary),
        "requests": [_request_as_json(record) for record in result.records],
    }


def without_token(command: Sequence[str]) -> list[str]:
    """A command line without what says who calls."""
    told: list[str] = []
    for word in command:
        if told and told[-1] == "--token":
            told.append("…")
        else:
            told.append("--token=…" if word.startswith("--token=") else word)
    return told


def summary_as_json(summary: Summary) -> dict[str, object]:
    """`summary` of the object."""
    told: dict[str, object] = {}
    for field in dataclasses.fields(summary):
        value = getattr(summary, field.name)
        told[field.name] = _distribution_as_json(value) if isinstance(value, Distribution) else value
    told["errors"] = dict(summary.errors)
    return told


def _distribution_as_json(values: Distribution) -> dict[str, float]:
    percentiles = {f"p{percent}": value for percent, value in values.percentiles}
    return {
        "count": values.count,
        "mean": values.mean,
        "minimum": values.minimum,
        "maximum": values.maximum,
    } | percentiles


def _request_as_json(record: RequestRecord) -> dict[str, object]:
    told = dataclasses.asdict(record)
    return told | {"ttft_s": record.ttft_s, "tpot_s": record.tpot_s, "e2e_s": record.e2e_s}


def _plain(value: object) -> object:
    """`value` as JSON knows it: paths and infinity become texts."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, Path):
        return str(value)
    return "inf" if value == math.inf else value


def print_result(console: Console, result: BenchResult) -> None:
    """The figures as tables, and what to know about them."""
    summary = result.summary
    facts = Table(show_header=False, box=None)
    facts.add_column(style="bold")
    facts.add_column()
    for name, value in _facts(result):
        facts.add_row(name, value)
    console.print(facts)
    table = Table()
    table.add_column("latency, ms")
    for heading in ("mean", *(f"p{percent}" for percent in PERCENTILES), "max"):
        table.add_column(heading, justify="right")
    for name, attribute in _LATENCIES:
        values = getattr(summary, attribute)
        if isinstance(values, Distribution):
            numbers = (values.mean, *(value for _, value in values.percentiles), values.maximum)
            table.add_row(name, *(_ms(number) for number in numbers))
    if table.row_count:
        console.print(table)
    for note in notes(result):
        console.print(f"Note: {note}", markup=False, highlight=False, soft_wrap=True)


def _facts(result: BenchResult) -> list[tuple[str, str]]:
    summary = result.summary
    num_tokens = summary.num_prompt_tokens + summary.num_output_tokens
    told = [
        ("server", f"{result.server.address} over {result.server.protocol}"),
        ("workload", result.workload),
        ("requests", f"{summary.num_complete} complete of {summary.num_requests} in {summary.wall_s:.2f} s"),
        ("most at once", f"{summary.peak_concurrency}"),
        ("output", f"{summary.num_output_tokens} tokens, {summary.output_tokens_per_s:.1f} tokens/s"),
        ("prompt + output", f"{num_tokens} tokens, {summary.total_tokens_per_s:.1f} tokens/s"),
        ("requests/s", f"{summary.requests_per_s:.3f}"),
    ]
    if summary.goodput_per_s is not None and summary.good_share is not None:
        told.append(("goodput", f"{summary.goodput_per_s:.3f} requests/s, {summary.good_share:.1%} of all"))
    if summary.errors:
        told.append(("failed", ", ".join(f"{count} × {code}" for code, count in summary.errors)))
    return told


def notes(result: BenchResult) -> list[str]:
    """What a reader of the figures should know, in sentences."""
    summary = result.summary
    said = ["latencies count from when a request was due, whenever the client came to send it."]
    if result.is_interrupted:
        said.append("the run was ended early; requests that were open count as failed.")
    if summary.num_failed:
        first = next(record for record in result.records if not record.is_complete)
        said.append(f"latencies are those of complete requests alone. First failure: {first.message}")
    if summary.num_short:
        said.append(f"{summary.num_short} answers are shorter than asked for: the model ended them.")
    if summary.num_cached_tokens:
        share = summary.num_cached_tokens / max(1, summary.num_prompt_tokens)
        said.append(f"{share:.0%} of the prompt tokens came from the server's prefix cache.")
    if result.is_repeated:
        said.append("prompts were sent more than once: a prefix cache may have known them.")
    late = summary.lateness_s
    if late is not None and summary.ttft_s is not None and late.at(99) > 0.1 * summary.ttft_s.at(50):
        settings = result.settings
        is_open = settings.rate_per_s is not None or settings.arrivals == "recorded"
        if is_open and settings.concurrency is not None and summary.peak_concurrency >= settings.concurrency:
            said.append(f"requests were held back, {settings.concurrency} being open (see the last row).")
        else:
            said.append("the client itself was late (see the last row): it, too, needs processor time.")
    return said


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:.0f}" if milliseconds >= 1000 else f"{milliseconds:.2f}"
