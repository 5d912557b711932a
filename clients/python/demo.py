"""`headrace demo`: twenty real requests over eight slots, with and without continuous batching."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from headrace.clients.client import InferenceClient
from headrace.clients.control import ControlClient
from headrace.clients.demo_prompts import DEMO_REQUESTS, DemoRequest
from headrace.clients.demo_report import RunFigures, figures_as_json, print_report
from headrace.clients.demo_server import DemoServer, ServerFailedError, running_server
from headrace.clients.demo_view import Row, View, make_view
from headrace.clients.events import Delta, Load
from headrace.clients.generation import Generation
from headrace.clients.prompts import ChatMessage

POLICIES = ("continuous", "static")
_REFRESH_S = 0.15


class DemoFailedError(Exception):
    """The demo could not be shown; the message says why."""


async def run_demo(
    *,
    model: str,
    num_slots: int,
    dtype: str,
    json_path: Path | None = None,
    requests: Sequence[DemoRequest] = DEMO_REQUESTS,
    command: Sequence[str] | None = None,
) -> None:
    """Serve `model`, run the requests under each batching policy, and print both side by side.

    Args:
        model, dtype: as for `headrace serve`.
        num_slots: most requests in one step.
        json_path: file for the figures.
        requests: what to ask.
        command: starts the server, arguments follow; None is `headrace serve`.

    Raises:
        DemoFailedError: the server did not start or did not last.
    """
    console = Console(highlight=False)
    runs: list[RunFigures] = []
    answers: list[list[list[int]]] = []
    with stopped_by_signals():
        for batching in POLICIES:
            console.print(f"Starting a server of {model} with {batching} batching …", markup=False)
            arguments: tuple[str, ...] = (
                "--model",
                model,
                "--dtype",
                dtype,
                "--max-num-seqs",
                f"{num_slots}",
            )
            if batching == "static":
                # Nobody's first batch is to be small for the time that it takes to send the requests.
                arguments += ("--static-batch-wait-s", "1")
            try:
                async with running_server([*arguments, "--batching", batching], command) as server:
                    title = (
                        f"{batching} batching: {len(requests)} requests over {num_slots} slots, one stream"
                    )
                    rows = _rows(requests)
                    with make_view(console, title) as view:
                        runs.append(await _run(server, rows, view))
                    answers.append([row.token_ids for row in rows])
            except ServerFailedError as error:
                raise DemoFailedError(str(error)) from error
    num_equal = sum(mine == other for mine, other in zip(*answers, strict=True))
    print_report(console, runs, num_equal)
    if json_path is not None:
        text = json.dumps(figures_as_json(runs, num_equal, model), indent=2)
        await asyncio.to_thread(json_path.write_text, text + "\n", encoding="utf-8")


def _rows(requests: Sequence[DemoRequest]) -> list[Row]:
    return [Row(number, request.question, request.num_tokens) for number, request in enumerate(requests, 1)]


async def _run(server: DemoServer, rows: Sequence[Row], view: View) -> RunFigures:
    """Send all requests at once over one stream, and read them to the end."""
    async with InferenceClient(server.target) as client, ControlClient(server.control_target) as control:
        before = await control.load()
        async with client.session() as session:
            started_s = time.monotonic()
            generations = [
                session.generate(
                    [ChatMessage("user", row.question)],
                    request_id=f"{row.number}",
                    max_tokens=row.num_wanted,
                    temperature=0.0,
                    ignore_eos=True,
                )
                for row in rows
            ]
            watching = asyncio.create_task(_watch(control, rows, view, started_s))
            try:
                await asyncio.gather(*map(_read, rows, generations, [started_s] * len(rows)))
                if watching.done():
                    watching.result()  # it ends by itself only when it fails
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
        after = await control.load()
        _show(view, rows, after, started_s)
    return RunFigures(
        batching=after.batching,
        num_slots=after.max_num_seqs,
        num_tokens=sum(len(row.token_ids) for row in rows),
        wall_s=max(row.end_s or 0.0 for row in rows),
        latencies_s=tuple(row.end_s or 0.0 for row in rows),
        first_token_s=tuple(row.first_token_s or 0.0 for row in rows),
        totals=after.totals.since(before.totals),
    )


async def _read(row: Row, generation: Generation, started_s: float) -> None:
    async for event in generation:
        if isinstance(event, Delta):
            if row.first_token_s is None:
                row.first_token_s = time.monotonic() - started_s
            row.text += event.text
            row.token_ids += event.token_ids
    row.end_s = time.monotonic() - started_s


async def _watch(control: ControlClient, rows: Sequence[Row], view: View, started_s: float) -> None:
    while True:
        _show(view, rows, await control.load(), started_s)
        await asyncio.sleep(_REFRESH_S)


def _show(view: View, rows: Sequence[Row], load: Load, started_s: float) -> None:
    view.show(time.monotonic() - started_s, rows, load)


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the demo as Ctrl-C does: in order, with the server ended as well."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    received: list[signal.Signals] = []

    def stop(which: signal.Signals) -> None:
        received.append(which)
        if task is not None:
            task.cancel()

    for which in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(which, stop, which)
    try:
        yield
    except asyncio.CancelledError:
        if not received:
            raise
        raise SystemExit(128 + received[0]) from None
    finally:
        for which in (signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(which)
