"""Many requests over one bidirectional stream."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import TracebackType
from typing import Self, TypeAlias, Unpack

import grpc

from headrace.clients.errors import (
    AlreadyExists,
    Cancelled,
    HeadraceError,
    ProtocolError,
    error_from_rpc,
    error_from_status,
)
from headrace.clients.events import Accepted, Event
from headrace.clients.generation import EventOrder, Generation
from headrace.clients.inbox import Inbox
from headrace.clients.prompts import Prompt, RequestOptions, start_message
from headrace.clients.retry import Attempts
from headrace.v1 import generation_pb2 as pb

SessionCall: TypeAlias = "grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]"

_logger = logging.getLogger(__name__)


class SessionGeneration(Generation):
    """A request of a `Session`.

    Args:
        attempts: how often it may be sent.
        request_cancel: told when the caller gives the request up.
    """

    def __init__(
        self,
        start: pb.StartGeneration,
        attempts: Attempts,
        request_cancel: Callable[[SessionGeneration], None],
    ) -> None:
        super().__init__(start.request_id)
        self.start = start
        self.attempts = attempts
        self._request_cancel = request_cancel
        self._inbox = Inbox()
        self._order = self._new_order()
        self._has_output = False
        self._is_cancelled = False

    @property
    def may_be_sent_again(self) -> bool:
        """Whether nothing of its output has been seen, and the caller still wants it."""
        return not self._has_output and not self._is_cancelled

    def cancel(self) -> None:
        if not self._is_cancelled:
            self._is_cancelled = True
            self._request_cancel(self)

    def begin_again(self) -> None:
        """The request is sent anew: its events are numbered from 0."""
        self._order = self._new_order()

    def receive(self, message: pb.GenerationEvent) -> bool:
        """Take an event that is no `error`; whether it was the last one.

        Raises:
            ProtocolError: it is not the event that was due.
        """
        event = self._order.take(message)
        self._has_output = self._has_output or not isinstance(event, Accepted)
        self._inbox.put(event)
        if self._order.is_finished:
            self._inbox.end()
        return self._order.is_finished

    def fail(self, error: HeadraceError) -> None:
        """End the request with an error, behind the events that have arrived."""
        self._inbox.end(error)

    async def _events(self) -> AsyncGenerator[Event]:
        try:
            while (event := await self._inbox.take()) is not None:
                yield event
        finally:
            self.cancel()
            self._inbox.discard()

    def _new_order(self) -> EventOrder:
        return EventOrder(self.start.request_id, self.start.n if self.start.HasField("n") else 1)


class Session:
    """One stream that carries any number of requests. Made by `InferenceClient.session`.

        async with client.session() as session:
            first = session.generate("One", max_tokens=20)
            second = session.generate("Two", max_tokens=20)
            async for event in first:
                ...

    A request is sent when `generate` is called, read or not. What has arrived and was not read yet is kept
    per request, so a request that nobody reads never holds up the others; the most that can wait is its
    answer, which `max_tokens` bounds. Deltas that wait are joined when they are read.

    Leaving the block takes no more requests, waits until those that run are finished and then half-closes;
    what they said can still be read afterwards. Leaving it by an exception cancels them. When the stream
    breaks, every open request raises what broke it.

    Args:
        connect: waits until the server is reached.
        open_stream: opens the stream.
        new_attempts: begins the count of a request's attempts.
        max_message_bytes: longest message that may be sent.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[None]],
        open_stream: Callable[[], SessionCall],
        new_attempts: Callable[[], Attempts],
        max_message_bytes: int,
    ) -> None:
        self._connect = connect
        self._open_stream = open_stream
        self._new_attempts = new_attempts
        self._max_message_bytes = max_message_bytes
        self._call: SessionCall | None = None
        self._reader: asyncio.Task[None] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._outbox: asyncio.Queue[pb.SessionRequest | None] = asyncio.Queue()
        self._open: dict[str, SessionGeneration] = {}
        self._resends: dict[SessionGeneration, asyncio.Task[None]] = {}
        self._one_ended = asyncio.Event()
        self._is_closing = False
        self._broken_by: HeadraceError | None = None

    @property
    def num_open(self) -> int:
        """Requests that are neither finished nor failed."""
        return len(self._open)

    def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Generation:
        """Send a request now; its events are read from what is returned.

        After `cancel` its last event is a `Finished` whose reason is CANCELLED.

        Args:
            prompt: raw text, token ids or chat messages.
            options: see `RequestOptions`.

        Raises:
            InvalidArgument: an option does not fit its type.
            AlreadyExists: a request of this session that is not finished has this `request_id`.
            HeadraceError: what broke the stream, if it is broken.
            RuntimeError: the session was not entered yet, or is closed.
        """
        if self._call is None:
            raise RuntimeError("the session is not open: use `async with client.session() as session`")
        if self._is_closing:
            raise RuntimeError("the session is closed: it takes no more requests")
        if self._broken_by is not None:
            raise copy.copy(self._broken_by)
        start = start_message(prompt, options, self._max_message_bytes)
        if start.request_id in self._open:
            raise AlreadyExists(
                f"request {start.request_id!r} of this session is not finished yet: use another request_id",
                code=grpc.StatusCode.ALREADY_EXISTS,
            )
        generation = SessionGeneration(start, self._new_attempts(), self._cancel)
        self._open[start.request_id] = generation
        self._outbox.put_nowait(pb.SessionRequest(start=start))
        return generation

    async def close(self, *, cancel: bool = False) -> None:
        """End the session.

        Args:
            cancel: end what is running now; otherwise wait until it is finished.
        """
        if self._call is None or self._reader is None or self._writer is None:
            return
        self._is_closing = True
        try:
            if not cancel:
                # The half-close comes last: until then a request can still be cancelled, or sent again.
                while self._open:
                    self._one_ended.clear()
                    await self._one_ended.wait()
                self._outbox.put_nowait(None)
                await asyncio.wait([self._reader])
        finally:
            self._call.cancel()
            self._writer.cancel()
            await asyncio.wait([self._reader, self._writer])
        self._reader.result()

    async def __aenter__(self) -> Self:
        if self._call is not None:
            raise RuntimeError("a session can be opened once: make another one")
        await self._connect()
        call = self._call = self._open_stream()
        self._writer = asyncio.create_task(self._write(call), name="headrace session writer")
        self._reader = asyncio.create_task(self._read(call), name="headrace session reader")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close(cancel=kind is not None)

    async def _write(self, call: SessionCall) -> None:
        # The one writer of the stream: gRPC does not allow two writes at once.
        try:
            while (message := await self._outbox.get()) is not None:
                await call.write(message)
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            _logger.debug("the session's stream takes no more messages (its reader tells why): %s", error)

    async def _read(self, call: SessionCall) -> None:
        end: HeadraceError = ProtocolError("the server ended the session")
        try:
            async for response in call:
                self._dispatch(response.event)
        except grpc.aio.AioRpcError as error:
            end = error_from_rpc(error)
        except asyncio.CancelledError:
            # gRPC raises this when the call is cancelled from this side; nobody else cancels this task.
            end = Cancelled("the session was closed", code=grpc.StatusCode.CANCELLED)
        finally:
            self._broken_by = end
            for resend in self._resends.values():
                resend.cancel()
            for generation in self._open.values():
                generation.fail(copy.copy(end))
            self._open.clear()
            self._one_ended.set()

    def _dispatch(self, message: pb.GenerationEvent) -> None:
        generation = self._open.get(message.request_id)
        if generation is None:
            _logger.warning("the server told of request %r, which is not open", message.request_id)
            return
        try:
            if message.WhichOneof("event") == "error":
                self._send_again(generation, error_from_status(message.error))
            elif generation.receive(message):
                self._remove(generation)
        except ProtocolError as error:
            generation.cancel()
            self._fail(generation, error)

    def _send_again(self, generation: SessionGeneration, error: HeadraceError) -> None:
        try:
            if not generation.may_be_sent_again:
                raise error
            delay_s = generation.attempts.next_delay_s(error)
        except HeadraceError as final:
            self._fail(generation, final)
            return
        generation.begin_again()
        resend = asyncio.create_task(self._send_later(generation, delay_s))
        self._resends[generation] = resend
        resend.add_done_callback(lambda _: self._resends.pop(generation, None))

    async def _send_later(self, generation: SessionGeneration, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        self._outbox.put_nowait(pb.SessionRequest(start=generation.start))

    def _fail(self, generation: SessionGeneration, error: HeadraceError) -> None:
        self._remove(generation)
        generation.fail(error)

    def _remove(self, generation: SessionGeneration) -> None:
        self._open.pop(generation.request_id, None)
        self._one_ended.set()

    def _cancel(self, generation: SessionGeneration) -> None:
        if self._open.get(generation.request_id) is not generation:
            return
        resend = self._resends.get(generation)
        if resend is not None and resend.cancel():
            # The server does not know it at this moment, so there is nobody else to end it.
            self._fail(
                generation,
                Cancelled(f"request {generation.request_id!r} was cancelled", code=grpc.StatusCode.CANCELLED),
            )
        else:
            self._outbox.put_nowait(
                pb.SessionRequest(cancel=pb.CancelGeneration(request_id=generation.request_id))
            )
