"""The operator's client: load, steps as they happen, latencies, drain."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self, TypeAlias

import grpc
from google.protobuf.duration_pb2 import Duration

from headrace.clients.connection import ConnectionOptions, Tls, open_channel
from headrace.clients.convert import load_from_proto, step_from_proto
from headrace.clients.errors import error_from_rpc
from headrace.clients.events import Load, StepReport
from headrace.clients.latency import LatencyStatus, budget_to_proto, latency_from_proto
from headrace.clients.retry import Attempts, RetryPolicy, call_with_retries
from headrace.clients.targets import DEFAULT_CONTROL_TARGET
from headrace.v1 import control_pb2
from headrace.v1.control_pb2_grpc import ControlServiceStub

WatchCall: TypeAlias = (
    "grpc.aio.UnaryStreamCall[control_pb2.WatchStepsRequest, control_pb2.WatchStepsResponse]"
)


class ControlClient:
    """A client of a server's control port, for one event loop. Every error that it raises is a
    `HeadraceError`.

    Args:
        target: where the control port listens, "host:port" or "unix:/path".
        credentials: gRPC's own, instead of `tls`; with neither it is plain text.
        tls: how the connection is encrypted.
        token: says who calls; in plain text it goes to a server on this machine only.
        retry: when `load` is asked again; nothing else is.
        connection: keepalive and limits.
    """

    def __init__(
        self,
        target: str = DEFAULT_CONTROL_TARGET,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        tls: Tls | None = None,
        token: str | None = None,
        retry: RetryPolicy | None = None,
        connection: ConnectionOptions | None = None,
    ) -> None:
        self.target = target
        self._credentials = credentials
        self._retry = retry or RetryPolicy()
        self._connection = (connection or ConnectionOptions()).with_access(tls, token)
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        if self._channel is not None:
            raise RuntimeError("the client is open already")
        self._channel = open_channel(self.target, self._credentials, self._connection)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def load(self, *, timeout_s: float | None = None) -> Load:
        """The load now, and sums over all steps since the start."""
        stub = self._stub()
        response = await call_with_retries(
            lambda remaining_s: stub.GetLoad(control_pb2.GetLoadRequest(), timeout=remaining_s),
            Attempts(self._retry, random.Random(), timeout_s),
        )
        return load_from_proto(response)

    async def watch_steps(self) -> AsyncIterator[StepReport]:
        """What each step did, as it happens, until the loop is left or the server ends."""
        async with self.step_watch() as steps:
            async for report in steps:
                yield report

    @asynccontextmanager
    async def step_watch(self) -> AsyncIterator[AsyncIterator[StepReport]]:
        """`watch_steps` in a block that begins when the server watches: no step that ends within it is left
        out, unless its `num_missed` says so.
        """
        call = self._stub().WatchSteps(control_pb2.WatchStepsRequest())
        try:
            initial = await call.initial_metadata()
            if call.done() and await call.code() is not grpc.StatusCode.OK:
                # That nobody is there is told by the call's end alone.
                trailing, details = await call.trailing_metadata(), await call.details()
                raise grpc.aio.AioRpcError(await call.code(), initial, trailing, details)
            yield _reports(call)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        finally:
            call.cancel()

    async def drain(self, grace_s: float | None = None) -> int:
        """Stop taking new requests and wait for the running ones.

        Args:
            grace_s: longest wait, seconds; None: the server's own.

        Returns:
            Requests that were still running when the grace ended.
        """
        request = control_pb2.DrainRequest()
        if grace_s is not None:
            grace = Duration()
            grace.FromNanoseconds(round(grace_s * 1e9))
            request.grace.CopyFrom(grace)
        stub = self._stub()
        response = await call_with_retries(
            lambda remaining_s: stub.Drain(request, timeout=remaining_s),
            Attempts(RetryPolicy(max_attempts=1), random.Random()),
        )
        return response.num_unfinished

    async def set_latency_budget(
        self,
        *,
        tpot_s: float | None = None,
        ttft_s: float | None = None,
        priority: int | None = None,
    ) -> LatencyStatus:
        """Have the server promise other latencies from its next step on.

        Args:
            tpot_s: time per output token, (last token - first token) / (tokens - 1); None: no target.
            ttft_s: time from a request's arrival to its first token; None: no target.
            priority: for requests of this priority alone; None: for all, and those that had targets of their
                own lose them.

        Returns:
            What it promises now.

        Raises:
            InvalidArgument: a target can't be promised; it names the field.
        """
        request = budget_to_proto(tpot_s, ttft_s, priority)
        stub = self._stub()
        response = await call_with_retries(
            lambda remaining_s: stub.SetLatencyBudget(request, timeout=remaining_s),
            Attempts(RetryPolicy(max_attempts=1), random.Random()),
        )
        return latency_from_proto(response.latency)

    async def flush_cache(self) -> int:
        """Forget all cached KV that no live request uses.

        Returns:
            Blocks that were given back.
        """
        stub = self._stub()
        response = await call_with_retries(
            lambda remaining_s: stub.FlushCache(control_pb2.FlushCacheRequest(), timeout=remaining_s),
            Attempts(RetryPolicy(max_attempts=1), random.Random()),
        )
        return response.num_blocks_flushed

    def _stub(self) -> ControlServiceStub:
        if self._channel is None:
            raise RuntimeError("the client is not open: use `async with ControlClient(...) as control`")
        return ControlServiceStub(self._channel)


async def _reports(call: WatchCall) -> AsyncIterator[StepReport]:
    try:
        async for response in call:
            yield step_from_proto(response)
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None
