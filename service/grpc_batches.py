"""Mends grpc#43360: what `grpc.aio` allocates for an operation is never freed if the operation fails, or if
nobody waits for it any more.

Both are daily bread of a server whose clients cancel, vanish or reset: a hundred bytes for each of them, for
ever, and scattered, so that the pages around them can't be given back either. Here each operation's end is
taken in by whoever began it, whatever became of the call and of the task that waited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]

_KNOWN_VERSIONS = ("1.85.",)
"""Tried with these. This reaches into what is gRPC's own, so any other version is left as it is."""

UNMENDED = (
    f"gRPC {grpc.__version__} never frees what it allocates for calls that are cancelled or break off, and "
    "the server sees to that with gRPC 1.85 alone: install grpcio 1.85"
)
"""What an operator is told of any other version."""

_Execute = Callable[[Any, tuple[Any, ...], Any], Coroutine[Any, Any, None]]


def mend_batches() -> bool:
    """Mend it for the whole process; whether this version of gRPC is one that can be."""
    execute: _Execute | None = getattr(cygrpc, "execute_batch", None)
    if execute is None or not grpc.__version__.startswith(_KNOWN_VERSIONS):
        return False
    if getattr(execute, "is_mended", False):
        return True

    def mended(call: Any, operations: tuple[Any, ...], loop: asyncio.AbstractEventLoop) -> Awaitable[None]:
        batch = _Batch(loop)
        batch.execution = execute(call, operations, batch)
        batch.execution.send(None)
        return batch.over

    mended.is_mended = True  # type: ignore[attr-defined]
    cygrpc.execute_batch = mended
    return True


class _Batch:
    """Operations of one call that are under way. To gRPC's own code it is both the loop and the future.

    Args:
        loop: whose thread they are begun in.

    `execution` is what has begun them; `over` is set once they have ended, and may be awaited or not. There
    is one for each message: few steps, all of them short.
    """

    __slots__ = ("_loop", "execution", "over")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.over: asyncio.Future[None] = loop.create_future()
        self.execution: Coroutine[Any, Any, None]

    def create_future(self) -> _Batch:
        """What `execute` waits for."""
        return self

    def __await__(self) -> Iterator[None]:
        return iter((None,))

    def cancelled(self) -> bool:
        """Never: who waits may give up, the operations go on to their end."""
        return False

    def set_result(self, _: object) -> None:
        """They have succeeded."""
        self._end(None)

    def set_exception(self, error: BaseException) -> None:
        """They have failed."""
        self._end(error)

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: object) -> None:
        """Their end is told, by whichever loop came to know of it first."""
        if asyncio.get_running_loop() is self._loop:
            callback(*args)
        else:
            self._loop.call_soon_threadsafe(callback, *args)

    def _end(self, error: BaseException | None) -> None:
        over = self.over
        try:
            # It goes on as if they had succeeded, so it frees what it has allocated.
            self.execution.send(None)
        except StopIteration:
            if over.done():
                return
            if error is None:
                over.set_result(None)
            else:
                over.set_exception(error)
        except BaseException as unforeseen:
            # Ended all the same: who awaits it is not to wait for ever.
            if over.done():
                raise
            over.set_exception(unforeseen)
        else:
            if not over.done():
                over.set_exception(RuntimeError("gRPC waits once more for operations that are over"))
