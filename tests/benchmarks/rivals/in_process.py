"""Contenders without a server: a worker in the rival's own environment does the work and times it itself.

So they have no protocol to pay for, and Headrace's figures beside them include gRPC and its client on the
same cores.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.benchmarks.rivals.contender import Contender, Started, process
from tests.benchmarks.rivals.work import Timing, Work

WORKERS = Path(__file__).parent / "workers"


def in_process(name: str, venv: Path, worker: str, arguments: Sequence[str], log: Path) -> Contender:
    """A worker: a line of JSON on its standard output when it is ready, then an answer to each line it
    gets."""

    @asynccontextmanager
    async def start() -> AsyncIterator[Started]:
        began_s = time.perf_counter()
        command = [str(venv / "bin" / "python"), str(WORKERS / worker), *arguments]
        env = {**os.environ, "HF_HUB_OFFLINE": "1"}
        async with process(command, log, env=env, wants_pipes=True) as running:
            await _line(running, log)

            async def do(work: Work) -> list[Timing]:
                requests = [[list(request.prompt), request.output_len] for request in work.requests]
                assert running.stdin is not None
                running.stdin.write(json.dumps(requests).encode() + b"\n")
                return [
                    Timing(first_s, last_s, round(num_tokens))
                    for first_s, last_s, num_tokens in await _line(running, log)
                ]

            yield Started(do, running.pid, time.perf_counter() - began_s)

    return Contender(name, start)


async def _line(running: asyncio.subprocess.Process, log: Path) -> list[list[float]]:
    """The next line that is an answer; libraries print to standard output, too."""
    assert running.stdout is not None
    while line := await running.stdout.readline():
        if line.startswith(b"["):
            answer: list[list[float]] = json.loads(line)
            return answer
    raise RuntimeError(f"it ended with {await running.wait()}: see {log}")
