"""Around every `headrace.v1` handler: errors become statuses, slow readers are cut, outcomes are logged."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from typing import Any, Self, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_status import rpc_status

from headrace.service.identity import current_caller
from headrace.service.metrics import Metrics
from headrace.service.status import RpcFailure, failure_from, invalid, slow_reader, undecodable
from headrace.service.telemetry import log, places_of
from headrace.service.unsupported import unknown_fields

T = TypeVar("T")

_OURS = "/headrace.v1."
_EARLY_S = 1e-3
"""A loop may call that much before it was asked to."""

# Generic in the messages of each method, for the type checker only; this file serves all methods alike.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


def behaviour_of(handler: Handler) -> Callable[..., Any]:
    """What answers a handler's calls."""
    behaviour = handler.unary_unary or handler.unary_stream or handler.stream_stream
    if behaviour is None:
        raise AssertionError("no method of ours takes a stream and gives one message")
    return behaviour


async def outcome_of(response: Any, context: Context) -> Any:
    """What a handler of either kind answers: a message to await, or messages to write."""
    if not inspect.isasyncgen(response):
        return await response
    async with aclosing(response) as messages:
        async for message in messages:
            await context.write(message)
    return None


def handler_like(
    handler: Handler, respond: Callable[..., Any], request_deserializer: Callable[[bytes], Any] | None
) -> Handler:
    """A handler of the same kind, answered by another function."""
    coders: dict[str, Any] = {
        "request_deserializer": request_deserializer,
        "response_serializer": handler.response_serializer,
    }
    if handler.unary_unary:
        return grpc.unary_unary_rpc_method_handler(respond, **coders)
    if handler.unary_stream:
        return grpc.unary_stream_rpc_method_handler(respond, **coders)
    return grpc.stream_stream_rpc_method_handler(respond, **coders)


class Guard(grpc.aio.ServerInterceptor):
    """Wraps each handler of `headrace.v1` so that

    - an exception becomes a status in one place, with nothing in it that isn't meant for the caller;
    - a cancellation by the caller goes on to gRPC, one of our own becomes INTERNAL (the caller would hang);
    - a stream's generator is closed before the RPC ends, so what it holds is given back at once;
    - a message that can't be decoded is INVALID_ARGUMENT, in every other service, too;
    - a message that its reader doesn't fetch in time ends the RPC with RESOURCE_EXHAUSTED.

    Args:
        slow_reader_s: longest time that one message may wait for its reader, seconds.
        metrics: count how RPCs end.
        has_access_log: whether a line is logged for each RPC; without it at level debug only.
    """

    def __init__(
        self, slow_reader_s: float, metrics: Metrics | None = None, *, has_access_log: bool = False
    ) -> None:
        self._slow_reader_s = slow_reader_s
        self._metrics = metrics or Metrics()
        self._has_access_log = has_access_log

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wrap the handler of one RPC."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        # Unknown methods have no handler; other services mind themselves, once their messages are decoded.
        if handler is None:
            return None
        respond = behaviour_of(handler)
        if not method.startswith(_OURS):
            guarded = self._foreign(respond, is_unary=not handler.request_streaming)
        elif handler.unary_unary:
            guarded = self._unary(method, respond)
        else:
            guarded = self._stream(method, respond, is_unary=not handler.request_streaming)
        return handler_like(handler, guarded, _tolerant(handler.request_deserializer))

    def _unary(self, method: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        async def guarded(request: Message | None, context: Context) -> Message:
            async def work() -> Message:
                _refuse_unknown_fields(_decoded(request))
                response: Message = await answer(_decoded(request), context)
                return response

            return await self._answered(method, context, work())

        return guarded

    def _stream(self, method: str, respond: Callable[..., Any], *, is_unary: bool) -> Callable[..., Any]:
        async def guarded(request: Any, context: Context) -> None:
            async def work() -> None:
                if is_unary:
                    _refuse_unknown_fields(_decoded(request))
                async with AsyncExitStack() as stack:
                    requests = request if is_unary else await _all_decoded(request, stack)
                    responses = await stack.enter_async_context(aclosing(respond(requests, context)))
                    await self._write_all(responses, context)

            await self._answered(method, context, work())

        return guarded

    def _foreign(self, respond: Callable[..., Any], *, is_unary: bool) -> Callable[..., Any]:
        async def guarded(request: Any, context: Context) -> Any:
            try:
                async with AsyncExitStack() as stack:
                    decoded = _decoded(request) if is_unary else await _all_decoded(request, stack)
                    return await outcome_of(respond(decoded, context), context)
            except RpcFailure as failure:
                await context.abort_with_status(rpc_status.to_status(failure.to_status()))

        return guarded

    async def _write_all(self, responses: AsyncIterator[Message], context: Context) -> None:
        deadline = asyncio.timeout(None)
        try:
            async with deadline:
                with _WriteWatch(self._slow_reader_s, deadline) as watch:
                    async for response in responses:
                        watch.since_s = watch.time()
                        await context.write(response)
                        watch.since_s = None
        except TimeoutError:
            if not deadline.expired():
                raise
            self._metrics.slow_reader("age")
            raise slow_reader("a message has not been read", self._slow_reader_s, "read faster") from None

    async def _answered(self, method: str, context: Context, work: Awaitable[T]) -> T:
        """Await `work` and end the RPC by what it raises."""
        began_s = time.monotonic()
        try:
            result = await work
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                self._ended("rpc cancelled", method, began_s, grpc.StatusCode.CANCELLED)
                raise
            failure = failure_from(RuntimeError())
            log.error("inner cancellation", method=method, **places_of(error))
        except Exception as error:
            failure = failure_from(error)
            if failure is not error and failure.code is grpc.StatusCode.INTERNAL:
                log.error("rpc fault", method=method, **places_of(error))
        else:
            self._ended("rpc done", method, began_s, grpc.StatusCode.OK)
            return result
        self._ended("rpc refused", method, began_s, failure.code, reason=failure.reason)
        status = rpc_status.to_status(failure.to_status())
        # Its traceback leads here: it and what this frame holds, the call above all, would keep each other.
        del failure
        await context.abort_with_status(status)
        raise AssertionError("abort_with_status always raises")

    def _ended(self, event: str, method: str, began_s: float, code: grpc.StatusCode, **more: str) -> None:
        """One line in the access log."""
        self._metrics.rpc_ended(method, code)
        caller = current_caller()
        log.log(
            logging.INFO if self._has_access_log else logging.DEBUG,
            event,
            method=method,
            peer=caller.host,
            **({"client": caller.name} if caller.name else {}),
            outcome=code.name,
            **more,
            prompt_tokens=caller.tally.num_prompt_tokens,
            completion_tokens=caller.tally.num_completion_tokens,
            duration_ms=round(1e3 * (time.monotonic() - began_s), 1),
        )


class _WriteWatch:
    """Ends `deadline` when one write has taken `most_s` seconds. One timer serves all writes of a stream: one
    for each would be a good part of what a message takes.

    `since_s` is the moment at which the write began that goes on; None while there is none.
    """

    def __init__(self, most_s: float, deadline: asyncio.Timeout) -> None:
        self.since_s: float | None = None
        self.time = asyncio.get_running_loop().time
        self._most_s = most_s
        self._deadline = deadline

    def __enter__(self) -> Self:
        self._look_at(self.time() + self._most_s)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _look_at(self, when_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_at(when_s, self._look)

    def _look(self) -> None:
        now_s = self.time()
        if self.since_s is not None and self.since_s + self._most_s <= now_s + _EARLY_S:
            self._deadline.reschedule(now_s)
        else:
            began_s = now_s if self.since_s is None else self.since_s
            self._look_at(max(began_s + self._most_s, now_s + _EARLY_S))


def _tolerant(decode: Callable[[bytes], Message] | None) -> Callable[[bytes], Message | None]:
    """Like `decode`, but None for what can't be decoded: gRPC would make a fault of ours of its exception."""
    assert decode is not None, "messages of headrace.v1 are protobufs"

    def tolerant(encoded: bytes) -> Message | None:
        try:
            return decode(encoded)
        except DecodeError:
            return None

    return tolerant


def _decoded(request: Message | None) -> Message:
    if request is None:
        raise undecodable()
    return request


async def _all_decoded(
    requests: AsyncIterable[Message | None], stack: AsyncExitStack
) -> AsyncIterator[Message]:
    """The messages of a stream, up to the end of `stack`: left in the middle, gRPC's own iterator would keep
    the call until somebody comes to clear it away."""
    received: Any = aiter(requests)
    encoded: AsyncIterator[Message | None] = await stack.enter_async_context(aclosing(received))

    async def decoded() -> AsyncGenerator[Message, None]:
        async for request in encoded:
            yield _decoded(request)

    return await stack.enter_async_context(aclosing(decoded()))


def _refuse_unknown_fields(request: Message) -> None:
    violations = tuple(unknown_fields(request))
    if violations:
        raise invalid(*violations)
