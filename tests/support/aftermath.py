"""What must hold after any fault and any client: nothing is held, the next request is served as the first."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.v1.control_pb2 import GetLoadRequest, GetLoadResponse
from headrace.v1.control_pb2_grpc import ControlServiceStub
from headrace.v1.generation_pb2 import GenerateOnceRequest, StartGeneration
from headrace.v1.generation_pb2_grpc import GenerationServiceStub
from tests.support.service import make_start

CANARY_PROMPT = (7, 8, 9, 10, 11)
_PATIENCE_S = 20.0
_OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


def canary() -> StartGeneration:
    """A short request with one right answer."""
    return make_start("canary", prompt=CANARY_PROMPT, max_tokens=8)


async def canary_ids(address: str) -> list[int]:
    """The canary's answer, over a connection of its own."""
    async with grpc.aio.insecure_channel(address, options=_OWN_CONNECTION) as channel:
        answer = await GenerationServiceStub(channel).GenerateOnce(
            GenerateOnceRequest(start=canary()), wait_for_ready=True, timeout=_PATIENCE_S
        )
        return list(answer.completions[0].token_ids)


async def until_idle(control: ControlServiceStub) -> GetLoadResponse:
    """Wait until nobody runs, waits or holds a block, and every block is accounted for.

    Raises:
        AssertionError: something is held for good.
    """
    load = GetLoadResponse()
    try:
        async with asyncio.timeout(_PATIENCE_S):
            while True:
                load = await control.GetLoad(GetLoadRequest())
                if not (load.num_running or load.num_waiting or load.blocks.live):
                    break
    except TimeoutError:
        raise AssertionError(f"something is held for good: {load}") from None
    assert load.blocks.free + load.blocks.cached == load.blocks.total
    return load


async def assert_as_new(address: str, control_address: str, expected: Sequence[int]) -> None:
    """The server is idle, healthy, and answers the canary as ever.

    Args:
        expected: the canary's ids when nothing had gone wrong yet.
    """
    async with grpc.aio.insecure_channel(control_address, options=_OWN_CONNECTION) as channel:
        control = ControlServiceStub(channel)
        await until_idle(control)
        assert await canary_ids(address) == list(expected)
        await until_idle(control)
        stub: health_pb2_grpc.HealthStub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "liveness"):
            request = health_pb2.HealthCheckRequest(service=name)
            status = (await stub.Check(request)).status  # type: ignore[attr-defined]
            assert status == health_pb2.HealthCheckResponse.SERVING


def tasks_now() -> set[asyncio.Task[object]]:
    """What this event loop has begun and not ended; gRPC's own waiting for the next call aside."""
    return {task for task in asyncio.all_tasks() if not task.done() and not _accepts_calls(task)}


def _accepts_calls(task: asyncio.Task[object]) -> bool:
    return getattr(task.get_coro(), "__qualname__", "").startswith("AioServer._request")


async def until_no_task_but(before: set[asyncio.Task[object]]) -> None:
    """Wait until all tasks have ended that were begun since.

    Raises:
        AssertionError: some never do.
    """
    left: set[asyncio.Task[object]] = set()
    try:
        async with asyncio.timeout(_PATIENCE_S):
            while left := tasks_now() - before - {asyncio.current_task()}:  # noqa: ASYNC110
                await asyncio.sleep(0)
    except TimeoutError:
        raise AssertionError(f"tasks were left behind: {left}") from None
