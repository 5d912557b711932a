"""Runs the `headrace` command as a program of its own, on pipes or on a terminal."""

from __future__ import annotations

import asyncio
import os
import pty
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass

from tests.support.child_process import child_process

_PATIENCE_S = 5.0
HEADRACE = (sys.executable, "-m", "headrace.clients.cli")

# Makes its standard input the terminal of its session, so that ^C typed there is SIGINT.
_ON_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    status: int
    out: str
    err: str


async def run_headrace(
    *arguments: str,
    stdin: str = "",
    program: tuple[str, ...] = HEADRACE,
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Run to the end.

    Args:
        environment: variables beside the usual ones.
    """
    async with headrace_on_pipes(*arguments, program=program, environment=environment) as process:
        out, err = await process.communicate(stdin.encode())
    assert process.returncode is not None
    return Outcome(process.returncode, out.decode(), err.decode())


def headrace_on_pipes(
    *arguments: str, program: tuple[str, ...] = HEADRACE, environment: Mapping[str, str] | None = None
) -> AbstractAsyncContextManager[Process]:
    """Start with its standard streams on pipes; it is ended when the block is left."""
    variables = {**_environment(), **(environment or {})}
    return child_process(*program, *arguments, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=variables)


class Terminal:
    """A program's terminal, from the side of who sits before it."""

    def __init__(self, process: Process, fd: int) -> None:
        self.process = process
        self.seen = ""
        self._fd = fd
        self._changed = asyncio.Event()
        self._is_open = True
        os.set_blocking(fd, False)
        asyncio.get_running_loop().add_reader(fd, self._read)

    def type(self, text: str) -> None:
        """Press keys; \\x03 is Ctrl-C, \\x04 Ctrl-D."""
        os.write(self._fd, text.encode())

    async def until(self, text: str) -> None:
        """Wait until `text` is seen; what came up to it is then forgotten."""
        while text not in self.seen:
            assert self._is_open, f"{text!r} never came; there was: {self.seen!r}"
            self._changed.clear()
            await self._changed.wait()
        self.seen = self.seen.partition(text)[2]

    async def press_until(self, key: str, text: str) -> None:
        """Press a key, again every few seconds, until `text` is seen.

        A Ctrl-C that falls between two looks of readline's at its signals is seen with the next one.
        """
        while text not in self.seen:
            self.type(key)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.until(text), _PATIENCE_S)
                return

    def close(self) -> None:
        """Switch it off."""
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)

    def _read(self) -> None:
        try:
            chunk = os.read(self._fd, 65536)
        except OSError:
            chunk = b""  # how a terminal says that its other side is closed
        if not chunk:
            self._is_open = False
            asyncio.get_running_loop().remove_reader(self._fd)
        self.seen += chunk.decode(errors="replace")
        self._changed.set()


@asynccontextmanager
async def headrace_on_terminal(
    *arguments: str, program: tuple[str, ...] = HEADRACE
) -> AsyncIterator[Terminal]:
    """Start on a terminal; it is ended when the block is left."""
    ours, theirs = pty.openpty()
    async with child_process(
        *(sys.executable, "-c", _ON_TERMINAL),
        *program,
        *arguments,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        has_own_session=True,
        env={**_environment(), "TERM": "xterm", "COLUMNS": "100", "LINES": "40"},
    ) as process:
        os.close(theirs)  # so that the program's end is the terminal's end
        terminal = Terminal(process, ours)
        try:
            yield terminal
        finally:
            terminal.close()


def _environment() -> dict[str, str]:
    # Wide enough that no message is wrapped; the rest is what the test itself runs with.
    return {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
