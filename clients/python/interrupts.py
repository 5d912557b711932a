"""Ctrl-C, once or twice, ends what a command does in order."""

from __future__ import annotations

import os
import signal
from collections.abc import Coroutine
from types import FrameType
from typing import TypeVar

Result = TypeVar("Result")

_STATUS = 128 + signal.SIGINT


class Interrupted(Exception):
    """Ctrl-C was pressed, and the work has been broken off."""


async def interruptible(work: Coroutine[object, object, Result], *, ends_at_second: bool = True) -> Result:
    """Do `work` until it is done or Ctrl-C is pressed: then it is cancelled, which may take a moment.

    Args:
        ends_at_second: whether a second Ctrl-C in that moment ends the process; otherwise nothing happens.

    Raises:
        Interrupted: it was pressed.
    """
    import asyncio  # noqa: PLC0415

    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    num_pressed = 0

    # A KeyboardInterrupt, raised wherever the loop happens to be, would leave gRPC's own calls half done.
    def press(signum: int, frame: FrameType | None) -> None:
        nonlocal num_pressed
        num_pressed += 1
        if num_pressed == 1:
            loop.call_soon_threadsafe(task.cancel)
        elif ends_at_second:
            os._exit(_STATUS)

    before = signal.signal(signal.SIGINT, press)
    try:
        return await task
    except asyncio.CancelledError:
        if not num_pressed:
            task.cancel()
            raise
        raise Interrupted from None
    finally:
        # Until the process has ended a second one finds this handler, and no other for a moment.
        if not (num_pressed and ends_at_second):
            signal.signal(signal.SIGINT, before)
