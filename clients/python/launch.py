"""Hands a command over to the server's own program, which may not be installed."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

SERVER_MODULES = ("torch", "transformers", "safetensors", "pydantic_settings", "structlog", "grpc_reflection")
"""What `pip install headrace` alone does not bring; one of them missing means that the extra is."""

INSTALL_COMMAND = "pip install 'headrace[server]'"


class ServerNotInstalledError(Exception):
    """The server's parts are missing; the message says how to get them."""


def require_server(command: str) -> None:
    """Check, without importing anything heavy, that `command` can run here.

    Raises:
        ServerNotInstalledError: what is missing, and what to install.
    """
    missing = [name for name in SERVER_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ServerNotInstalledError(
            f"`headrace {command}` needs the server, which is not installed (no {', '.join(missing)}). "
            f"Install it: {INSTALL_COMMAND}"
        )


def run_service(command: str, arguments: Sequence[str]) -> NoReturn:
    """Become `python -m headrace.service COMMAND ARGUMENTS...`: same process, same terminal, same signals.

    What a command needs is checked before: see `require_server`.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [*service_command(), command, *arguments])


def service_command() -> list[str]:
    """The command line that starts the server's program with this interpreter."""
    # Not the folder that one stands in: a clone there that is called headrace would be taken for the program.
    return [sys.executable, "-P", "-m", "headrace.service"]
