"""What a call held is free as soon as it is over: its memory in gRPC does not wait for the collector."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.service.auth import AuthRules
from headrace.service.identity import Role
from headrace.service.server import Entrance
from headrace.service.token_drawing import entry_line
from headrace.v1.control_pb2 import GetLoadRequest
from headrace.v1.generation_pb2 import GenerateOnceRequest, GenerateRequest, SessionRequest
from headrace.v1.model_pb2 import TokenizeRequest
from tests.support.fake_runner import make_fake_model
from tests.support.service import RawSession, RunningService, generate, make_start, running_service, until

Call = Callable[[RunningService], Awaitable[object]]


async def read_to_its_end(service: RunningService) -> None:
    await generate(service, make_start(max_tokens=5))


async def answered_whole(service: RunningService) -> None:
    await service.generation.GenerateOnce(GenerateOnceRequest(start=make_start(max_tokens=5)))


async def cancelled(service: RunningService) -> None:
    call = service.generation.Generate(GenerateRequest(start=make_start(max_tokens=100)))
    await call.read()
    await call.read()
    call.cancel()


async def refused(service: RunningService) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="temperature"):
        await generate(service, make_start(temperature=-1.0))


async def refused_by_the_engine(service: RunningService) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="context"):
        await generate(service, make_start(max_tokens=100_000))


async def refused_by_another_service(service: RunningService) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="no such service"):
        await service.check("nobody's")


async def of_no_method(service: RunningService) -> None:
    async with grpc.aio.insecure_channel(service.address) as channel:
        unknown: Any = channel.unary_unary("/headrace.v1.GenerationService/Nothing")
        with pytest.raises(grpc.aio.AioRpcError, match="Method not found"):
            await unknown(b"")


async def refused_at_the_gate(service: RunningService) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="authorization"):
        await service.control.GetLoad(GetLoadRequest())


async def too_long(service: RunningService) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="text"):
        await service.model.Tokenize(TokenizeRequest(text="x" * 2**22))


async def session_to_its_end(service: RunningService) -> None:
    session = RawSession(service.generation)
    await session.start(make_start("a", max_tokens=5), make_start("b", max_tokens=100))
    await session.cancel("b")
    assert await session.half_close() is grpc.StatusCode.OK


async def session_cut_off(service: RunningService) -> None:
    session = RawSession(service.generation)
    await session.start(make_start("a", max_tokens=100), make_start("b", max_tokens=5))
    await session.until_end_of("b")
    session.call.cancel()


async def session_broken(service: RunningService) -> None:
    session = RawSession(service.generation)
    await session.start(make_start(""), make_start("a", max_tokens=100))
    await session.call.write(SessionRequest())
    with pytest.raises(grpc.aio.AioRpcError, match="action"):
        await session.until_end_of("a")


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    # What is there already is no call of these tests, and need not be looked through.
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def num_calls_kept() -> int:
    """Calls of a server that gRPC has not let go; one for each method waits to be called."""
    return sum(type(each).__name__ == "RPCState" for each in gc.get_objects())


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    "call",
    [
        read_to_its_end,
        answered_whole,
        cancelled,
        refused,
        refused_by_the_engine,
        refused_by_another_service,
        of_no_method,
        refused_at_the_gate,
        too_long,
        session_to_its_end,
        session_cut_off,
        session_broken,
    ],
)
async def test_a_call_that_is_over_keeps_nothing_for_the_collector(call: Call, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(entry_line("operator", "hr_secret", frozenset({Role.CONTROL})))
    closed = Entrance.guarded(AuthRules(Role.CONTROL, tokens), None)
    async with running_service(make_fake_model(), control_entrance=closed) as service:
        await service.check()
        num_before = num_calls_kept()
        assert num_before > 0
        for _ in range(8):
            await call(service)
        await service.engine.wait_idle()
        # Each server's accepting loop has its last call at hand.
        await until(lambda: num_calls_kept() <= num_before + 2)
