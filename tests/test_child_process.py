"""What runs other programs for the tests and benchmarks leaves none of them behind."""

from __future__ import annotations

import signal
import sys
from asyncio.subprocess import PIPE, Process

import psutil
import pytest

from tests.support.child_process import child_process

DEAF = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: None)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
while True:
    signal.pause()
"""
OBEDIENT = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize("grace_s", [0.0, 0.1])
async def test_a_program_and_what_it_has_started_end_with_a_block_that_fails(grace_s: float) -> None:
    ended: list[Process] = []

    async def fail() -> None:
        async with child_process(sys.executable, "-c", DEAF, stdout=PIPE, grace_s=grace_s) as process:
            ended.append(process)
            assert process.stdout is not None
            children.append(psutil.Process(int(await process.stdout.readline())))
            raise KeyError("the block")

    children: list[psutil.Process] = []
    with pytest.raises(KeyError, match="the block"):
        await fail()
    assert ended[0].returncode == -signal.SIGKILL
    _, alive = psutil.wait_procs(children, timeout=60)
    # One that nobody reaps is over, too.
    assert all(child.status() == psutil.STATUS_ZOMBIE for child in alive)


async def test_one_that_ends_within_its_grace_is_not_killed() -> None:
    async with child_process(sys.executable, "-c", OBEDIENT, stdout=PIPE, grace_s=100) as process:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
    assert process.returncode == 7


async def test_one_that_has_ended_is_left_in_peace() -> None:
    async with child_process(sys.executable, "-c", "raise SystemExit(3)") as process:
        assert await process.wait() == 3
    assert process.returncode == 3
