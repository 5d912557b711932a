"""Whole load tests, against scripted servers and a real one over a fake model."""

from __future__ import annotations

import asyncio
import io
import json
import math
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import grpc
import pytest
from rich.console import Console

from headrace.clients.bench import BenchResult, BenchSettings, run_bench
from headrace.clients.bench_backend import (
    Ask,
    Backend,
    BackendError,
    End,
    GrpcBackend,
    RequestFailedError,
    Tokens,
)
from headrace.clients.bench_load import INTERRUPTED
from headrace.clients.bench_openai import OpenAiBackend
from headrace.clients.bench_report import result_as_json
from headrace.clients.bench_workload import WorkloadError
from headrace.clients.demo_server import running_server
from tests.support.bench_backends import ScriptedBackend, answer
from tests.support.fake_scripts import fails
from tests.support.fake_server import running_fake_server
from tests.support.openai_server import DONE, running_openai_server, said, used

SERVE_FAKE = (sys.executable, "-m", "tests.support.serve_fake", "fine")


async def measured(backend: Backend, **settings: object) -> BenchResult:
    """A run whose progress nobody sees."""
    return await run_bench(backend, BenchSettings(**settings), Console(file=io.StringIO()))  # type: ignore[arg-type]


async def test_a_real_server_over_a_session_and_over_streams() -> None:
    async with running_server(["--model", "fake", "--max-num-seqs", "4"], SERVE_FAKE) as server:
        for is_multiplexed in (True, False):
            backend = GrpcBackend(server.target, server.control_target, is_multiplexed=is_multiplexed)
            result = await measured(
                backend, num_requests=6, concurrency=3, prompt_len="5-9", output_len="4", num_turns=2, seed=5
            )
            summary = result.summary
            assert (summary.num_complete, summary.num_failed, summary.num_output_tokens) == (12, 0, 48)
            assert summary.peak_concurrency == 3
            assert summary.queued_s is not None
            assert summary.num_short == 0
            # The second turn repeats the first one, answer included.
            lengths = {record.number: record.num_prompt_tokens for record in result.records}
            assert max(length or 0 for length in lengths.values()) >= 5 + 4 + 5
            facts = result_as_json(result, ["headrace"])["server"]
            assert isinstance(facts, dict)
            assert facts["facts"]["max_num_seqs"] == 4


async def test_an_openai_server() -> None:
    async with running_openai_server(said("a"), said("b", "length"), used(7, 2), DONE) as server:
        result = await measured(OpenAiBackend(server.url), num_requests=5, concurrency=2, output_len="2")
    assert (result.summary.num_complete, result.summary.num_output_tokens) == (5, 10)
    assert result.summary.num_prompt_tokens == 35
    assert result.server.protocol == "openai completions"
    # It says nothing of its vocabulary, so prompts were texts.
    assert isinstance(server.bodies[0]["prompt"], str)


async def test_warm_up_requests_are_sent_first_and_count_nowhere() -> None:
    backend = ScriptedBackend()
    result = await measured(backend, num_requests=3, concurrency=1, num_warm_up=2, output_len="5")
    assert len(backend.asked) == 5
    assert len(result.records) == result.summary.num_requests == 3
    measured_prompts = [ask.prompt for ask in backend.asked[2:]]
    assert [ask.prompt for ask in backend.asked[:2]] == [prompt[::-1] for prompt in measured_prompts[:2]]


async def test_a_dataset_is_sent_as_it_is_and_begins_again(tmp_path: Path) -> None:
    requests = [{"prompt_token_ids": [i, i + 1], "output_len": i} for i in (3, 5)]
    path = tmp_path / "w.json"
    path.write_text(json.dumps({"name": "two", "requests": requests}))
    backend = ScriptedBackend()
    once = await measured(backend, dataset=path, rate_per_s=math.inf, num_warm_up=0)
    assert [(ask.prompt, ask.output_len) for ask in backend.asked] == [((3, 4), 3), ((5, 6), 5)]
    assert not once.is_repeated
    assert once.workload == "two"
    assert (await measured(backend, dataset=path, num_requests=3)).is_repeated


async def test_recorded_arrivals_are_those_of_the_dataset(tmp_path: Path) -> None:
    requests = [{"prompt": "x", "output_len": 1, "arrival_s": i / 100} for i in range(3)]
    path = tmp_path / "w.json"
    path.write_text(json.dumps({"requests": requests}))
    result = await measured(ScriptedBackend(), dataset=path, arrivals="recorded")
    assert [record.due_s for record in result.records] == [0.0, 0.01, 0.02]
    path.write_text(json.dumps({"requests": requests[::-1]}))
    with pytest.raises(WorkloadError, match="not in the order"):
        await measured(ScriptedBackend(), dataset=path, arrivals="recorded")
    path.write_text(json.dumps({"requests": [{"prompt": "x", "output_len": 1}]}))
    with pytest.raises(WorkloadError, match="arrival_s"):
        await measured(ScriptedBackend(), dataset=path, arrivals="recorded")


async def test_failures_are_results_and_are_counted() -> None:
    async def every_other(ask: Ask) -> AsyncGenerator[Tokens | End]:
        if len(backend.asked) % 2:
            raise RequestFailedError("UNAVAILABLE", "try later")
        async for part in answer(ask):
            yield part

    backend = ScriptedBackend(every_other)
    result = await measured(backend, num_requests=6, concurrency=1, num_warm_up=0)
    assert result.summary.errors == (("UNAVAILABLE", 3),)
    assert (result.summary.num_complete, result.summary.num_requests) == (3, 6)


async def test_a_server_that_fails_every_warm_up_request_is_not_measured() -> None:
    async with running_fake_server(default=fails(grpc.StatusCode.INTERNAL, "broken")) as server:
        with pytest.raises(BackendError, match="INTERNAL: broken"):
            await measured(GrpcBackend(server.target), num_requests=2)


async def test_a_run_that_is_ended_tells_what_it_has() -> None:
    async def first_ones_only(ask: Ask) -> AsyncGenerator[Tokens | End]:
        if len(backend.asked) > 3:
            yield Tokens(1, (1,))
            await asyncio.Event().wait()
        async for part in answer(ask):
            yield part

    backend = ScriptedBackend(first_ones_only)
    running = asyncio.create_task(measured(backend, num_requests=50, concurrency=2, num_warm_up=0))
    while len(backend.asked) < 5:  # noqa: ASYNC110  two hang, the fourth and the fifth
        await asyncio.sleep(0)
    running.cancel()
    result = await running
    assert result.is_interrupted
    assert (result.summary.num_complete, result.summary.errors) == (3, ((INTERRUPTED, 2),))
    assert result.summary.num_lost_tokens == 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"arrivals": "recorded"}, "come from a dataset"),
        ({"arrivals": "recorded", "dataset": Path("x.json"), "rate_per_s": 1.0}, "leave out the rate"),
        ({"dataset": Path("x.json"), "prompt_len": "5"}, "own prompts"),
        ({"dataset": Path("x.json"), "num_turns": 2}, "own prompts"),
        ({"burstiness": 2.0}, "give a rate"),
        ({"rate_per_s": 0.0}, "no rate"),
        ({"rate_per_s": 1.0, "arrivals": "uniform"}, "no arrival process"),
        ({"rate_per_s": math.inf, "duration_s": 5.0}, "never ends"),
        ({"duration_s": -1.0}, "duration"),
        ({"timeout_s": math.nan}, "timeout"),
        ({"prompt_len": "many"}, "no distribution"),
        ({"output_len": "0"}, "no distribution"),
    ],
)
async def test_settings_that_make_no_sense_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        await measured(ScriptedBackend(), **settings)


async def test_conversations_of_ids_need_a_server_that_tells_ids() -> None:
    with pytest.raises(WorkloadError, match="use prompts of text"):
        await measured(ScriptedBackend(tells_output=False), num_turns=2)


async def test_without_a_terminal_progress_is_lines() -> None:
    out = io.StringIO()
    settings = BenchSettings(num_requests=2, concurrency=1)
    await run_bench(ScriptedBackend(), settings, Console(file=out), "the title")
    assert out.getvalue().startswith("the title\n")


async def test_on_a_terminal_progress_is_a_bar() -> None:
    out = io.StringIO()
    settings = BenchSettings(num_requests=2, concurrency=1)
    console = Console(file=out, force_terminal=True, width=120)
    await run_bench(ScriptedBackend(), settings, console, "the title")
    assert "the title" in out.getvalue()
    assert "2/2" in out.getvalue()
