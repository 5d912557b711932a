"""`headrace top` and `headrace timeline` as their users run them."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.clients.client import InferenceClient
from headrace.clients.demo_server import DemoServer, running_server
from tests.support.programs import headrace_on_pipes, headrace_on_terminal, run_headrace

SERVE = (sys.executable, "-m", "tests.support.serve_fake", "fine")
NOBODY = "127.0.0.1:1"
WITHOUT_MATPLOTLIB = (
    sys.executable,
    "-c",
    "import sys; sys.modules['matplotlib'] = None; from headrace.clients.cli import main; main()",
)


@asynccontextmanager
async def busy_server() -> AsyncIterator[DemoServer]:
    """A server over a fake model with one endless request."""
    async with (
        running_server(["--model", "fake", "--max-num-seqs", "4"], SERVE) as server,
        InferenceClient(server.target) as client,
        client.generate("to be", request_id="endless", max_tokens=16_000) as generation,
    ):
        reading = asyncio.create_task(generation.answer())
        yield server
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def line_with(words: str, *arguments: str) -> str:
    """The first line of what a command prints that has some words in it; then it gets a Ctrl-C."""
    async with headrace_on_pipes(*arguments) as process:
        assert process.stdout is not None
        while words not in (line := (await process.stdout.readline()).decode()):
            assert line, f"it ended without {words!r}"
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    return line


async def test_top_and_timeline_of_a_busy_server(tmp_path: Path) -> None:
    async with busy_server() as server:
        target = server.control_target
        once = await run_headrace("top", "-t", target, "--once")
        top = ("top", "-t", target, "--interval", "0.1")
        _, told, written = await asyncio.gather(
            line_with("1/4 running, 0 waiting", *top),
            line_with(":endless", *top, "--json"),
            run_headrace(
                "timeline", "-t", target, "--seconds", "3", "-o", str(tmp_path), "--format", "trace"
            ),
        )
    assert (once.status, written.status) == (0, 0), written.err
    assert "endless" in once.out
    assert "1 running of 4" in once.out
    assert json.loads(told)["lanes"][0]["request"].endswith(":endless")
    assert written.out == f"{tmp_path}/timeline-continuous.trace.json\n"
    assert "1 requests" in written.err
    assert json.loads((tmp_path / "timeline-continuous.trace.json").read_text())["traceEvents"]


async def test_top_on_a_terminal_is_live_and_ctrl_c_leaves_it_as_it_was() -> None:
    async with (
        busy_server() as server,
        headrace_on_terminal("top", "-t", server.control_target, "--interval", "0.2") as terminal,
    ):
        await terminal.until("endless")
        await terminal.until("endless")
        terminal.type("\x03")
        await terminal.until("\x1b[?1049l")
        assert await asyncio.wait_for(terminal.process.wait(), 60) == 0
        assert "Traceback" not in terminal.seen


async def test_ctrl_c_ends_a_recording_and_writes_it(tmp_path: Path) -> None:
    async with (
        busy_server() as server,
        headrace_on_pipes(
            *("timeline", "-t", server.control_target, "--seconds", "300"),
            *("-o", str(tmp_path), "--format", "trace"),
        ) as process,
    ):
        assert process.stderr is not None
        assert b"Recording" in await process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    # One that comes before the first step finds nothing to write, and says so.
    assert (process.returncode, b"Traceback" in err) in {(0, False), (1, False)}
    assert b"steps" in err or b"made no step" in err


async def test_a_folder_that_can_not_be_made_is_said_before_anything_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    arguments = ("timeline", "-t", NOBODY, "--format", "trace", "-o")
    outcome = await run_headrace(*arguments, f"{tmp_path}/file/pictures")
    assert outcome.status == 1
    assert outcome.err == f"headrace: {tmp_path}/file/pictures: can't be written: Not a directory\n"
    assert (await run_headrace(*arguments, f"{tmp_path}/none")).status == 1
    assert not (tmp_path / "none").exists(), "nothing was written into it"


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("top", "-t", NOBODY), 1, "headrace serve"),
        (("top", "--interval", "0"), 2, "--interval"),
        (("timeline", "-t", NOBODY, "--format", "trace"), 1, "headrace serve"),
        (("timeline", "--format", "gif"), 2, "gif"),
        (("timeline", "-t", NOBODY, "--requests", "0"), 2, "--requests"),
    ],
    ids=str,
)
async def test_what_can_not_be_is_said_in_a_line(arguments: tuple[str, ...], status: int, said: str) -> None:
    outcome = await run_headrace(*arguments)
    assert outcome.status == status
    assert said in outcome.err
    assert "Traceback" not in outcome.err


async def test_without_matplotlib_it_says_what_to_install() -> None:
    outcome = await run_headrace("timeline", "-t", NOBODY, program=WITHOUT_MATPLOTLIB)
    assert outcome.status == 2
    assert "pip install 'headrace[bench]'" in outcome.err
