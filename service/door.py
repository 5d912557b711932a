"""Of one port: who is inside, and how it is closed so that each caller learns that the server goes."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, NoReturn

import grpc

_QUIET_S = 0.05
"""No call has come for so long: whatever was on its way is here."""
_MOST_LOOKS = 20
"""So often that is waited for; who never stops calling does not keep a server from stopping."""


class Door:
    """Counts the calls of one server, and holds those that come too late.

    gRPC ends with CANCELLED, as if the caller had wanted it, each call that reaches a server which has begun
    to stop (grpc#41785). So nothing may come at that moment: a call that comes shortly before is held without
    an answer until its connection goes, which is UNAVAILABLE; and who waits for an answer makes no new call.
    """

    def __init__(self) -> None:
        self.is_shut = False
        self._num_inside = 0
        self._num_held = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def enter(self, call: asyncio.Task[Any]) -> None:
        """A call begins; it is inside until the task that answers it has ended, its status with it."""
        self._num_inside += 1
        self._is_empty.clear()
        # Not gRPC's own callback: it would hold the call in a circle that only the collector ends.
        call.add_done_callback(self._leave)

    async def hold(self) -> NoReturn:
        """Give a call no answer: it ends with its connection."""
        self._num_held += 1
        await asyncio.Event().wait()
        raise AssertionError("nobody sets this event")

    async def close(self, server: grpc.aio.Server, grace_s: float) -> None:
        """Stop `server`.

        Args:
            grace_s: as long the calls inside have to end, and new ones are still answered, seconds.
        """
        end_s = asyncio.get_running_loop().time() + grace_s
        await self._emptied(end_s)
        self.is_shut = True
        for _ in range(_MOST_LOOKS):
            num_held = self._num_held
            await asyncio.sleep(_QUIET_S)
            if self._num_held == num_held:
                break
        # Somebody may have come in as the last one left, and has the same grace.
        await self._emptied(end_s)
        # Whoever is still inside is told UNAVAILABLE by this.
        await server.stop(None)

    async def _emptied(self, end_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(end_s):
                await self._is_empty.wait()

    def _leave(self, _: object) -> None:
        self._num_inside -= 1
        if not self._num_inside:
            self._is_empty.set()
