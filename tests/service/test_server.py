from __future__ import annotations

import asyncio
import socket
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from headrace.clients.connection import ConnectionOptions
from headrace.service.edge import Edge
from headrace.service.health import Health
from headrace.service.limits import Limits
from headrace.service.server import BindError, Endpoint, bind, make_health_server
from headrace.v1.generation_pb2 import GenerateRequest, GenerateResponse, StartGeneration
from headrace.v1.model_pb2 import DetokenizeRequest, GetModelRequest, TokenizeRequest
from headrace.v1.model_pb2_grpc import ModelServiceStub
from tests.support import http2
from tests.support.connections import connections
from tests.support.fake_runner import EOS, expected_output, make_fake_model
from tests.support.service import (
    PROMPT,
    generate,
    generate_ids,
    ids_of,
    make_start,
    rest_of,
    running_service,
)
from tests.support.step_gate import StepGate


async def test_a_port_in_use_is_said_with_the_flag_that_changes_it() -> None:
    server = grpc.aio.server()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BindError, match=rf"127\.0\.0\.1:{port} is in use.*--port \(0 picks"):
            bind(server, Endpoint("127.0.0.1", port), "--port")


async def test_two_servers_never_share_a_port() -> None:
    async with running_service() as service:
        host, port = service.address.split(":")
        with pytest.raises(BindError, match="in use"):
            bind(grpc.aio.server(), Endpoint(host, int(port)), "--port")


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
async def test_an_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(BindError, match="is no address of this machine"):
        bind(grpc.aio.server(), Endpoint(host, 0), "--port")


async def test_port_zero_gives_the_port_that_was_chosen() -> None:
    assert bind(grpc.aio.server(), Endpoint("127.0.0.1", 0), "--port") > 0


@pytest.mark.parametrize(
    ("host", "address"), [("127.0.0.1", "127.0.0.1:5"), ("::1", "[::1]:5"), ("localhost", "localhost:5")]
)
def test_addresses_are_written_as_grpc_wants_them(host: str, address: str) -> None:
    assert Endpoint(host, 5).address == address


async def test_reflection_names_the_services() -> None:
    async with running_service() as service, grpc.aio.insecure_channel(service.address) as channel:
        call = ServerReflectionStub(channel).ServerReflectionInfo()  # type: ignore[operator, arg-type]
        await call.write(ServerReflectionRequest(list_services=""))
        names = [entry.name for entry in (await call.read()).list_services_response.service]
        await call.done_writing()
    assert {"headrace.v1.GenerationService", "headrace.v1.ModelService", "grpc.health.v1.Health"} <= set(
        names
    )


async def test_a_connection_past_its_age_is_replaced_and_its_streams_go_on() -> None:
    gate = StepGate()
    model = make_fake_model(before_step=gate)
    async with (
        running_service(model, has_channelz=True, max_connection_age_s=0.05) as service,
        grpc.aio.insecure_channel(service.control_address) as channel,
    ):
        call = service.generation.Generate(GenerateRequest(start=make_start(max_tokens=8)))
        assert isinstance(await call.read(), GenerateResponse)
        # The old one stays for its stream, while other calls make new ones.
        while len(await connections(channel, service.address)) < 2:
            await service.model.GetModel(GetModelRequest())
        gate.open()
        events = [response.event async for response in rest_of(call)]
    assert ids_of(events) == expected_output(PROMPT, 8)


async def test_the_health_port_tells_health_and_nothing_else() -> None:
    health = await Health.start()
    server = make_health_server(health, Limits(), Edge())
    port = bind(server, Endpoint("127.0.0.1", 0), "--health-port")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            told = [
                await stub.Check(health_pb2.HealthCheckRequest(service=name)) for name in ("", "liveness")
            ]
            await health.ready()
            told.append(await stub.Check(health_pb2.HealthCheckRequest()))
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await ModelServiceStub(channel).GetModel(GetModelRequest())
    finally:
        await server.stop(None)
    status = health_pb2.HealthCheckResponse
    assert [one.status for one in told] == [status.NOT_SERVING, status.SERVING, status.SERVING]
    assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_message_over_the_limit_fails_alone_and_names_the_limit() -> None:
    async with running_service(limits=Limits(max_message_bytes=10_000)) as service:
        tokenized = await service.model.Tokenize(TokenizeRequest(text="x" * 1000))
        assert len(tokenized.token_ids) == 1001
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await service.model.Tokenize(TokenizeRequest(text="x" * 11_000))
        assert await generate_ids(service, make_start()) == expected_output(PROMPT, 8)
    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "10000" in (refusal.value.details() or "")


@pytest.mark.parametrize("by", [0, 1])
async def test_the_limit_of_a_message_is_the_same_to_the_byte_either_way(by: int) -> None:
    limit = 1000
    async with running_service(limits=Limits(max_message_bytes=limit)) as service:

        async def asking() -> None:
            # Special tokens have two bytes each, and no text: the request is longer than its answer.
            request = DetokenizeRequest(token_ids=[EOS] * 498 + [65] * (1 + by))
            assert request.ByteSize() == limit + by
            assert (await service.model.Detokenize(request)).text == "A"

        async def telling() -> None:
            # An id for each letter, and one more: the answer is longer than its request.
            answer = await service.model.Tokenize(TokenizeRequest(text="x" * (995 + by)))
            assert answer.ByteSize() == limit

        for call, said in ((asking, "Received message larger"), (telling, "the answer is 1001 bytes")):
            if not by:
                await call()
                continue
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await call()
            assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert said in (refusal.value.details() or "")
            assert f"{limit}" in (refusal.value.details() or "")
        assert await generate_ids(service, make_start()) == expected_output(PROMPT, 8)


async def test_a_message_just_under_the_default_limit_of_grpc_and_over_it_passes() -> None:
    model = make_fake_model(max_model_len=4096)
    async with running_service(model, limits=Limits(max_text_bytes=8 * 2**20)) as service:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await generate(service, StartGeneration(text="x" * (5 * 2**20)))
    # It came through to the engine, which has no room for it.
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_silent_connection_may_ask_for_signs_of_life_as_often_as_is_said() -> None:
    # gRPC by itself hangs up on who asks more often than every two hours, or five minutes with a call.
    assert Limits().min_ping_interval_s <= 10 < ConnectionOptions().keepalive_time_s
    async with running_service(limits=Limits(min_ping_interval_s=0.01)) as service:
        host, _, port = service.address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(http2.opening())
        for number in range(8):
            await asyncio.sleep(0.05)
            writer.write(http2.ping(number))
            assert await kind_of_answer(reader) == http2.PING
        writer.close()


async def kind_of_answer(reader: asyncio.StreamReader) -> int:
    """The kind of the next frame that is an acknowledged ping or the end of the connection."""
    while True:
        head = await reader.readexactly(9)
        await reader.readexactly(int.from_bytes(head[:3], "big"))
        if head[3] == http2.GOAWAY or (head[3] == http2.PING and head[4] & http2.ACK):
            return head[3]
