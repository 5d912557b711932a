"""The gRPC servers: one for callers, one for the operator, with the options that make them dependable."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable
from dataclasses import dataclass

import grpc
from google.protobuf.descriptor import FileDescriptor
from grpc_channelz.v1 import channelz, channelz_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headrace.service.auth import Authenticator, AuthRules
from headrace.service.control import ControlServicer, Drainer
from headrace.service.door import Door
from headrace.service.edge import Edge
from headrace.service.gate import Gate
from headrace.service.generation import GenerationServicer
from headrace.service.health import Health
from headrace.service.identity import Role
from headrace.service.interceptors import Guard
from headrace.service.limits import Limits
from headrace.service.model import ModelServicer
from headrace.service.serving import Serving
from headrace.service.tls import TlsFiles, server_credentials
from headrace.v1 import (
    control_pb2,
    control_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
)

_CHANNELZ_NAMES = tuple(service.full_name for service in channelz_pb2.DESCRIPTOR.services_by_name.values())
_MAX_PENDING_CONNECTIONS = 4
"""As many connections may have all their calls wait to be taken up before the calls of others suffer."""


class BindError(Exception):
    """An address can't be listened on; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens. Port 0 lets the system pick one."""

    host: str
    port: int

    @property
    def address(self) -> str:
        """As gRPC writes it; an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Entrance:
    """How a port is entered. As it stands: in plain text, by everybody.

    Args:
        authenticator: says who calls; None lets everybody in.
        credentials: for TLS; None is plain text.
        has_access_log: whether a line is logged for each RPC.
    """

    authenticator: Authenticator | None = None
    credentials: grpc.ServerCredentials | None = None
    has_access_log: bool = False

    @classmethod
    def guarded(cls, rules: AuthRules, tls: TlsFiles | None, *, has_access_log: bool = False) -> Entrance:
        """An entrance that keeps `rules`.

        Raises:
            UnusableFile: a certificate, key or token file can't be taken.
        """
        credentials = None if tls is None else server_credentials(tls)
        return cls(Authenticator(rules), credentials, has_access_log)


OPEN = Entrance()


def make_public_server(
    serving: Serving,
    health: Health,
    limits: Limits,
    *,
    has_reflection: bool,
    has_channelz: bool = False,
    max_connection_age_s: float | None = None,
    entrance: Entrance = OPEN,
    door: Door | None = None,
) -> grpc.aio.Server:
    """The server for callers: generation, model, health.

    Args:
        has_channelz: whether its connections are counted, for the operator.
        max_connection_age_s: after which a connection's client is told to make a new one, seconds; what runs
            on the old one goes on. None for never.
        door: closes it; None where nobody comes as it stops.
    """
    server = _make_server(
        limits, entrance, serving.edge, door, max_connection_age_s, has_channelz=has_channelz
    )
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(serving, limits), server)
    model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(serving), server)
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    if has_reflection:
        _reflect(server, generation_pb2.DESCRIPTOR, model_pb2.DESCRIPTOR)
    return server


def make_control_server(
    serving: Serving,
    health: Health,
    drainer: Drainer,
    limits: Limits,
    *,
    has_reflection: bool,
    has_channelz: bool = False,
    entrance: Entrance = OPEN,
    door: Door | None = None,
) -> grpc.aio.Server:
    """The server for the operator: control, health.

    Args:
        has_channelz: whether it tells of the connections of all servers of the process.
        door: closes it; None where nobody comes as it stops.
    """
    server = _make_server(limits, entrance, serving.edge, door, has_channelz=has_channelz)
    control_pb2_grpc.add_ControlServiceServicer_to_server(ControlServicer(serving, drainer), server)
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    if has_channelz:
        channelz.add_channelz_servicer(server)
    if has_reflection:
        _reflect(server, control_pb2.DESCRIPTOR, others=_CHANNELZ_NAMES if has_channelz else ())
    return server


def make_health_server(
    health: Health, limits: Limits, edge: Edge, *, door: Door | None = None
) -> grpc.aio.Server:
    """The server for probes that speak no TLS and have no credentials: it tells health and nothing else."""
    server = _make_server(limits, OPEN, edge, door, has_channelz=False)
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    return server


def bind(
    server: grpc.aio.Server,
    endpoint: Endpoint,
    port_flag: str,
    credentials: grpc.ServerCredentials | None = None,
) -> int:
    """Make `server` listen.

    Args:
        port_flag: how the operator names the port, for the message.
        credentials: for TLS; None is plain text.

    Returns:
        The port, chosen by the system if `endpoint` leaves it open.

    Raises:
        BindError: it can't.
    """
    # Asked of the system first: gRPC tells no reason, and writes its own lines to stderr.
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except socket.gaierror as error:
        raise BindError(f"{endpoint.host!r} is no address of this machine: {error.strerror}") from error
    except OSError as error:
        raise BindError(_why_not(error, endpoint, port_flag)) from error
    try:
        if credentials is not None:
            return server.add_secure_port(endpoint.address, credentials)
        return server.add_insecure_port(endpoint.address)
    except RuntimeError as error:
        raise BindError(f"gRPC can't listen on {endpoint.address}: {error}") from error


def _why_not(error: OSError, endpoint: Endpoint, port_flag: str) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return (
                f"{endpoint.address} is in use: stop whatever listens there, "
                f"or choose another port with {port_flag} (0 picks a free one)"
            )
        case errno.EACCES:
            return f"{endpoint.address} is not for this user: choose a port above 1023 with {port_flag}"
        case errno.EADDRNOTAVAIL:
            return f"{endpoint.host!r} is no address of this machine"
        case _:
            return f"can't listen on {endpoint.address}: {error.strerror}"


def _make_server(
    limits: Limits,
    entrance: Entrance,
    edge: Edge,
    door: Door | None,
    max_connection_age_s: float | None = None,
    *,
    has_channelz: bool,
) -> grpc.aio.Server:
    # Past its age a connection takes no new RPC; for those that run gRPC waits without end.
    ages = [] if max_connection_age_s is None else [int(1e3 * max_connection_age_s)]
    authenticator = entrance.authenticator or Authenticator(AuthRules(Role.GENERATE))
    max_pending_calls = _MAX_PENDING_CONNECTIONS * limits.max_concurrent_streams
    return grpc.aio.server(
        interceptors=[
            Gate(authenticator, edge, door or Door()),
            Guard(limits.slow_reader_s, edge.metrics, has_access_log=entrance.has_access_log),
        ],
        options=[
            *(("grpc.max_connection_age_ms", age_ms) for age_ms in ages),
            # gRPC counts for it unless told not to, asked for or not.
            ("grpc.enable_channelz", int(has_channelz)),
            # Two servers on one port would share its connections at random.
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", limits.max_message_bytes),
            ("grpc.max_send_message_length", limits.max_message_bytes),
            # gRPC bounds a message as it comes and unpacks it without a bound: 16 MiB may be 16 GiB.
            ("grpc.compression_enabled_algorithms_bitset", 1),
            ("grpc.per_message_decompression", 0),
            # Of one connection: more streams wait at the client.
            ("grpc.max_concurrent_streams", limits.max_concurrent_streams),
            # Of all connections, not yet taken up by Python, 15 kB each: gRPC ends one more with CANCELLED,
            # whoever made it. Its own bound, 1,000 to 3,000, is less than what one connection may have open.
            ("grpc.server.max_pending_requests", max_pending_calls),
            ("grpc.server.max_pending_requests_hard_limit", max_pending_calls),
            ("grpc.max_metadata_size", limits.max_metadata_bytes),
            ("grpc.absolute_max_metadata_size", limits.max_metadata_bytes),
            # Whoever connects and then says nothing, or too little, is hung up on.
            ("grpc.server_handshake_timeout_ms", 10_000),
            # A peer that vanished without a word is noticed within the two together.
            ("grpc.keepalive_time_ms", round(1e3 * limits.keepalive_s)),
            ("grpc.keepalive_timeout_ms", round(1e3 * limits.keepalive_timeout_s)),
            # What really bounds the wait for an answer: a minute by default, whatever the line above says.
            ("grpc.http2.ping_timeout_ms", round(1e3 * limits.keepalive_timeout_s)),
            # Clients may ping every 10 s, calls or none; else a long silent call dies of "too many pings".
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", round(1e3 * limits.min_ping_interval_s)),
            ("grpc.http2.max_pings_without_data", 0),
        ],
    )


def _reflect(server: grpc.aio.Server, *files: FileDescriptor, others: Iterable[str] = ()) -> None:
    names = [service.full_name for file in files for service in file.services_by_name.values()]
    names += [health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME, *others]
    reflection.enable_server_reflection(names, server)
