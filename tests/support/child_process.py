"""Another program, for as long as a block lasts."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import psutil

_UNREAD_BYTES = 1 << 24


@asynccontextmanager
async def child_process(
    *command: str,
    stdin: int | BinaryIO | None = None,
    stdout: int | BinaryIO | None = None,
    stderr: int | BinaryIO | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    has_own_session: bool = False,
    grace_s: float = 0.0,
) -> AsyncIterator[Process]:
    """Start a program; however the block is left, it and what it has started are over then.

    Args:
        stdin, stdout, stderr: a pipe, DEVNULL, a file, or None for our own.
        env: its whole environment; None is ours.
        has_own_session: signals that a terminal sends to us are not for it.
        grace_s: how long it may take to end after a SIGTERM, seconds; 0: it is killed at once.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=None if env is None else dict(env),
        cwd=cwd,
        start_new_session=has_own_session,
        # One whose output nobody reads is not seen to end while more than this waits in its pipe.
        limit=_UNREAD_BYTES,
    )
    try:
        yield process
    finally:
        await end_process(process, grace_s)


async def end_process(process: Process, grace_s: float = 0.0) -> None:
    """End a program that still runs, and what it has started, before the block is left."""
    if process.returncode is not None:
        return
    started = _descendants(process.pid)
    try:
        with suppress(ProcessLookupError, TimeoutError):
            if grace_s:
                process.terminate()
                await asyncio.wait_for(process.wait(), grace_s)
    finally:
        # Cancelled or not.
        with suppress(ProcessLookupError):
            process.kill()
        # Before it is waited for: they may hold the other ends of its pipes.
        for descendant in started:
            with suppress(psutil.NoSuchProcess):
                descendant.kill()
    await process.wait()


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
