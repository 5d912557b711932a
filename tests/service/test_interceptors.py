from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from headrace.engine import InvalidRequest
from headrace.service.health import Health
from headrace.service.interceptors import Context, Guard
from headrace.v1.control_pb2 import GetLoadRequest, GetLoadResponse, WatchStepsRequest, WatchStepsResponse
from headrace.v1.control_pb2_grpc import (
    ControlServiceServicer,
    ControlServiceStub,
    add_ControlServiceServicer_to_server,
)
from tests.support.service import reason_of, running_service, status_of, violated_fields

SECRET = "tell-nobody"


class Handlers(ControlServiceServicer):
    """A servicer whose two kinds of RPC do what a test says."""

    def __init__(
        self,
        load: Callable[[Context], Any] | None = None,
        steps: Callable[[Context], AsyncIterator[WatchStepsResponse]] | None = None,
    ) -> None:
        self._load = load
        self._steps = steps

    async def GetLoad(self, request: GetLoadRequest, context: Context) -> GetLoadResponse:
        assert self._load is not None
        response: GetLoadResponse = await self._load(context)
        return response

    async def WatchSteps(
        self, request: WatchStepsRequest, context: Context
    ) -> AsyncIterator[WatchStepsResponse]:
        assert self._steps is not None
        async for response in self._steps(context):
            yield response

    async def Drain(self, request: Any, context: Context) -> Any:
        raise NotImplementedError

    async def FlushCache(self, request: Any, context: Context) -> Any:
        raise NotImplementedError

    async def SetLatencyBudget(self, request: Any, context: Context) -> Any:
        raise NotImplementedError


@asynccontextmanager
async def guarded(handlers: Handlers, slow_reader_s: float = 60.0) -> AsyncIterator[ControlServiceStub]:
    server = grpc.aio.server(interceptors=[Guard(slow_reader_s)])
    add_ControlServiceServicer_to_server(handlers, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield ControlServiceStub(channel)
    finally:
        await server.stop(None)


async def test_a_fault_is_internal_and_tells_nobody_what_it_quotes(capfd: pytest.CaptureFixture[str]) -> None:
    async def fail(context: Context) -> GetLoadResponse:
        raise ValueError(SECRET)

    with structlog.testing.capture_logs() as logs:
        async with guarded(Handlers(load=fail)) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as fault:
                await stub.GetLoad(GetLoadRequest())
    assert fault.value.code() is grpc.StatusCode.INTERNAL
    assert SECRET not in str(fault.value)
    (told,) = [entry for entry in logs if entry["event"] == "rpc fault"]
    assert told["error"] == "ValueError"
    assert any("test_interceptors.py" in place for place in told["places"])
    assert SECRET not in str(logs) + "".join(capfd.readouterr())


async def test_an_engines_answer_keeps_its_details() -> None:
    async def refuse(context: Context) -> GetLoadResponse:
        raise InvalidRequest.of("field", "must be better")

    async with guarded(Handlers(load=refuse)) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.GetLoad(GetLoadRequest())
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_fields(status_of(refusal.value)) == ["field"]


async def test_a_cancellation_of_our_own_reaches_the_client_as_a_status() -> None:
    async def await_a_cancelled_task(context: Context) -> GetLoadResponse:
        task = asyncio.ensure_future(asyncio.sleep(60))
        task.cancel()
        await task
        return GetLoadResponse()

    async with guarded(Handlers(load=await_a_cancelled_task)) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as fault:
            await stub.GetLoad(GetLoadRequest())
    assert fault.value.code() is grpc.StatusCode.INTERNAL


async def test_the_clients_cancellation_closes_a_stream_at_once_and_harms_no_later_call() -> None:
    closed = asyncio.Event()

    async def wait(context: Context) -> AsyncIterator[WatchStepsResponse]:
        try:
            yield WatchStepsResponse(step=1)
            await asyncio.Event().wait()
        finally:
            closed.set()

    async def answer(context: Context) -> GetLoadResponse:
        return GetLoadResponse(num_running=5)

    async with guarded(Handlers(answer, wait)) as stub:
        call = stub.WatchSteps(WatchStepsRequest())
        await call.read()
        call.cancel()
        await closed.wait()
        assert (await stub.GetLoad(GetLoadRequest())).num_running == 5


async def test_a_handler_that_swallows_its_cancellation_harms_no_later_call() -> None:
    entered, swallowed = asyncio.Event(), asyncio.Event()

    async def swallow(context: Context) -> GetLoadResponse:
        if entered.is_set():
            return GetLoadResponse(num_running=5)
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            swallowed.set()
        return GetLoadResponse()

    async with guarded(Handlers(load=swallow)) as stub:
        call = stub.GetLoad(GetLoadRequest())
        await entered.wait()
        call.cancel()
        await swallowed.wait()
        assert (await stub.GetLoad(GetLoadRequest())).num_running == 5


async def test_a_stream_that_fails_gives_what_it_has_and_then_the_status() -> None:
    async def fail_later(context: Context) -> AsyncIterator[WatchStepsResponse]:
        yield WatchStepsResponse(step=1)
        raise InvalidRequest.of("field", "must be better")

    async with guarded(Handlers(steps=fail_later)) as stub:
        call = stub.WatchSteps(WatchStepsRequest())
        first = await call.read()
        assert isinstance(first, WatchStepsResponse)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call.read()
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_reader_that_never_reads_is_cut_and_what_its_stream_holds_is_given_back() -> None:
    closed = asyncio.Event()
    filler = WatchStepsResponse.FromString(b"\x9a\x06\xc0\x84\x3d" + b"x" * 1_000_000)

    async def pour(context: Context) -> AsyncIterator[WatchStepsResponse]:
        try:
            while True:
                yield filler
        finally:
            closed.set()

    async with guarded(Handlers(steps=pour), slow_reader_s=0.2) as stub:
        call = stub.WatchSteps(WatchStepsRequest())
        await closed.wait()
        with pytest.raises(grpc.aio.AioRpcError) as cut:
            async for _ in call:
                pass
    assert cut.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert reason_of(status_of(cut.value)) == "SLOW_READER"


async def test_a_stream_that_has_nothing_to_tell_waits_for_no_reader() -> None:
    async def rest(context: Context) -> AsyncIterator[WatchStepsResponse]:
        # Longer than any reader may take.
        await asyncio.sleep(0.02)
        for _ in range(0):
            yield WatchStepsResponse()

    async with guarded(Handlers(steps=rest), slow_reader_s=0.0005) as stub:
        call = stub.WatchSteps(WatchStepsRequest())
        assert await call.code() is grpc.StatusCode.OK


async def test_fields_that_we_do_not_know_are_refused_in_every_method() -> None:
    async with guarded(Handlers()) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await stub.GetLoad(GetLoadRequest.FromString(b"\x98\x06\x01"))
        with pytest.raises(grpc.aio.AioRpcError) as streamed:
            await stub.WatchSteps(WatchStepsRequest.FromString(b"\x98\x06\x01")).read()
    assert violated_fields(status_of(unary.value)) == violated_fields(status_of(streamed.value)) == ["#99"]


@pytest.mark.parametrize(
    "method", ["ModelService/GetModel", "GenerationService/Generate", "GenerationService/Session"]
)
async def test_what_can_not_be_decoded_is_the_senders_fault(method: str) -> None:
    async def one() -> AsyncIterator[bytes]:
        yield b"\xff"

    with structlog.testing.capture_logs() as logs:
        async with running_service() as service, grpc.aio.insecure_channel(service.address) as opened:
            path = f"/headrace.v1.{method}"
            # Of raw bytes in both directions, which its annotations don't know.
            channel: Any = opened
            if method.endswith("Session"):
                call = channel.stream_stream(path)(one()).read()
            elif method.endswith("Generate"):
                call = channel.unary_stream(path)(b"\xff").read()
            else:
                call = channel.unary_unary(path)(b"\xff")
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await call
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "not a valid protobuf" in str(refusal.value.details())
    assert [entry for entry in logs if entry["log_level"] in ("warning", "error")] == []


@pytest.mark.parametrize(
    "method",
    [
        "grpc.health.v1.Health/Check",
        "grpc.health.v1.Health/Watch",
        "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
async def test_the_services_of_libraries_blame_the_sender_for_what_can_not_be_decoded(method: str) -> None:
    async def one() -> AsyncIterator[bytes]:
        yield b"\xff"

    async with running_service() as service, grpc.aio.insecure_channel(service.address) as opened:
        channel: Any = opened
        if method.endswith("Info"):
            call = channel.stream_stream(f"/{method}")(one())
        else:
            call = channel.unary_stream(f"/{method}")(b"\xff")
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call.read()
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await service.check() == 1


async def test_other_services_answer_behind_the_guard_alone() -> None:
    server = grpc.aio.server(interceptors=[Guard(60.0)])
    health_pb2_grpc.add_HealthServicer_to_server((await Health.start()).servicer, server)
    reflection.enable_server_reflection(["a.Name"], server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as opened:
            channel: Any = opened
            stub: Any = health_pb2_grpc.HealthStub(opened)
            reflecting: Any = ServerReflectionStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(service="liveness"))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            call = stub.Watch(health_pb2.HealthCheckRequest(service="liveness"))
            assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVING
            call.cancel()

            async def requests() -> AsyncIterator[ServerReflectionRequest]:
                yield ServerReflectionRequest(list_services="")

            (names,) = [told async for told in reflecting.ServerReflectionInfo(requests())]
            assert "a.Name" in [service.name for service in names.list_services_response.service]
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await channel.unary_unary("/grpc.health.v1.Health/Check")(b"\xff")
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    finally:
        await server.stop(None)


async def test_an_unknown_method_is_unimplemented() -> None:
    async with guarded(Handlers()):
        pass
    server = grpc.aio.server(interceptors=[Guard(1.0)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await ControlServiceStub(channel).GetLoad(GetLoadRequest())
    finally:
        await server.stop(None)
    assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED
