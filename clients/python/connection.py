"""How a client reaches a server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc

from headrace.clients.errors import Unavailable
from headrace.clients.retry import Attempts


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Settings of the connection; the defaults suit a generation service.

    Args:
        keepalive_time_s: after this long without anything received, ask the server for a sign of life. A
            request may wait silently in a queue for minutes, so pings go on without data. Headrace's server
            allows one every 10 s; a proxy in between may want them rarer ("too many pings").
        keepalive_timeout_s: no answer for this long: the connection is dead, its calls fail with
            `Unavailable`.
        max_message_bytes: longest message in either direction; Headrace's server has the same limit.
    """

    keepalive_time_s: float = 30.0
    keepalive_timeout_s: float = 10.0
    max_message_bytes: int = 16 * 1024 * 1024


def open_channel(
    target: str, credentials: grpc.ChannelCredentials | None, options: ConnectionOptions
) -> grpc.aio.Channel:
    """Open a channel to `target`, plain text without credentials. The event loop must be running."""
    arguments: list[tuple[str, int]] = [
        ("grpc.keepalive_time_ms", round(options.keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(options.keepalive_timeout_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_send_message_length", options.max_message_bytes),
        # Retries are ours alone: a service config from DNS must not bring others that replay a request.
        ("grpc.service_config_disable_resolution", 1),
        # A server that is just starting is found as soon as our own retries ask for it.
        ("grpc.initial_reconnect_backoff_ms", 100),
        # How long one attempt to connect may take, despite its name.
        ("grpc.min_reconnect_backoff_ms", 5000),
        ("grpc.max_reconnect_backoff_ms", 5000),
    ]
    if _is_local(target):
        arguments.append(("grpc.enable_http_proxy", 0))
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=arguments)
    return grpc.aio.secure_channel(target, credentials, options=arguments)


def _is_local(target: str) -> bool:
    return target.startswith(("127.", "localhost", "[::1]", "ipv4:127.", "ipv6:[::1]", "unix:"))


async def wait_until_connected(channel: grpc.aio.Channel, target: str, attempts: Attempts) -> None:
    """Wait until the channel has a connection; a refused one is tried again as often as `attempts` allows.

    Raises:
        Unavailable: nobody answers at `target`.
    """
    state = channel.get_state(try_to_connect=True)
    while state is not grpc.ChannelConnectivity.READY:
        if state is grpc.ChannelConnectivity.SHUTDOWN:
            raise Unavailable("the client is closed")
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            await asyncio.sleep(attempts.next_delay_s(Unavailable(f"no server answers at {target}")))
        else:
            try:
                async with asyncio.timeout(attempts.remaining_s):
                    await channel.wait_for_state_change(state)
            except TimeoutError:
                raise Unavailable(f"no server answers at {target}") from None
        state = channel.get_state(try_to_connect=True)
