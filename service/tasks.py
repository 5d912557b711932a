"""Tasks that somebody owns: whoever begins one ends it, and a fault in one is told when it happens."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from headrace.service.telemetry import log, places_of

T = TypeVar("T")


def begin(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Begin `work` as a task; it belongs to the caller, who ends it with `end`.

    Args:
        name: what the log calls it, should it fail.
    """
    task = asyncio.create_task(work, name=f"headrace-{name}")
    task.add_done_callback(_tell_fault)
    return task


async def end(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel the tasks that still run, and wait until all of them have ended."""
    begun = [task for task in tasks if task is not None]
    for task in begun:
        task.cancel()
    await asyncio.gather(*begun, return_exceptions=True)


def raise_failure(tasks: list[asyncio.Task[Any]]) -> None:
    """Raise what one of them has ended with, if any has failed.

    Args:
        tasks: a list that its owner empties: this frame, which the failure leads to, holds it.
    """
    for task in tasks:
        if task.done():
            try:
                task.result()
            finally:
                # It keeps what it raises, and would be held by it through this frame.
                del task


def _tell_fault(task: asyncio.Task[Any]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.error("task fault", task=task.get_name(), **places_of(error))
