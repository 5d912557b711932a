"""What both sides are measured by; the rivals themselves are no part of the tests."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from headrace.clients.bench_backend import Ask
from tests.benchmarks.rivals import __main__ as program
from tests.benchmarks.rivals import in_process, results
from tests.benchmarks.rivals.contender import Contender, Started, served_by
from tests.benchmarks.rivals.pairs import PAIRS, Pair
from tests.benchmarks.rivals.work import Request, Timing, Work, all_work, figure_of, warm_up
from tests.support.bench_backends import ScriptedBackend

MIX = Work("w1", "two requests", "output", (Request((1, 2), 3), Request((3,), 5)))

WORKER = """
import json, sys
print("a library says hello")
print("[]", flush=True)
for line in sys.stdin:
    print(json.dumps([[0.5, 2.0, length] for prompt, length in json.loads(line)]), flush=True)
"""


def test_the_work_is_the_same_each_time_and_of_the_sizes_that_are_told() -> None:
    mix, one_stream, long_prompt = all_work(None)
    assert all_work(None) == [mix, one_stream, long_prompt]
    assert len(mix.requests) == 64
    assert all(
        16 <= len(request.prompt) <= 128 and 8 <= request.output_len <= 256 for request in mix.requests
    )
    assert [
        (len(work.requests[0].prompt), work.requests[0].output_len) for work in (one_stream, long_prompt)
    ] == [
        (32, 128),
        (1024, 1),
    ]
    assert warm_up(mix).requests[0] == Request(mix.requests[0].prompt[::-1], 8)


def test_the_work_may_come_from_a_file(tmp_path: Path) -> None:
    request = {"prompt_token_ids": [7, 8], "output_len": 9}
    path = tmp_path / "work.json"
    path.write_text(json.dumps({"requests": [request, request], "w2": request, "w3": request}))
    assert [work.requests for work in all_work(path)] == [(Request((7, 8), 9),) * n for n in (2, 1, 1)]


def test_the_figure_of_a_mix_is_output_over_the_whole_time() -> None:
    assert figure_of(MIX, [Timing(0.5, 4.0, 3), Timing(1.0, 2.0, 5)]) == 8 / 4.0


def test_the_figure_of_a_stream_leaves_the_first_token_out_and_that_of_a_prompt_is_the_first_token() -> None:
    request = (Request(tuple(range(10)), 5),)
    timings = [Timing(0.5, 2.5, 5)]
    assert figure_of(Work("w2", "", "decode", request), timings) == 4 / 2.0
    assert figure_of(Work("w3", "", "prompt", request), timings) == 10 / 0.5


def test_other_lengths_than_asked_for_are_no_figure() -> None:
    with pytest.raises(ValueError, match="7 tokens were made where 8"):
        figure_of(MIX, [Timing(0.5, 4.0, 3), Timing(1.0, 2.0, 4)])


async def test_a_server_is_asked_for_all_at_once_behind_what_comes_before() -> None:
    backend = ScriptedBackend()
    order: list[str] = []

    async def before() -> None:
        order.append(f"before {len(backend.asked)}")

    timings = await served_by(backend, before)(MIX)
    assert order == ["before 0"]
    assert backend.asked == [Ask((1, 2), 3), Ask((3,), 5)]
    assert backend.most_open == 2
    assert [timing.num_tokens for timing in timings] == [3, 5]
    assert all(0 < timing.first_s < timing.last_s for timing in timings)


async def test_a_worker_answers_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(in_process, "WORKERS", tmp_path)
    contender = in_process.in_process("fake", tmp_path, "worker.py", [], tmp_path / "log")
    async with contender.start() as started:
        assert await started.do(MIX) == [Timing(0.5, 2.0, 3), Timing(0.5, 2.0, 5)]
        assert started.rss_mib() > 1
        assert started.peak_mib() > 1


async def test_a_worker_that_does_not_start_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(in_process, "WORKERS", tmp_path)
    contender = in_process.in_process("fake", tmp_path, "missing.py", [], tmp_path / "log")
    with pytest.raises(RuntimeError, match="ended with 2"):
        async with asyncio.timeout(60), contender.start():
            pass


def test_figures_are_kept_from_run_to_run_and_told_as_ratios(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    rival = results.Side("rival", {"w1": [100.0, 120.0, 110.0]}, 2.0, 1000.0, 1100.0, 0.0)
    ours = results.Side("headrace", {"w1": [220.0]}, 1.0, 500.0, 550.0, 0.0)
    found = {"fast": results.Comparison(rival, ours, "now", "abc")}
    assert results.read(path, [MIX]) == {}
    results.write(path, [MIX], {}, found)
    assert results.read(path, [MIX]) == found
    with pytest.raises(ValueError, match="other work"):
        results.read(path, [Work("w1", "other", "output", ())])
    out = io.StringIO()
    results.print_table(Console(file=out, width=120), [MIX], found)
    for said in ("110 (100-120)", "headrace ÷ fast", "2.00 ×", "0.50 ×"):
        assert said in out.getvalue()


def contender(name: str, log: list[str], rate: float) -> Contender:
    """One that needs a fixed time for each token, and fails at W3 if its rate is 0."""

    @asynccontextmanager
    async def start() -> AsyncIterator[Started]:
        async def do(work: Work) -> list[Timing]:
            log.append(f"{name} {work.name}")
            if work.name == "w3" and not rate:
                raise RuntimeError("no")
            return [Timing(1.0, 1.0 + len(log), request.output_len) for request in work.requests]

        yield Started(do, os.getpid(), 2.5)

    return Contender(name, start)


async def test_both_sides_work_in_turn_and_what_is_whole_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for pause in ("IDLE_S", "SETTLE_S"):
        monkeypatch.setattr(program, pause, 1e-6)
    log: list[str] = []
    kept: list[list[str]] = []
    pair = Pair(contender("rival", log, 0), contender("ours", log, 1))
    comparison = results.Comparison(results.Side("rival"), results.Side("ours"))
    works = [replace(MIX, name=name) for name in ("w1", "w3")]
    with pytest.raises(RuntimeError, match="no"):
        await program.compare(pair, comparison, works, 2, lambda: kept.append(list(comparison.rival.figures)))
    warmed, turns = log[:2], log[2:]
    assert warmed == ["rival warm-up", "ours warm-up"]
    assert turns == ["rival w1", "ours w1", "rival w1", "ours w1", "rival w3"]
    assert kept == [["w1"]]
    assert comparison.has("w1", 2)
    assert not comparison.has("w1", 3)
    assert not comparison.has("w3", 1)
    assert comparison.rival.figures["w1"] == [8 / 4, 8 / 6]
    out = io.StringIO()
    results.print_table(Console(file=out, width=120), works, {"rival": comparison})
    assert "not yet" in out.getvalue()


def test_every_rival_has_a_name() -> None:
    assert {"openvino", "vllm", "llamacpp", "transformers"} <= PAIRS.keys()
