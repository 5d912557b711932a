"""grpc.health.v1 for many watchers, none of whom can hold up the others, or whoever has news to tell.

The library's own servicer writes to each watcher under the lock that a change of status needs: one who takes
no message would stop health for everybody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TypeAlias

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

Response: TypeAlias = health_pb2.HealthCheckResponse
Context: TypeAlias = "grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]"


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Tells the status of each name that has one."""

    def __init__(self) -> None:
        self._status: dict[str, str] = {}
        self._watchers: set[asyncio.Event] = set()

    def set(self, names: Iterable[str], status: str) -> None:
        """Change the status of some names, as the protocol spells it. Never waits for anybody."""
        for name in names:
            self._status[name] = status
        for changed in self._watchers:
            changed.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> Response:
        """The status of one name, now."""
        status = self._status.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service is known here")
        return Response(status=status)

    async def List(self, request: Message, context: Context) -> Message:
        """The status of every name that has one, now."""
        statuses = {name: Response(status=status) for name, status in self._status.items()}
        # The published types are older than the method.
        listed: Message = health_pb2.HealthListResponse(statuses=statuses)  # type: ignore[attr-defined]
        return listed

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[Response]:
        """The status of one name now, and whenever it is another. A slow watcher misses what came between."""
        changed, told = asyncio.Event(), None
        self._watchers.add(changed)
        try:
            while True:
                changed.clear()
                status = self._status.get(request.service, "SERVICE_UNKNOWN")
                if status != told:
                    told = status
                    yield Response(status=status)
                else:
                    await changed.wait()
        finally:
            self._watchers.discard(changed)
