"""The operator's view of gRPC's connections."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from headrace.service.auth import AuthRules
from headrace.service.identity import Role
from headrace.service.server import Entrance
from headrace.service.token_drawing import entry_line
from tests.support.connections import SERVERS, channelz_stub, connections
from tests.support.service import generate, make_start, running_service


async def test_the_operator_sees_the_calls_and_the_peers_of_the_callers_port() -> None:
    async with (
        running_service(has_channelz=True) as service,
        grpc.aio.insecure_channel(service.control_address) as channel,
    ):
        for _ in range(3):
            await generate(service, make_start())
        ((server, socket),) = await connections(channel, service.address)
        assert server.data.calls_started == 3
        assert socket.data.streams_started == 3
        assert socket.remote.tcpip_address.ip_address == bytes((127, 0, 0, 1))


async def test_what_is_not_there_is_not_found() -> None:
    async with (
        running_service(has_channelz=True) as service,
        grpc.aio.insecure_channel(service.control_address) as channel,
    ):
        channelz = channelz_stub(channel)
        for call in (
            channelz.GetServer(channelz_pb2.GetServerRequest(server_id=-1)),
            channelz.GetSocket(channelz_pb2.GetSocketRequest(socket_id=2**40)),
            channelz.GetChannel(channelz_pb2.GetChannelRequest(channel_id=2**40)),
            channelz.GetServerSockets(channelz_pb2.GetServerSocketsRequest(server_id=2**40, max_results=-1)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as missing:
                await call
            assert missing.value.code() is grpc.StatusCode.NOT_FOUND


async def test_it_is_offered_only_where_it_was_asked_for_and_never_to_callers() -> None:
    async def answers(address: str) -> bool:
        async with grpc.aio.insecure_channel(address) as channel:
            listing = ServerReflectionStub(channel).ServerReflectionInfo()  # type: ignore[operator, arg-type]
            await listing.write(ServerReflectionRequest(list_services=""))
            names = {entry.name for entry in (await listing.read()).list_services_response.service}
            await listing.done_writing()
            code = await channelz_stub(channel).GetServers(SERVERS).code()
            is_named = "grpc.channelz.v1.Channelz" in names
            assert code is (grpc.StatusCode.OK if is_named else grpc.StatusCode.UNIMPLEMENTED)
            return is_named

    async with running_service(has_channelz=True) as service:
        assert await answers(service.control_address)
        assert not await answers(service.address)
    async with running_service() as service:
        assert not await answers(service.control_address)


async def test_it_needs_the_rights_of_an_operator(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    alice = entry_line("alice", "hr_alices", frozenset({Role.GENERATE}))
    operator = entry_line("operator", "hr_operators", frozenset({Role.CONTROL}))
    tokens.write_text(f"{alice}\n{operator}\n")
    entrance = Entrance.guarded(AuthRules(Role.CONTROL, tokens), None)
    async with (
        running_service(has_channelz=True, control_entrance=entrance) as service,
        grpc.aio.insecure_channel(service.control_address) as channel,
    ):

        async def code_of(*metadata: tuple[str, str]) -> grpc.StatusCode:
            call = channelz_stub(channel).GetServers(SERVERS, metadata=metadata)
            return await call.code()

        assert await code_of() is grpc.StatusCode.UNAUTHENTICATED
        assert await code_of(("authorization", "Bearer hr_alices")) is grpc.StatusCode.PERMISSION_DENIED
        assert await code_of(("authorization", "Bearer hr_operators")) is grpc.StatusCode.OK
