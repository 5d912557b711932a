"""grpc.health.v1: ready means that a generation would be answered now.

Names: "" and each service of `headrace.v1` say whether the server is ready. "liveness" is SERVING from the
first moment on, while the model loads too, and NOT_SERVING once the engine is dead or stuck: restart it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.engine import AsyncEngine
from headrace.service.health_servicer import HealthServicer
from headrace.service.telemetry import log

LIVENESS = "liveness"
READINESS = ("", "headrace.v1.GenerationService", "headrace.v1.ModelService", "headrace.v1.ControlService")


class Health:
    """The health of the process, and the servicer that tells it. Make it with `Health.start`."""

    def __init__(self) -> None:
        self.servicer = HealthServicer()
        self._is_ready = False
        self._is_leaving = False
        self._followers: list[Callable[[bool], None]] = []

    @classmethod
    async def start(cls) -> Health:
        """Alive, not ready. This comes before any port opens."""
        health = cls()
        await health._tell(READINESS, is_serving=False)
        await health._tell((LIVENESS,), is_serving=True)
        return health

    @contextmanager
    def followed(self, follower: Callable[[bool], None]) -> Iterator[None]:
        """Within the block `follower` is called each time that readiness is told, with what is told."""
        self._followers.append(follower)
        try:
            yield
        finally:
            self._followers.remove(follower)

    async def ready(self) -> None:
        """A generation has passed: requests are welcome."""
        self._is_ready = True
        if not self._is_leaving:
            await self._tell(READINESS, is_serving=True)

    async def leave(self) -> None:
        """Send new requests elsewhere, from now on for ever."""
        self._is_leaving = True
        await self._tell(READINESS, is_serving=False)

    async def dead(self) -> None:
        """The engine has died."""
        await self.leave()
        await self._tell((LIVENESS,), is_serving=False)

    async def watch(self, engine: AsyncEngine, stall_timeout_s: float, interval_s: float) -> None:
        """Follow the engine's heartbeat until cancelled: an engine that is stuck is neither ready nor alive.

        Args:
            stall_timeout_s: longest time between two finished steps while there is work, seconds.
            interval_s: how often to look, seconds.
        """
        is_stuck = False
        while True:
            await asyncio.sleep(interval_s)
            silent_s = engine.seconds_since_progress()
            if is_stuck == (silent_s > stall_timeout_s):
                continue
            is_stuck = not is_stuck
            if is_stuck:
                log.error("engine stuck", silent_s=round(silent_s, 1), stall_timeout_s=stall_timeout_s)
                await self._tell((*READINESS, LIVENESS), is_serving=False)
            else:
                log.warning("engine moves again")
                await self._tell((LIVENESS,), is_serving=True)
                if self._is_ready and not self._is_leaving:
                    await self._tell(READINESS, is_serving=True)

    async def _tell(self, services: tuple[str, ...], *, is_serving: bool) -> None:
        self.servicer.set(services, "SERVING" if is_serving else "NOT_SERVING")
        if "" in services:
            for follower in self._followers:
                follower(is_serving)
