"""Reaching a server, and not reaching one."""

from __future__ import annotations

import asyncio
import random
import socket
from typing import Literal

import grpc
import pytest

from headrace.clients import InferenceClient, InvalidArgument, RetryPolicy, Unavailable
from headrace.clients.connection import ConnectionOptions, check_target, open_channel, wait_until_connected
from headrace.clients.retry import Attempts
from tests.support.breakable_link import breakable_link
from tests.support.fake_scripts import says_and_hangs
from tests.support.fake_server import running_fake_server

QUICK = RetryPolicy(max_attempts=3, initial_backoff_s=0.001, max_backoff_s=0.002)


@pytest.mark.parametrize(
    "target",
    [
        *("127.0.0.1:1", "localhost:50051", "my-host.name:5", "[::1]:5", "dns:///host:50", "dns:host:50"),
        *("ipv4:1.2.3.4:5,1.2.3.5:6", "ipv6:[::1]:5", "unix:/path", "unix:///path", "unix-abstract:name"),
    ],
)
def test_a_target_that_says_where_is_taken(target: str) -> None:
    check_target(target)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("127.0.0.1", "write 127.0.0.1:50051"),
        ("localhost", "write localhost:50051"),
        ("host:", "write host:50051"),
        (":50051", "write 127.0.0.1:50051"),
        ("", "write 127.0.0.1:50051"),
        ("::1", r"write \[::1\]:50051"),
        ("[::1]", r"write \[::1\]:50051"),
        ("dns:///host", "write host:50051"),
        ("ipv4:1.2.3.4:5,1.2.3.5", "write 1.2.3.5:50051"),
        ("http://host:50051", "is a URL: write host:50051, host and port"),
        ("grpc://host:50051/", "is a URL: write host:50051, host and port"),
        ("host:0", "from 1 to 65535, got 0"),
        ("host:65536", "from 1 to 65535, got 65536"),
    ],
)
async def test_a_target_without_a_port_is_refused_and_not_taken_for_https(target: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        async with InferenceClient(target):
            pass


@pytest.mark.parametrize(("load_balancing", "num_used"), [("round_robin", 2), ("pick_first", 1)])
async def test_requests_are_spread_over_the_servers_of_a_target_where_that_is_asked_for(
    load_balancing: Literal["round_robin", "pick_first"], num_used: int
) -> None:
    async with running_fake_server() as one, running_fake_server() as other:
        target = f"ipv4:{one.target},{other.target}"
        options = ConnectionOptions(load_balancing=load_balancing)
        async with InferenceClient(target, connection=options) as client:
            # The second connection may stand a moment later than the first.
            for _ in range(8 if load_balancing == "pick_first" else 10_000):
                await client.generate_once("x", max_tokens=1)
                if one.record.starts and other.record.starts:
                    break
    assert sum(bool(server.record.starts) for server in (one, other)) == num_used


async def test_a_connection_is_waited_for() -> None:
    async with running_fake_server() as server:
        channel = open_channel(server.target, None, ConnectionOptions())
        await wait_until_connected(channel, server.target, Attempts(QUICK, random.Random(0)))
        assert channel.get_state() is grpc.ChannelConnectivity.READY
        await channel.close()


async def test_a_server_that_starts_a_little_later_is_found() -> None:
    async with running_fake_server() as server:
        target = server.target
    patient = RetryPolicy(max_attempts=50, initial_backoff_s=0.05, max_backoff_s=0.2)
    async with InferenceClient(target, retry=patient) as client:
        answer = asyncio.create_task(client.generate_once("hello"))
        session = client.session()
        entering = asyncio.create_task(session.__aenter__())
        await asyncio.sleep(0)
        async with running_fake_server(target=target):
            assert (await answer).text == "hello "
            await entering
            assert (await session.generate("again").answer()).text == "again "
            await session.close()


async def test_a_refused_connection_is_given_up_after_all_attempts() -> None:
    channel = open_channel("127.0.0.1:1", None, ConnectionOptions())
    with pytest.raises(Unavailable, match=r"no server answers at 127\.0\.0\.1:1"):
        await wait_until_connected(channel, "127.0.0.1:1", Attempts(QUICK, random.Random(0)))
    await channel.close()


async def test_a_host_that_says_nothing_is_given_up_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = f"127.0.0.1:{listener.getsockname()[1]}"
        async with InferenceClient(target) as client:
            with pytest.raises(Unavailable, match="no server answers"):
                await client.session(timeout_s=0.3).__aenter__()


async def test_a_network_that_passes_nothing_on_is_noticed_once_an_answer_is_overdue() -> None:
    options = ConnectionOptions(keepalive_time_s=0.3, keepalive_timeout_s=0.3)
    async with (
        running_fake_server(default=says_and_hangs) as server,
        breakable_link(server.target) as link,
        InferenceClient(link.address, connection=options) as client,
    ):
        events = aiter(client.generate("hello"))
        await anext(events)
        link.freeze()
        with pytest.raises(Unavailable):
            [event async for event in events]


async def test_a_client_that_was_closed_is_not_waited_for() -> None:
    channel = open_channel("127.0.0.1:1", None, ConnectionOptions())
    await channel.close()
    with pytest.raises((Unavailable, grpc.aio.UsageError)):
        await wait_until_connected(channel, "127.0.0.1:1", Attempts(QUICK, random.Random(0)))


async def test_credentials_make_it_tls_which_a_plain_server_does_not_speak() -> None:
    async with (
        running_fake_server() as server,
        InferenceClient(server.target, credentials=grpc.ssl_channel_credentials(), retry=QUICK) as client,
    ):
        with pytest.raises(Unavailable):
            await client.generate_once("hello")
    assert server.record.starts == []
