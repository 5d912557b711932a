"""A server of our own, for as long as the demo needs it."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import shutil
import struct
import sys
import tempfile
import termios
from asyncio.subprocess import DEVNULL, Process
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.clients.client import InferenceClient
from headrace.clients.errors import HeadraceError
from headrace.clients.events import ServingStatus
from headrace.clients.launch import service_command

STOP_GRACE_S = 15.0
_POLL_S = 0.1
_NUM_LOG_LINES = 15


class ServerFailedError(Exception):
    """The server did not start, or did not last; then the message ends with its last log lines."""


class ServerLog:
    """Passes the server's standard error on while it starts, and remembers the end of it.

    The server draws its progress when it sees a terminal, so it is given one exactly where we have one.
    """

    def __init__(self) -> None:
        self.is_terminal = sys.stderr.isatty()
        self.is_shown = True
        self._lines: deque[str] = deque(maxlen=_NUM_LOG_LINES)
        self._rest = ""
        if self.is_terminal:
            self._read_fd, self.write_fd = pty.openpty()
            columns, rows = shutil.get_terminal_size()
            fcntl.ioctl(self.write_fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        else:
            self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        asyncio.get_running_loop().add_reader(self._read_fd, self.read)

    def hide(self) -> None:
        """From now on only remember."""
        self.is_shown = False

    def tail(self) -> str:
        """The last lines."""
        self.read()
        return "\n".join(line for line in [*self._lines, self._rest] if line.strip())

    def close(self) -> None:
        """Stop reading."""
        asyncio.get_running_loop().remove_reader(self._read_fd)
        os.close(self._read_fd)

    def read(self) -> None:
        """Take what there is."""
        while True:
            try:
                chunk = os.read(self._read_fd, 65536)
            except BlockingIOError:
                return
            except OSError:
                chunk = b""  # how a terminal says that its other side is closed
            if not chunk:
                asyncio.get_running_loop().remove_reader(self._read_fd)
                return
            if self.is_shown:
                sys.stderr.buffer.write(chunk)
                sys.stderr.flush()
            *lines, self._rest = (self._rest + chunk.decode(errors="replace")).split("\n")
            # A progress bar draws over its own line: what counts is what is seen last.
            self._lines.extend(line.rstrip("\r").rpartition("\r")[2] for line in lines)


@dataclass(frozen=True, slots=True)
class DemoServer:
    """A running server.

    Args:
        target, control_target: where it listens, "host:port".
        pid: its process.
    """

    target: str
    control_target: str
    pid: int


@asynccontextmanager
async def running_server(
    arguments: Sequence[str], command: Sequence[str] | None = None
) -> AsyncIterator[DemoServer]:
    """A server on free loopback ports that takes requests, for as long as the block lasts.

    Args:
        arguments: further ones of `headrace serve`.
        command: starts the server, arguments follow; None is `headrace serve`.

    Raises:
        ServerFailedError: it did not start, or was found dead when the block failed.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-demo-") as folder:
        ready_file = Path(folder) / "ready.json"
        log = ServerLog()
        # In a session of its own: Ctrl-C is for us, and we tell the server.
        process = await asyncio.create_subprocess_exec(
            *(command or [*service_command(), "serve"]),
            *("--port", "0", "--control-port", "0", "--ready-file", str(ready_file)),
            *("--lame-duck-s", "0", "--drain-grace-s", "1"),
            # Lines for people, wherever they go: they stand between ours.
            *("--log-level", "warning" if log.is_terminal else "info", "--log-format", "console"),
            *arguments,
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=log.write_fd,
            start_new_session=True,
        )
        os.close(log.write_fd)  # so that the end of the server is the end of its log
        try:
            server = await _when_ready(process, ready_file, log)
            log.hide()
            yield server
        except HeadraceError as error:
            # A connection breaks a moment before its process is seen to end.
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _POLL_S * 10)
            if process.returncode is None:
                raise
            raise ServerFailedError(_obituary(process, log)) from error
        finally:
            await _stop(process)
            log.close()


async def _when_ready(process: Process, ready_file: Path, log: ServerLog) -> DemoServer:
    """Wait for the ports and then for the model; a first start fetches it, so there is no limit of time."""
    ended = asyncio.ensure_future(process.wait())
    ready = asyncio.ensure_future(_poll_until_ready(ready_file))
    try:
        await asyncio.wait({ended, ready}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            raise ServerFailedError(_obituary(process, log))
        return ready.result()
    finally:
        ended.cancel()
        ready.cancel()


async def _poll_until_ready(ready_file: Path) -> DemoServer:
    while (server := _listening(ready_file)) is None:  # noqa: ASYNC110  another process's file
        await asyncio.sleep(_POLL_S)
    async with InferenceClient(server.target) as client:
        while await client.health() is not ServingStatus.SERVING:  # noqa: ASYNC110  another process's state
            await asyncio.sleep(_POLL_S)
    return server


def _listening(ready_file: Path) -> DemoServer | None:
    if not ready_file.exists():
        return None
    ports = json.loads(ready_file.read_text(encoding="utf-8"))
    return DemoServer(f"127.0.0.1:{ports['port']}", f"127.0.0.1:{ports['control_port']}", pid=ports["pid"])


async def _stop(process: Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_GRACE_S)
    except TimeoutError:
        process.kill()
        await process.wait()


def _obituary(process: Process, log: ServerLog) -> str:
    tail = log.tail()
    if log.is_shown:
        return f"the server ended with status {process.returncode} before it took requests; it said why above"
    return f"the server ended with status {process.returncode}. Its last words:\n{tail}"
