"""The thread that the model computes in, beside the event loop's."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TypeVar

T = TypeVar("T")

_HEAD_START_S = 0.0005
"""So long at most the event loop stands still for a call to get going."""


class ModelThread:
    """Runs one call after the other. An executor of one worker does that, too, with two futures and several
    locks for each call: all of it between two steps, when nothing is computed.

    Not for several event loops at once.
    """

    def __init__(self) -> None:
        self._calls = SimpleQueue[Callable[[], None] | None]()
        self._thread: Thread | None = None
        self._is_closed = False

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Call a function there, and wait for what it returns or raises. It is called even if whoever waits
        is cancelled.

        Raises:
            RuntimeError: the thread is closed.
        """
        if self._is_closed:
            raise RuntimeError("the model's thread is closed")
        if self._thread is None:
            self._thread = self._start()
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()
        is_over = Lock()
        is_over.acquire()

        def call() -> None:
            settle: Callable[..., None] = outcome.set_result
            try:
                told: object = function(*arguments)
            except StopIteration as fault:
                # No future takes one: whoever waits would wait for good.
                settle = outcome.set_exception
                told = RuntimeError(f"{function} raised {fault!r}").with_traceback(fault.__traceback__)
            except BaseException as fault:
                settle, told = outcome.set_exception, fault
            is_over.release()
            # Whoever closes the loop waits no more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_settle, outcome, settle, told)

        self._calls.put(call)
        # Until the model computes, its thread needs the interpreter time and again, and would wait each time
        # for what the loop has to do for readers of the step before. Then there is time for that.
        is_over.acquire(timeout=_HEAD_START_S)
        return await outcome

    def close(self) -> None:
        """End the thread when it has done what was asked of it."""
        self._is_closed = True
        if self._thread is not None:
            atexit.unregister(self.close)
            self._calls.put(None)
            self._thread.join()

    def _start(self) -> Thread:
        # An interpreter waits for such a thread only if it is told to; for any other it would wait for good
        # where nobody has closed it.
        thread = Thread(target=self._serve, name="headrace-model", daemon=True)
        atexit.register(self.close)
        thread.start()
        return thread

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            # While it waits it keeps nothing of what it was given.
            del call


def _settle(outcome: asyncio.Future[T], settle: Callable[..., None], told: object) -> None:
    if not outcome.done():
        settle(told)
