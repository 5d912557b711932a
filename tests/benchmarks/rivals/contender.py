"""One side of a comparison: something that is started, does work, and is ended."""

from __future__ import annotations

import asyncio
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from headrace.clients.bench_backend import Ask, Backend, End
from tests.benchmarks.rivals.work import Timing, Work
from tests.support.child_process import child_process

MEBI = 1 << 20
_STOP_GRACE_S = 20.0


@dataclass(frozen=True)
class Started:
    """A contender that is ready.

    Args:
        do: does work once.
        pid: its process; children count with it.
        start_s: from the start of the process until it took work.
    """

    do: Callable[[Work], Awaitable[list[Timing]]]
    pid: int
    start_s: float

    def rss_mib(self) -> float:
        """Resident memory now, of all its processes together; what they share counts for each."""
        return sum(_rss(process) for process in _tree(self.pid)) / MEBI

    def peak_mib(self) -> float:
        """The sum of what each of its processes had resident at most."""
        return sum(_peak_kib(process.pid) for process in _tree(self.pid)) / 1024

    def cpu_s(self) -> float:
        """Processor time used so far."""
        return sum(sum(process.cpu_times()[:2]) for process in _tree(self.pid))


@dataclass(frozen=True)
class Contender:
    """How to start it.

    Args:
        name: for the table.
        start: starts it, for as long as the block lasts.
    """

    name: str
    start: Callable[[], AbstractAsyncContextManager[Started]] = field(repr=False)


def _tree(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def _rss(process: psutil.Process) -> int:
    return int(process.memory_info().rss)


def _peak_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


@asynccontextmanager
async def process(
    command: Sequence[str], log: Path, *, env: Mapping[str, str], wants_pipes: bool = False
) -> AsyncIterator[Process]:
    """A process in a session of its own, ended with the block.

    Args:
        log: file for what it writes; with pipes, for its standard error alone.
        env: its whole environment.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        async with child_process(
            *command,
            stdin=PIPE if wants_pipes else DEVNULL,
            stdout=PIPE if wants_pipes else file,
            stderr=file,
            env=env,
            has_own_session=True,
            grace_s=_STOP_GRACE_S,
        ) as started:
            yield started


def served_by(
    backend: Backend, before: Callable[[], Awaitable[object]]
) -> Callable[[Work], Awaitable[list[Timing]]]:
    """Work over a protocol, timed here, at the caller.

    Args:
        before: what is done before each piece of work, untimed.
    """

    async def do(work: Work) -> list[Timing]:
        await before()
        async with backend.connect() as connection:
            began_s = time.perf_counter()

            async def one(prompt: tuple[int, ...], output_len: int) -> Timing:
                first_s = last_s = 0.0
                counted = 0
                told: int | None = None
                async for part in connection.ask(Ask(prompt, output_len)):
                    if isinstance(part, End):
                        told = part.num_tokens
                    else:
                        last_s = time.perf_counter() - began_s
                        first_s = first_s or last_s
                        counted += part.count
                return Timing(first_s, last_s, counted if told is None else told)

            return await asyncio.gather(
                *(one(request.prompt, request.output_len) for request in work.requests)
            )

    return do
