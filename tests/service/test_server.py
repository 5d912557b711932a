from __future__ import annotations

import socket

import grpc
import pytest
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from headrace.service.limits import Limits
from headrace.service.server import BindError, Endpoint, bind
from headrace.v1.generation_pb2 import StartGeneration
from headrace.v1.model_pb2 import TokenizeRequest
from tests.support.fake_runner import expected_output, make_fake_model
from tests.support.service import PROMPT, generate, generate_ids, make_start, running_service


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


async def test_a_message_over_the_limit_fails_alone_and_names_the_limit() -> None:
    async with running_service(limits=Limits(max_message_bytes=10_000)) as service:
        tokenized = await service.model.Tokenize(TokenizeRequest(text="x" * 1000))
        assert len(tokenized.token_ids) == 1001
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await service.model.Tokenize(TokenizeRequest(text="x" * 11_000))
        assert await generate_ids(service, make_start()) == expected_output(PROMPT, 8)
    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "10000" in (refusal.value.details() or "")


async def test_a_message_just_under_the_default_limit_of_grpc_and_over_it_passes() -> None:
    model = make_fake_model(max_model_len=4096)
    async with running_service(model, limits=Limits(max_text_bytes=8 * 2**20)) as service:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await generate(service, StartGeneration(text="x" * (5 * 2**20)))
    # It came through to the engine, which has no room for it.
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
