"""A server's connections, as channelz tells of them."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_channelz.v1 import channelz_pb2
from grpc_channelz.v1.channelz_pb2_grpc import ChannelzStub

SERVERS = channelz_pb2.GetServersRequest()


def channelz_stub(channel: grpc.aio.Channel) -> Any:
    """Its annotations know channels of the other kind alone."""
    return ChannelzStub(channel)  # type: ignore[arg-type]


async def connections(
    channel: grpc.aio.Channel, address: str
) -> list[tuple[channelz_pb2.Server, channelz_pb2.Socket]]:
    """The open connections of the server that listens on `address`; `channel` leads to its process."""
    channelz, port = channelz_stub(channel), int(address.rpartition(":")[2])
    found = []
    for server in (await channelz.GetServers(SERVERS)).server:
        its = channelz_pb2.GetServerSocketsRequest(server_id=server.ref.server_id)
        for ref in (await channelz.GetServerSockets(its)).socket_ref:
            ask = channelz.GetSocket(channelz_pb2.GetSocketRequest(socket_id=ref.socket_id))
            if await ask.code() is grpc.StatusCode.NOT_FOUND:
                continue  # closed meanwhile
            told = await ask
            if told.socket.local.tcpip_address.port == port:
                found.append((server, told.socket))
    return found
