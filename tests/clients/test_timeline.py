from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.clients.client import InferenceClient
from headrace.clients.control import ControlClient
from headrace.clients.demo_prompts import DemoRequest
from headrace.clients.demo_server import DemoServer, running_server
from headrace.clients.errors import Unavailable
from headrace.clients.step_log import StepLog, Work, short_label
from headrace.clients.timeline import (
    FORMATS,
    NothingRecordedError,
    RecordingLimits,
    last_of,
    record,
    record_demo,
    write_log,
)
from tests.support.step_reports import make_reports

SERVE = (sys.executable, "-m", "tests.support.serve_fake", "fine")
FEW = tuple(DemoRequest(f"q{i}", num_tokens) for i, num_tokens in enumerate((3, 30, 3, 3, 20, 3)))


@pytest.fixture
async def server() -> AsyncIterator[DemoServer]:
    async with running_server(["--model", "fake", "--max-num-seqs", "2"], SERVE) as running:
        yield running


async def test_both_policies_are_recorded_from_the_first_step_to_the_last() -> None:
    continuous, static = await record_demo(
        model="fake", num_slots=2, dtype="auto", requests=FEW, command=SERVE
    )
    assert (continuous.batching, static.batching) == ("continuous", "static")
    for log in (continuous, static):
        assert (log.num_slots, log.num_requests, log.gaps()) == (2, len(FEW), ())
        ends = {short_label(span.request) for span in log.spans() if span.is_finished}
        assert ends == {f"{number}" for number in range(1, len(FEW) + 1)}
        decoded = {
            short_label(span.request): span.num_tokens for span in log.spans() if span.work is Work.DECODE
        }
        # The step that completes a prompt makes the first token.
        assert decoded == {f"{i}": request.num_tokens - 1 for i, request in enumerate(FEW, 1)}
    # A slot of a static batch rests until the longest of the batch has ended.
    assert continuous.num_steps < static.num_steps
    assert continuous.occupancy > static.occupancy


async def test_a_running_server_is_recorded_until_so_many_have_finished(server: DemoServer) -> None:
    async with InferenceClient(server.target) as client, ControlClient(server.control_target) as control:
        recording = asyncio.create_task(
            record(control, RecordingLimits(300, num_requests=2), asyncio.Event())
        )
        while not recording.done():
            await client.generate_once("to be", max_tokens=4)
        log = await recording
    assert sum(span.is_finished for span in log.spans()) == 2
    assert (log.model, log.batching, log.num_slots) == ("fake", "continuous", 2)


async def test_what_was_seen_is_kept_when_it_is_stopped_or_the_server_goes() -> None:
    async with (
        running_server(["--model", "fake"], SERVE) as server,
        InferenceClient(server.target) as client,
        ControlClient(server.control_target) as control,
        client.generate("to be", max_tokens=10_000) as running,
    ):
        answering = asyncio.create_task(running.answer())
        stop = asyncio.Event()
        stopped = asyncio.create_task(record(control, RecordingLimits(300), stop))
        cut_off = asyncio.create_task(record(control, RecordingLimits(300), asyncio.Event()))
        # Steps go on for longer than it takes to begin to watch.
        async with control.step_watch() as steps:
            first = (await anext(steps)).step
            while (await anext(steps)).step < first + 150:
                pass
        stop.set()
        assert (await stopped).num_requests == 1
        os.kill(server.pid, signal.SIGTERM)
        assert (await cut_off).num_requests == 1
        await asyncio.gather(answering, return_exceptions=True)


async def test_reports_that_never_come_are_not_waited_for_and_faults_are_told() -> None:
    lost = asyncio.create_task(_wait_for_ever())
    await last_of(lost, 0.01)
    assert not lost.done()
    lost.cancel()
    with pytest.raises(Unavailable, match="gone"):
        await last_of(asyncio.create_task(_fail()), 300)


async def _wait_for_ever() -> None:
    await asyncio.Event().wait()


async def _fail() -> None:
    raise Unavailable("gone")


async def test_a_server_without_work_is_nothing_to_record(server: DemoServer) -> None:
    async with ControlClient(server.control_target) as control:
        with pytest.raises(NothingRecordedError, match="send it requests"):
            await record(control, RecordingLimits(0.2), asyncio.Event())


def test_a_log_is_written_in_the_forms_that_are_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    log = StepLog(make_reports(0, "a12", "a", "a!"), 1, "static", "tiny")
    written = write_log(log, tmp_path / "new" / "folder", FORMATS)
    assert [path.name for path in written] == [
        "timeline-static.svg",
        "timeline-static.png",
        "timeline-static.trace.json",
    ]
    assert all(path.stat().st_size > 0 for path in written)
    assert json.loads(written[2].read_text())["otherData"] == {"model": "tiny", "batching": "static"}
