from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from headrace.engine import AsyncEngine
from headrace.service.health import LIVENESS, READINESS
from tests.support.fake_runner import make_fake_model
from tests.support.service import RunningService, generate_ids, make_start, running_service, until
from tests.support.step_gate import StepGate

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


class LookedAt(AsyncEngine):
    """An engine, and what was seen of its heartbeat."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._looked_at = engine
        self.silences_s: list[float] = []

    def seconds_since_progress(self) -> float:
        self.silences_s.append(self._looked_at.seconds_since_progress())
        return self.silences_s[-1]


async def watched(service: RunningService, name: str = "") -> AsyncIterator[int]:
    """The states of one name, as a watcher sees them."""
    async for response in service.health_stub.Watch(HealthCheckRequest(service=name)):  # type: ignore[attr-defined]
        yield response.status


async def test_a_server_that_loads_is_alive_and_not_ready() -> None:
    async with running_service(opens=False) as service:
        assert {await service.check(name) for name in READINESS} == {NOT_SERVING}
        assert await service.check(LIVENESS) == SERVING


async def test_every_name_turns_with_the_servers_state_and_watchers_see_it() -> None:
    async with running_service(opens=False) as service:
        states = watched(service)
        assert await anext(states) == NOT_SERVING
        await service.health.ready()
        assert await anext(states) == SERVING
        assert {await service.check(name) for name in READINESS} == {SERVING}
        await service.health.leave()
        assert await anext(states) == NOT_SERVING
        assert {await service.check(name) for name in READINESS} == {NOT_SERVING}
        assert await service.check(LIVENESS) == SERVING


async def test_who_leaves_is_never_ready_again() -> None:
    async with running_service() as service:
        await service.health.leave()
        await service.health.ready()
        assert await service.check() == NOT_SERVING


async def test_a_dead_engine_is_neither_ready_nor_alive() -> None:
    async with running_service() as service:
        await service.health.dead()
        assert await service.check() == await service.check(LIVENESS) == NOT_SERVING


async def test_an_unknown_name_is_not_found() -> None:
    async with running_service() as service:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await service.check("nobody")
    assert refusal.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_step_that_hangs_shows_and_its_end_shows_too() -> None:
    gate = StepGate()
    async with running_service(make_fake_model(before_step=gate)) as service:
        watching = asyncio.create_task(service.health.watch(service.engine, 0.05, 0.01))
        states = watched(service)
        assert await anext(states) == SERVING
        running = asyncio.create_task(generate_ids(service, make_start()))
        assert await anext(states) == NOT_SERVING
        assert await service.check(LIVENESS) == NOT_SERVING
        gate.open()
        await running
        assert await anext(states) == SERVING
        # The steps that were left may have been slow ones, too.
        while await service.check(LIVENESS) != SERVING:
            pass
        watching.cancel()


async def test_an_idle_engine_is_healthy() -> None:
    async with running_service() as service:
        await generate_ids(service, make_start())
        await until(lambda: service.engine.seconds_since_progress() == 0.0)
        # Any silence at all would be a stall, and would be seen at the first look.
        engine = LookedAt(service.engine)
        watching = asyncio.create_task(service.health.watch(engine, 0.0, 0.0))
        await until(lambda: len(engine.silences_s) >= 10)
        watching.cancel()
        assert set(engine.silences_s) == {0.0}
        assert await service.check(LIVENESS) == SERVING


async def test_a_stall_does_not_make_a_server_ready_that_leaves() -> None:
    gate = StepGate()
    async with running_service(make_fake_model(before_step=gate)) as service:
        watching = asyncio.create_task(service.health.watch(service.engine, 0.05, 0.01))
        alive = watched(service, LIVENESS)
        assert await anext(alive) == SERVING
        running = asyncio.create_task(generate_ids(service, make_start()))
        assert await anext(alive) == NOT_SERVING
        await service.health.leave()
        gate.open()
        await running
        assert await anext(alive) == SERVING
        assert await service.check() == NOT_SERVING
        watching.cancel()
        await until(watching.done)
