"""`headrace timeline`: what each slot did, step by step, as pictures and as a trace."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.clients.client import InferenceClient
from headrace.clients.control import ControlClient
from headrace.clients.demo import POLICIES, stopped_by_signals
from headrace.clients.demo_prompts import DEMO_REQUESTS, DemoRequest
from headrace.clients.demo_server import DemoServer, running_server
from headrace.clients.errors import Unavailable
from headrace.clients.events import StepReport
from headrace.clients.prompts import ChatMessage
from headrace.clients.step_log import StepLog
from headrace.clients.step_trace import trace_of

FORMATS = ("svg", "png", "trace")
LAST_REPORTS_S = 10.0
"""When all answers are there, so long is waited for the reports of their last steps."""


class NothingRecordedError(Exception):
    """No step was made in the time of the recording."""


class PicturesNotInstalledError(Exception):
    """The library that draws is missing; the message says how to get it."""


@dataclass(frozen=True, slots=True)
class RecordingLimits:
    """When a recording ends: at the first of these, or when `stop` is set.

    Args:
        seconds: longest time.
        num_requests: sequences that have finished.
    """

    seconds: float
    num_requests: int | None = None


def require_pictures(formats: Sequence[str]) -> None:
    """Check that these formats can be written here.

    Raises:
        PicturesNotInstalledError: matplotlib is missing, and one of them needs it.
    """
    if not {"svg", "png"}.intersection(formats):
        return
    try:
        import matplotlib as mpl  # noqa: PLC0415  most commands never need it
    except ModuleNotFoundError as error:
        raise PicturesNotInstalledError(
            f"pictures need {error.name}, which is not installed: pip install 'headrace[bench]', "
            "or ask for --format trace alone"
        ) from None
    mpl.use("agg")


async def record(control: ControlClient, limits: RecordingLimits, stop: asyncio.Event) -> StepLog:
    """Watch a running server.

    Returns:
        What was seen. A server that goes ends the recording.

    Raises:
        NothingRecordedError: it made no step.
        HeadraceError: it can't be watched.
    """
    load = await control.load()
    reports: list[StepReport] = []
    async with control.step_watch() as steps:
        reading = asyncio.create_task(_read(steps, reports, limits.num_requests))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait(
                {reading, stopping}, timeout=limits.seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if reading.done():
                with suppress(Unavailable):
                    reading.result()
        finally:
            for task in (reading, stopping):
                task.cancel()
            await asyncio.gather(reading, stopping, return_exceptions=True)
    if not reports:
        raise NothingRecordedError("the server made no step in that time: send it requests meanwhile")
    return StepLog(tuple(reports), load.max_num_seqs, load.batching, load.model)


async def record_demo(
    *,
    model: str,
    num_slots: int,
    dtype: str,
    requests: Sequence[DemoRequest] = DEMO_REQUESTS,
    command: Sequence[str] | None = None,
) -> tuple[StepLog, ...]:
    """Serve `model` and send it the demo's requests, once under each batching policy.

    Args:
        model, dtype: as for `headrace serve`.
        num_slots: most requests in one step.
        command: starts the server, arguments follow; None is `headrace serve`.

    Raises:
        ServerFailedError: the server did not start or did not last.
    """
    logs = []
    with stopped_by_signals():
        for batching in POLICIES:
            arguments = ("--model", model, "--dtype", dtype, "--max-num-seqs", f"{num_slots}")
            async with running_server([*arguments, "--batching", batching], command) as server:
                logs.append(await _record_all(server, requests))
    return tuple(logs)


def write_log(
    log: StepLog, folder: Path, formats: Sequence[str], *, num_steps: int | None = None
) -> list[Path]:
    """Write `timeline-BATCHING.svg`, `.png` and `.trace.json`, those of them that are asked for.

    Args:
        num_steps: steps that a picture's width stands for; None: those of the log.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for form in formats:
        path = folder / f"timeline-{log.batching}.{'trace.json' if form == 'trace' else form}"
        if form == "trace":
            path.write_text(json.dumps(trace_of(log)) + "\n", encoding="utf-8")
        else:
            from headrace.clients.step_picture import write_picture  # noqa: PLC0415  needs matplotlib

            write_picture(path, log, num_steps=num_steps)
        written.append(path)
    return written


async def _read(
    steps: AsyncIterator[StepReport], reports: list[StepReport], num_requests: int | None
) -> None:
    num_finished = 0
    async for report in steps:
        reports.append(report)
        num_finished += sum(row.is_finished for row in report.rows)
        if num_requests is not None and num_finished >= num_requests:
            return


async def last_of(reading: asyncio.Task[None], patience_s: float) -> None:
    """Wait for the last reports, but not for ever: a watcher that was too slow for one never sees it.

    Raises:
        HeadraceError: they can't be read.
    """
    done, _ = await asyncio.wait({reading}, timeout=patience_s)
    for task in done:
        task.result()


async def _record_all(server: DemoServer, requests: Sequence[DemoRequest]) -> StepLog:
    """Send all requests at once over one stream, and watch until the last one has ended."""
    reports: list[StepReport] = []
    async with InferenceClient(server.target) as client, ControlClient(server.control_target) as control:
        load = await control.load()
        async with control.step_watch() as steps, client.session() as session:
            generations = [
                session.generate(
                    [ChatMessage("user", request.question)],
                    request_id=f"{number}",
                    max_tokens=request.num_tokens,
                    temperature=0.0,
                    ignore_eos=True,
                )
                for number, request in enumerate(requests, 1)
            ]
            reading = asyncio.create_task(_read(steps, reports, len(requests)))
            try:
                await asyncio.gather(*(generation.answer() for generation in generations))
                await last_of(reading, LAST_REPORTS_S)
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
    return StepLog(tuple(reports), load.max_num_seqs, load.batching, load.model)
