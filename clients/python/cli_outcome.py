"""How a command runs and how it ends: one line on standard error and an exit status when it fails."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import TYPE_CHECKING, NoReturn, TypeVar

import typer

from headrace.clients.cli_options import with_flags
from headrace.clients.interrupts import Interrupted, interruptible

if TYPE_CHECKING:
    from headrace.clients.errors import HeadraceError

Result = TypeVar("Result")

FAILED = 1
USAGE = 2
INTERRUPTED = 130


def run(work: Coroutine[object, object, Result], *, status_of_ctrl_c: int = INTERRUPTED) -> Result:
    """Do a command's work; a `HeadraceError` or Ctrl-C ends the command."""
    from headrace.clients.errors import HeadraceError  # noqa: PLC0415

    try:
        return asyncio.run(interruptible(work))
    except HeadraceError as error:
        fail_with(error)
    except Interrupted:
        end_interrupted(status_of_ctrl_c)


def end_interrupted(status: int = INTERRUPTED) -> NoReturn:
    """End as a program does that Ctrl-C ends: below the line on which it was typed."""
    if sys.stderr.isatty():
        typer.echo(err=True)
    raise typer.Exit(status)


def hand_over(command: str, arguments: list[str]) -> NoReturn:
    """Let the server's own program do `command`; without the server extra it ends the command."""
    from headrace.clients import launch  # noqa: PLC0415

    require_server(command)
    launch.run_service(command, arguments)


def require_server(command: str) -> None:
    """End the command where the server extra, which `command` needs, is not installed."""
    from headrace.clients import launch  # noqa: PLC0415

    try:
        launch.require_server(command)
    except launch.ServerNotInstalledError as error:
        fail(str(error), USAGE)


def fail_with(error: HeadraceError) -> NoReturn:
    """End the command with what went wrong, in the words of the command line."""
    from headrace.clients import errors  # noqa: PLC0415

    message = error.message
    if isinstance(error, errors.Unavailable) and "connect" in message:
        # gRPC tells of every address that it tried; the last one says it all.
        message = message.rpartition("last error: ")[2].removeprefix("UNKNOWN: ")
        message += " (is a server running there? `headrace serve` starts one)"
    if isinstance(error, errors.InvalidArgument):
        message = with_flags(message)
    fail(message, USAGE if isinstance(error, errors.InvalidArgument) else FAILED)


def fail(message: str, status: int) -> NoReturn:
    """End the command with one line on standard error and an exit status."""
    typer.echo(f"headrace: {' '.join(message.split())}", err=True)
    raise typer.Exit(status)
