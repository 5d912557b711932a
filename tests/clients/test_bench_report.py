from __future__ import annotations

import dataclasses
import io
import json
import math
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console

from headrace.clients.bench import BenchResult, BenchSettings
from headrace.clients.bench_backend import Server
from headrace.clients.bench_report import SCHEMA, notes, print_result, result_as_json, without_token
from headrace.clients.bench_stats import RequestRecord, Summary, Targets, summarize


def record(number: int = 0, **fields: object) -> RequestRecord:
    """A complete request of three tokens."""
    made = RequestRecord(
        number, 3, due_s=1.0, sent_s=1.0, num_prompt_tokens=10, arrivals=[(2.0, 1), (3.0, 2)], end_s=3.0
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def result(*records: RequestRecord, **fields: object) -> BenchResult:
    """A run that saw these."""
    settings = BenchSettings(dataset=Path("w.json"), rate_per_s=math.inf, targets=Targets(ttft_s=1.0))
    defaults: dict[str, object] = {
        "settings": settings,
        "server": Server("grpc session", "127.0.0.1:1", {"max_num_seqs": 8}, 100),
        "workload": "mix",
        "began": datetime(2026, 1, 2, tzinfo=UTC),
        "records": records,
        "summary": summarize(records, settings.targets),
        "is_repeated": False,
        "num_warm_up": 4,
    }
    return BenchResult(**{**defaults, **fields})  # type: ignore[arg-type]


def capped(concurrency: int) -> BenchSettings:
    """Arrivals at a rate, with at most so many open."""
    return BenchSettings(rate_per_s=5.0, concurrency=concurrency)


def test_the_object_is_json_and_has_every_field_that_is_documented() -> None:
    document = json.loads(
        json.dumps(result_as_json(result(record()), ["headrace", "bench"]), allow_nan=False)
    )
    assert document["schema"] == SCHEMA
    assert document["command"] == ["headrace", "bench"]
    assert document["began"] == "2026-01-02T00:00:00+00:00"
    assert document["server"] == {
        "protocol": "grpc session",
        "address": "127.0.0.1:1",
        "facts": {"max_num_seqs": 8},
    }
    assert document["settings"]["rate_per_s"] == "inf"
    assert document["settings"]["dataset"] == "w.json"
    assert document["latency_origin"] == "due"
    assert document["machine"]["num_cores"] >= 1
    assert set(document["summary"]) == {field.name for field in dataclasses.fields(Summary)}
    numbers = ("mean", "minimum", "maximum", "p50", "p90", "p95", "p99")
    assert document["summary"]["tpot_s"] == {"count": 1, **dict.fromkeys(numbers, 0.5)}
    assert document["summary"]["queued_s"] is None
    (request,) = document["requests"]
    assert request["arrivals"] == [[2.0, 1], [3.0, 2]]
    assert (request["ttft_s"], request["tpot_s"], request["e2e_s"]) == (1.0, 0.5, 2.0)


def test_the_table_has_the_figures_and_the_failures() -> None:
    out = io.StringIO()
    failed = record(error="HTTP_503", message="busy")
    print_result(Console(file=out, width=120), result(record(), record(1, due_s=0.0, sent_s=0.5), failed))
    text = out.getvalue()
    for said in (
        "2 complete of 3",
        "6 tokens, 2.0 tokens/s",
        "26 tokens",
        "1 × HTTP_503",
        "busy",
        "time to first",
    ):
        assert said in text
    assert "33.3% of all" in text


def test_a_run_of_failures_has_no_table_of_latencies() -> None:
    out = io.StringIO()
    print_result(Console(file=out, width=120), result(record(error="INTERNAL", message="broken")))
    assert "0 complete of 1" in out.getvalue()
    assert "time to first token" not in out.getvalue()


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (result(record(), is_interrupted=True), "ended early"),
        (result(record(), is_repeated=True), "more than once"),
        (result(record(num_wanted=9)), "1 answers are shorter"),
        (result(record(num_cached_tokens=5)), "50% of the prompt tokens"),
        (result(record(sent_s=1.9)), "the client itself was late"),
        (result(record(sent_s=1.9), settings=capped(2)), "the client itself was late"),
        (result(record(sent_s=1.9), settings=capped(1)), "requests were held back, 1 being open"),
        (result(record()), "whenever the client came to send it"),
    ],
)
def test_what_a_reader_should_know_is_said(made: BenchResult, said: str) -> None:
    assert any(said in note for note in notes(made))


def test_nothing_is_said_without_a_reason() -> None:
    assert len(notes(result(record()))) == 1


def test_a_report_does_not_tell_who_called() -> None:
    command = ["headrace", "--token", "secret", "bench", "--token-file", "f"]
    assert without_token(command) == ["headrace", "--token", "…", "bench", "--token-file", "f"]
    assert without_token(["headrace", "--token=secret", "bench"]) == ["headrace", "--token=…", "bench"]
