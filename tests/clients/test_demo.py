"""The demo from end to end, over a server with a fake model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from headrace.clients.demo import DemoFailedError, run_demo
from headrace.clients.demo_prompts import DEMO_REQUESTS, DemoRequest
from tests.support.programs import headrace_on_pipes, headrace_on_terminal

SERVE = (sys.executable, "-m", "tests.support.serve_fake")
FEW = tuple(
    DemoRequest(f"question {i}", num_tokens) for i, num_tokens in enumerate((3, 40, 3, 3, 25, 3, 4, 6))
)

PROGRAM = """
import asyncio, sys
from headrace.clients.demo import run_demo
command = (sys.executable, "-m", "tests.support.serve_fake", sys.argv[1])
asyncio.run(run_demo(model="fake", num_slots=8, dtype="auto", command=command))
"""


def is_alive(pid: int) -> bool:
    """Whether such a process exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_twenty_requests_are_twenty_and_of_mixed_lengths() -> None:
    lengths = [request.num_tokens for request in DEMO_REQUESTS]
    assert len(lengths) == 20
    assert (min(lengths), max(lengths)) == (12, 200)
    assert len(set(lengths)) >= 15
    assert len({request.question for request in DEMO_REQUESTS}) == 20


async def test_both_policies_run_and_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures_path = tmp_path / "figures.json"
    await run_demo(
        model="fake",
        num_slots=2,
        dtype="auto",
        json_path=figures_path,
        requests=FEW,
        command=(*SERVE, "fine"),
    )
    figures = json.loads(figures_path.read_text())
    continuous, static = figures["runs"]
    assert (continuous["batching"], static["batching"]) == ("continuous", "static")
    assert continuous["num_tokens"] == static["num_tokens"] == sum(request.num_tokens for request in FEW)
    assert figures["num_equal_answers"] == len(FEW)
    # With a fake model the steps follow from the lengths alone: two long answers can share their steps,
    # or wait for each other.
    assert continuous["totals"]["num_steps"] < static["totals"]["num_steps"]
    assert static["slot_occupancy"] < continuous["slot_occupancy"] <= 1
    assert continuous["p99_latency_s"] >= continuous["mean_latency_s"] > 0
    out = capsys.readouterr().out
    for said in ("slot occupancy", "KV waste", "p99 latency", "#2  done", f"{len(FEW)} done"):
        assert said in out


async def test_a_server_that_does_not_start_is_heard_and_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DemoFailedError, match=r"ended with status 2 .* said why above"):
        await run_demo(model="fake", num_slots=2, dtype="auto", command=(*SERVE, "fails_in_load"))
    assert "config.json is missing" in capsys.readouterr().err


async def test_a_server_that_dies_is_told_with_its_last_words() -> None:
    # The step that computes 13 tokens of a prompt is the fatal one; a step has room for 512.
    fatal = DemoRequest("x" * (512 + 13 - len("user: \nassistant: ")), 5)
    with pytest.raises(DemoFailedError, match=r"status 1(.|\n)*engine died"):
        await run_demo(model="fake", num_slots=2, dtype="auto", requests=(fatal,), command=(*SERVE, "dies"))


@pytest.mark.parametrize(
    "signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda signum: signum.name
)
async def test_a_signal_ends_the_demo_and_its_server(signum: signal.Signals) -> None:
    async with headrace_on_pipes(program=(sys.executable, "-c", PROGRAM, "hangs_in_load")) as process:
        assert process.stderr is not None
        line = b""
        while b"listening" not in line:
            line = await process.stderr.readline()
            assert line
        process.send_signal(signum)
        await process.communicate()
    assert process.returncode != 0
    # A line for people, as all of the demo's.
    pid = re.search(rb"\bpid=(\d+)", line)
    assert pid is not None
    assert not is_alive(int(pid[1]))


async def test_on_a_terminal_it_is_a_live_table_and_the_servers_progress_is_seen() -> None:
    async with headrace_on_terminal(program=(sys.executable, "-c", PROGRAM, "fine")) as terminal:
        await terminal.until("reading weights")
        await terminal.until("continuous batching: 20 requests over 8 slots")
        await terminal.until("waiting")
        await terminal.until("20 done")
        await terminal.until("static batching: 20 requests over 8 slots")
        await terminal.until("slot occupancy")
        await terminal.until("same token for token")
        assert await asyncio.wait_for(terminal.process.wait(), 60) == 0
