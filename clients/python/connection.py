"""How a client reaches a server."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import grpc

from headrace.clients.errors import InvalidArgument, Unavailable
from headrace.clients.pem_files import read_pem
from headrace.clients.retry import Attempts

_SCHEMES_WITHOUT_PORT = frozenset({"unix", "unix-abstract", "vsock", "xds"})
_ADDRESS = re.compile(r"(?:dns:)?(?:\[[0-9a-fA-F:.%\w]+\]|[^:\[\]]+):(?P<port>\d{1,6})")


@dataclass(frozen=True, slots=True)
class Tls:
    """An encrypted connection to a server whose certificate is checked.

    Args:
        ca: file of the authorities that the server's certificate may come from, PEM; None: those that gRPC
            brings along.
        cert, key: this client's own certificate and its key, PEM, where the server asks for one.
        server_name: name that the server's certificate must have; None: the host of the target.
    """

    ca: Path | str | None = None
    cert: Path | str | None = None
    key: Path | str | None = None
    server_name: str | None = None


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
        tls: how the connection is encrypted; None is plain text.
        token: says who calls. In plain text it goes to a server on this machine only.
        load_balancing: where a target stands for several servers (a name with several addresses, or
            ``ipv4:HOST:PORT,HOST:PORT``): "pick_first" stays with one of them, "round_robin" sends each RPC
            to the next. A Session is one RPC, so it stays where it is.
    """

    keepalive_time_s: float = 30.0
    keepalive_timeout_s: float = 10.0
    max_message_bytes: int = 16 * 1024 * 1024
    tls: Tls | None = None
    token: str | None = field(default=None, repr=False)
    load_balancing: Literal["pick_first", "round_robin"] = "pick_first"

    def with_access(self, tls: Tls | None, token: str | None) -> ConnectionOptions:
        """The same, with what of the two is given."""
        return replace(self, tls=tls or self.tls, token=token or self.token)


def open_channel(
    target: str, credentials: grpc.ChannelCredentials | None, options: ConnectionOptions
) -> grpc.aio.Channel:
    """Open a channel to `target`, plain text unless `credentials` or `options` say otherwise. The event loop
    must be running.

    Raises:
        InvalidArgument: `target` names no host or no port, or what `options` say of TLS or the token can't
            be used.
    """
    check_target(target)
    arguments: list[tuple[str, int | str]] = [
        ("grpc.keepalive_time_ms", round(options.keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(options.keepalive_timeout_s * 1000)),
        # What really bounds the wait for an answer: a minute by default, whatever the line above says.
        ("grpc.http2.ping_timeout_ms", round(options.keepalive_timeout_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_send_message_length", options.max_message_bytes),
        ("grpc.lb_policy_name", options.load_balancing),
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
    if options.tls is not None and options.tls.server_name is not None:
        arguments.append(("grpc.ssl_target_name_override", options.tls.server_name))
    credentials = _credentials(target, credentials, options)
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=arguments)
    return grpc.aio.secure_channel(target, credentials, options=arguments)


def check_target(target: str) -> None:
    """Check that a target says where to connect: gRPC would take port 443 where none is named.

    Raises:
        InvalidArgument: it names no host or no port.
    """
    scheme, colon, rest = target.partition(":")
    if scheme in {"http", "https", "grpc", "grpcs"} and rest.startswith("//"):
        raise InvalidArgument(
            f"target {target!r} is a URL: write {rest.strip('/').partition('/')[0]}, host and port alone"
        )
    if colon and scheme in _SCHEMES_WITHOUT_PORT:
        return
    addresses = rest.split(",") if colon and scheme in {"ipv4", "ipv6"} else [target.rpartition("/")[2]]
    for address in addresses:
        found = _ADDRESS.fullmatch(address)
        if found is None:
            host = address.removeprefix("dns:").rstrip(":")
            if re.fullmatch(r"(:\d+)?", host):
                host = "127.0.0.1"
            elif ":" in host and not host.startswith("["):
                host = f"[{host}]"
            raise InvalidArgument(f"target {target!r} is no host with a port: write {host}:50051 or the like")
        if not 1 <= int(found["port"]) <= 65535:
            raise InvalidArgument(f"target {target!r}: a port is from 1 to 65535, got {found['port']}")


def _credentials(
    target: str, given: grpc.ChannelCredentials | None, options: ConnectionOptions
) -> grpc.ChannelCredentials | None:
    if given is not None and options.tls is not None:
        raise InvalidArgument("credentials and tls are both given: they say the same thing, leave one out")
    channel = _tls_credentials(options.tls) if options.tls is not None else given
    if options.token is None:
        return channel
    if not options.token.isascii() or not options.token.isprintable() or " " in options.token:
        raise InvalidArgument("the token must be printable ASCII characters without spaces")
    if channel is None:
        if not _is_local(target):
            raise InvalidArgument(
                "a token in plain text could be read by others on its way: use TLS (tls=Tls(…), --tls)"
            )
        # Plain text; gRPC itself sees to it that it stays on this machine.
        channel = grpc.local_channel_credentials()
    return grpc.composite_channel_credentials(channel, grpc.access_token_call_credentials(options.token))


def _tls_credentials(tls: Tls) -> grpc.ChannelCredentials:
    if (tls.cert is None) != (tls.key is None):
        raise InvalidArgument("a client's certificate and its key belong together: give both, or neither")
    return grpc.ssl_channel_credentials(
        None if tls.ca is None else read_pem(tls.ca, "certificate", "--tls-ca (Tls.ca)"),
        None if tls.key is None else read_pem(tls.key, "private key", "--tls-key (Tls.key)"),
        None if tls.cert is None else read_pem(tls.cert, "certificate", "--tls-cert (Tls.cert)"),
    )


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
