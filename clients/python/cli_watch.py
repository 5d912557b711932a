"""The commands that watch a server step by step: `headrace top` and `headrace timeline`."""

from __future__ import annotations

import signal
import sys
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.clients import cli_access as access
from headrace.clients.cli_options import OperatorTarget
from headrace.clients.cli_outcome import FAILED, USAGE, fail, require_server, run
from headrace.clients.targets import DEFAULT_CONTROL_TARGET

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.clients.step_log import StepLog
    from headrace.clients.timeline import RecordingLimits


class Format(StrEnum):
    """What `headrace timeline` writes."""

    SVG = "svg"
    PNG = "png"
    TRACE = "trace"


def top(
    *,
    target: OperatorTarget = DEFAULT_CONTROL_TARGET,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, help="From picture to picture.")
    ] = 1.0,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", metavar="SECONDS", min=0.1, help="End after so long.", show_default=False),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print everything once, after one interval, and exit.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object, in a line, for each picture.")
    ] = False,
) -> None:
    """Watch a server live: slots, tokens per second, KV blocks, time of steps. Ctrl-C quits.

    Where the output is no terminal, a line for each interval.
    """
    from rich.console import Console  # noqa: PLC0415

    from headrace.clients import top_view  # noqa: PLC0415
    from headrace.clients.watching import follow  # noqa: PLC0415

    console = Console(highlight=False)
    view: top_view.TopView
    if as_json:
        view = top_view.JsonTop(console)
    elif once:
        view = top_view.WholeTop(console, target)
    elif console.is_terminal:
        view = top_view.LiveTop(console, target)
    else:
        view = top_view.PlainTop(console)

    async def watch() -> None:
        with view:
            await follow(
                target,
                view,
                interval_s=interval,
                duration_s=seconds,
                is_once=once,
                connection=access.connection(),
            )

    run(watch(), status_of_ctrl_c=0)  # how one leaves it


def timeline(
    *,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-t",
            metavar="HOST:PORT",
            help="The operator's port of a running server, to record that; its own server otherwise.",
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds", metavar="SECONDS", min=0.1, help="Longest time to record a running server."
        ),
    ] = 10.0,
    requests: Annotated[
        int | None,
        typer.Option("--requests", min=1, help="Record until so many sequences have finished."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Where the files go.")] = Path(),
    formats: Annotated[
        list[Format] | None,
        typer.Option("--format", help="What to write; may be repeated. All of them otherwise."),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="What its own server serves.")
    ] = "smollm2-135m-instruct",
    slots: Annotated[int, typer.Option("--slots", min=1, help="Slots of its own server.")] = 8,
    dtype: Annotated[str, typer.Option("--dtype", help="Compute type of its own server.")] = "auto",
) -> None:
    """Write what each slot did, step by step: a picture, SVG and PNG, and a trace for ui.perfetto.dev.

    With --target it records a running server; Ctrl-C ends the recording.
    Otherwise it starts a server of its own, once with continuous and once with
    static batching, and sends it the twenty requests of `headrace demo`. Pictures
    need the bench extra, an own server needs the server extra.
    """
    from headrace.clients import timeline as recording  # noqa: PLC0415
    from headrace.clients.demo_server import ServerFailedError  # noqa: PLC0415

    wanted = [form.value for form in formats or Format]
    try:
        recording.require_pictures(wanted)
        if target is None:
            require_server("timeline")
        with _made(out):
            logs: Sequence[StepLog]
            if target is None:
                logs = run(recording.record_demo(model=model, num_slots=slots, dtype=dtype))
            else:
                logs = [run(_record(target, recording.RecordingLimits(seconds, requests)))]
            num_steps = max(log.num_steps for log in logs)
            for log in logs:
                for path in recording.write_log(log, out, wanted, num_steps=num_steps):
                    typer.echo(path)
    except recording.PicturesNotInstalledError as error:
        fail(str(error), USAGE)
    except recording.NothingRecordedError as error:
        fail(str(error), FAILED)
    except ServerFailedError as error:
        typer.echo(f"headrace: {error}", err=True)  # with the server's last lines, as they were
        raise typer.Exit(FAILED) from None
    except OSError as error:
        fail(f"{error.filename or out}: can't be written: {error.strerror}", FAILED)


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make `folder` before what takes long, lest that be for nothing; remove it again if it stays empty."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        if is_new:
            with suppress(OSError):
                folder.rmdir()


async def _record(target: str, limits: RecordingLimits) -> StepLog:
    import asyncio  # noqa: PLC0415

    from headrace.clients.control import ControlClient  # noqa: PLC0415
    from headrace.clients.timeline import record  # noqa: PLC0415

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    typer.echo(
        f"Recording {target} for up to {limits.seconds:g} s; Ctrl-C ends it and writes what there is.",
        file=sys.stderr,
    )
    async with ControlClient(target, connection=access.connection()) as control:
        log = await record(control, limits, stop)
    num_missed = sum(gap.end_step - gap.first_step for gap in log.gaps())
    unseen = f", {num_missed} of them not seen" if num_missed else ""
    typer.echo(f"{log.num_steps} steps{unseen}, {log.num_requests} requests", file=sys.stderr)
    return log
