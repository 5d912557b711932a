"""The first interceptor of a port: no RPC of any kind comes past it without having shown who calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn
from urllib.parse import unquote

import grpc
from grpc_status import rpc_status

from headrace.service.auth import Admittance, Authenticator
from headrace.service.door import Door
from headrace.service.edge import Edge
from headrace.service.identity import Caller, acting_for
from headrace.service.interceptors import Context, Handler, behaviour_of, handler_like, outcome_of
from headrace.service.status import RpcFailure
from headrace.service.telemetry import RarelyLogged


class Gate(grpc.aio.ServerInterceptor):
    """Denies by default: unknown methods, reflection and health included, as far as `authenticator` says.

    A refused RPC is answered before its messages are decoded.

    Args:
        authenticator: says who calls.
        edge: bounds what one client may have open, and counts who is not let in.
        door: counts who is in, and holds who comes when the server is about to stop.
    """

    def __init__(self, authenticator: Authenticator, edge: Edge, door: Door) -> None:
        self._authenticator = authenticator
        self._edge = edge
        self._door = door
        self._refusals = RarelyLogged("caller refused")

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Let one RPC in, or give it a handler that refuses."""
        if self._door.is_shut:
            return self._held()
        method: str = handler_call_details.method
        metadata = tuple(handler_call_details.invocation_metadata or ())
        admittance: Admittance | None = Admittance(None)
        if not self._authenticator.is_open(method):
            try:
                admittance = self._authenticator.by_metadata(metadata)
            except RpcFailure as failure:
                return self._refusing(failure, method)
        handler = await continuation(handler_call_details)
        if handler is None:
            return None if admittance is not None else self._refusing(_unknown_method(), method)
        traceparent = next((value for key, value in metadata if key == "traceparent"), "")
        return self._entered(handler, method, admittance, traceparent if isinstance(traceparent, str) else "")

    def _entered(
        self, handler: Handler, method: str, admittance: Admittance | None, traceparent: str
    ) -> Handler:
        """The handler, run for its caller."""

        def wrapped(respond: Callable[..., Any]) -> Callable[..., Any]:
            async def entered(request: Any, context: Context) -> Any:
                self._door.enter(_own_task())
                try:
                    known = admittance or self._authenticator.by_certificate(_peer_of(context))
                except RpcFailure as failure:
                    await self._refuse(context, failure, method)
                caller = Caller(known.identity, _host_of(context.peer()), traceparent, known.is_current)
                try:
                    with self._edge.quotas.rpc(caller.account), acting_for(caller):
                        return await outcome_of(respond(request, context), context)
                except RpcFailure as failure:
                    # What else is raised in there has become a status already.
                    await self._refuse(context, failure, method)

            return _let_go(entered)

        return handler_like(handler, wrapped(behaviour_of(handler)), handler.request_deserializer)

    def _held(self) -> Handler:
        async def hold(requests: Any, context: Context) -> None:
            await self._door.hold()

        return grpc.stream_stream_rpc_method_handler(hold)

    def _refusing(self, failure: RpcFailure, method: str) -> Handler:
        """Fits every kind of RPC; the messages stay the bytes that they came as."""

        async def refuse(requests: Any, context: Context) -> None:
            await self._refuse(context, failure, method)

        return grpc.stream_stream_rpc_method_handler(_let_go(refuse))

    async def _refuse(self, context: Context, failure: RpcFailure, method: str) -> NoReturn:
        self._edge.metrics.shut_out(failure.reason)
        self._refusals.log(reason=failure.reason, method=method[:128], peer=_host_of(context.peer()))
        await context.abort_with_status(rpc_status.to_status(failure.to_status()))
        raise AssertionError("abort_with_status always raises")


def _own_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None, "gRPC answers each call in a task of its own"
    return task


def _let_go(respond: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """What `respond` answers; where it aborts the call, nothing of its work outlives the call."""

    async def answered(request: Any, context: Context) -> Any:
        try:
            return await respond(request, context)
        except grpc.aio.AbortError as aborted:
            # gRPC keeps it with the call, and whoever stands in its traceback holds the call: a circle that
            # only the collector would end.
            aborted.__context__ = None
            raise aborted.with_traceback(None) from None
        finally:
            del request, context

    return answered


def _unknown_method() -> RpcFailure:
    return RpcFailure(
        grpc.StatusCode.UNIMPLEMENTED, "UNKNOWN_METHOD", "no such method is served at this port"
    )


def _peer_of(context: Context) -> dict[str, list[bytes]]:
    return {str(key): list(values) for key, values in context.auth_context().items()}


def _host_of(peer: str) -> str:
    """The address in what gRPC calls a peer, such as ipv4:10.0.0.7:41234 or ipv6:%5B::1%5D:41234."""
    kind, _, address = unquote(peer).partition(":")
    return address.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else address
