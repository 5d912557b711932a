from __future__ import annotations

import asyncio

import pytest
import structlog

from headrace.service.tasks import begin, end, raise_failure


async def test_who_ends_a_task_waits_until_it_has_cleaned_up() -> None:
    steps: list[str] = []
    is_running = asyncio.Event()

    async def work() -> None:
        try:
            is_running.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            steps.append("cleaned up")

    task = begin(work(), "work")
    await is_running.wait()
    await end(task, None)
    assert task.cancelled()
    assert steps == ["cleaned up"]


async def test_a_fault_is_told_when_it_happens_and_not_raised_at_the_end() -> None:
    async def fail() -> None:
        raise ValueError("tell-nobody")

    with structlog.testing.capture_logs() as logs:
        task = begin(fail(), "work")
        await asyncio.wait({task})
        await asyncio.sleep(0)
        assert [(entry["event"], entry["task"], entry["error"]) for entry in logs] == [
            ("task fault", "headrace-work", "ValueError")
        ]
        await end(task)
    assert "tell-nobody" not in str(logs)


async def test_the_failure_of_one_task_is_raised_once_it_has_ended() -> None:
    async def fail() -> None:
        raise ValueError("broken")

    tasks = [asyncio.create_task(asyncio.Event().wait()), asyncio.create_task(fail())]
    raise_failure(tasks)
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(ValueError, match="broken"):
        raise_failure(tasks)
    await end(*tasks)
