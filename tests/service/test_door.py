"""Whoever calls as a server stops learns that it goes, and never that the call was cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.service import door as door_module
from headrace.service.door import Door
from headrace.service.edge import Edge
from headrace.service.health import Health
from headrace.service.limits import Limits
from headrace.service.server import Endpoint, bind, make_health_server
from tests.support.fake_call import FakeCall
from tests.support.service import until

OK, UNAVAILABLE = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE
NUM_CALLERS = 4


@dataclass
class Served:
    """A server that tells its health, and what a client of it holds."""

    server: grpc.aio.Server
    door: Door
    stub: Any

    async def ending_of_a_call(self) -> grpc.StatusCode:
        """How one more call ends."""
        call = self.stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
        code: grpc.StatusCode = await call.code()
        return code


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with a_server() as served:
        yield served


@asynccontextmanager
async def a_server() -> AsyncIterator[Served]:
    door = Door()
    server = make_health_server(await Health.start(), Limits(), Edge(), door=door)
    port = bind(server, Endpoint("127.0.0.1", 0), "--port")
    await server.start()
    own = [("grpc.use_local_subchannel_pool", 1)]
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=own) as channel:
            yield Served(server, door, health_pb2_grpc.HealthStub(channel))
    finally:
        await server.stop(None)


@pytest.mark.parametrize("attempt", range(5))
async def test_who_calls_again_and_again_is_never_told_of_a_cancellation(
    served: Served, attempt: int
) -> None:
    endings: list[grpc.StatusCode] = []

    async def call_until(closed: asyncio.Future[None]) -> None:
        while not closed.done():
            endings.append(await served.ending_of_a_call())

    closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    calling = [asyncio.create_task(call_until(closed)) for _ in range(NUM_CALLERS)]
    await until(lambda: len(endings) > 20 * NUM_CALLERS)
    assert set(endings) == {OK}
    await served.door.close(served.server, grace_s=1.0)
    closed.set_result(None)
    await asyncio.gather(*calling)
    assert set(endings) == {OK, UNAVAILABLE}


async def test_who_is_inside_has_the_grace_to_end(served: Served) -> None:
    watch = served.stub.Watch(health_pb2.HealthCheckRequest())
    await watch.read()
    closing = asyncio.create_task(served.door.close(served.server, grace_s=30.0))
    # New calls are answered as before, until the last one inside has gone.
    assert await served.ending_of_a_call() is OK
    assert not closing.done()
    watch.cancel()
    await closing
    assert await served.ending_of_a_call() is UNAVAILABLE


async def test_who_stays_inside_past_the_grace_is_told_that_the_server_goes(served: Served) -> None:
    watch = served.stub.Watch(health_pb2.HealthCheckRequest())
    await watch.read()
    await served.door.close(served.server, grace_s=0.0)
    assert await watch.code() is UNAVAILABLE


async def test_who_comes_late_is_held_until_the_connection_goes(served: Served) -> None:
    assert await served.ending_of_a_call() is OK
    served.door.is_shut = True
    late = asyncio.create_task(served.ending_of_a_call())
    holding = asyncio.create_task(served.door.close(served.server, grace_s=1.0))
    assert await late is UNAVAILABLE
    await holding


class StoppableServer:
    """Notes that it was stopped."""

    def __init__(self) -> None:
        self.is_stopped = False

    async def stop(self, grace_s: float | None) -> None:
        self.is_stopped = True


async def test_who_came_in_as_the_last_one_left_has_the_grace_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "_QUIET_S", 0.0)
    door, server, first, second = Door(), StoppableServer(), FakeCall(), FakeCall()
    door.enter(cast(Any, first))
    closing = asyncio.create_task(door.close(cast(Any, server), grace_s=60.0))
    await asyncio.sleep(0)
    first.end()
    door.enter(cast(Any, second))
    for _ in range(100):
        await asyncio.sleep(0)
    assert door.is_shut
    assert not server.is_stopped
    second.end()
    await closing
    assert server.is_stopped
