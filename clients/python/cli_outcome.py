"""How a command runs and how it ends: one line on standard error and an exit status when it fails."""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from typing import TYPE_CHECKING, NoReturn, TypeVar

import typer

from headrace.clients.cli_options import with_flags
from headrace.clients.interrupts import Interrupted, interruptible

if TYPE_CHECKING:
    from headrace.clients.errors import HeadraceError
    from headrace.clients.prompts import RequestOptions

Result = TypeVar("Result")

FAILED = 1
USAGE = 2
INTERRUPTED = 130


def run(
    work: Coroutine[object, object, Result], *, status_of_ctrl_c: int = INTERRUPTED, argument: str = "PROMPT"
) -> Result:
    """Do a command's work; a `HeadraceError` or Ctrl-C ends the command.

    Args:
        argument: what the command calls its argument.
    """
    import asyncio  # noqa: PLC0415  a tenth of what `--help` takes

    from headrace.clients.errors import HeadraceError  # noqa: PLC0415

    try:
        return asyncio.run(interruptible(work))
    except HeadraceError as error:
        fail_with(error, argument)
    except Interrupted:
        end_interrupted(status_of_ctrl_c)


def end_interrupted(status: int = INTERRUPTED) -> NoReturn:
    """End as a program does that Ctrl-C ends: below the line on which it was typed."""
    if sys.stderr.isatty():
        typer.echo(err=True)
    raise typer.Exit(status)


def hand_over(command: str, arguments: list[str]) -> NoReturn:
    """Let the server's own program do `command`."""
    from headrace.clients import launch  # noqa: PLC0415

    launch.run_service(command, arguments)


def require_server(command: str) -> None:
    """End the command where the server extra, which `command` needs, is not installed."""
    from headrace.clients import launch  # noqa: PLC0415

    try:
        launch.require_server(command)
    except launch.ServerNotInstalledError as error:
        fail(str(error), USAGE)


def require_options(options: RequestOptions) -> None:
    """End the command where no server would take these."""
    from headrace.clients.errors import InvalidArgument  # noqa: PLC0415
    from headrace.clients.request_rules import check_options  # noqa: PLC0415

    try:
        check_options(options)
    except InvalidArgument as error:
        fail_with(error)


def fail_with(error: HeadraceError, argument: str = "PROMPT") -> NoReturn:
    from headrace.clients import errors  # noqa: PLC0415

    message = error.message
    if isinstance(error, errors.Unavailable):
        from headrace.clients.cli_unreached import explain_unreached  # noqa: PLC0415

        message = explain_unreached(message)
    elif isinstance(error, errors.Unauthenticated):
        message += " (--token-file FILE or HEADRACE_TOKEN says who calls)"
    elif isinstance(error, errors.Unimplemented) and message.startswith("Method not found"):
        message = (
            "this port has no such method: top, timeline and budget ask the one of `headrace serve "
            "--control-port`, all other commands that of --port"
        )
    elif isinstance(error, errors.InvalidArgument):
        message = with_flags(message, argument)
    fail(message, USAGE if isinstance(error, errors.InvalidArgument) else FAILED)


def fail_because(error: Exception) -> NoReturn:
    """Fail with the `HeadraceError` that another error came of, or else with that one's own words."""
    from headrace.clients.errors import HeadraceError  # noqa: PLC0415

    if isinstance(error.__cause__, HeadraceError):
        fail_with(error.__cause__)
    fail(str(error), FAILED)


def fail(message: str, status: int) -> NoReturn:
    """End the command with one line on standard error and an exit status."""
    typer.echo(f"headrace: {' '.join(message.split())}", err=True)
    raise typer.Exit(status)
