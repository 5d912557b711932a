"""Many requests over one bidirectional stream."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Awaitable, Callable
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
    reason_from_status,
)
from headrace.clients.generation import Generation
from headrace.clients.prompts import Prompt, RequestOptions, start_message
from headrace.clients.retry import Attempts, is_retriable
from headrace.clients.session_generation import SessionGeneration
from headrace.v1 import generation_pb2 as pb

SessionCall: TypeAlias = "grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]"

_logger = logging.getLogger(__name__)

_ACKNOWLEDGED_BYTES = 2**14
_EVENT_BYTES = 2**10
"""After so much is acknowledged, an event counted as so much at least: far less than servers keep."""
_FAREWELL_S = 2.0
"""So long the server has to take the last cancels of a session that is left."""


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
    breaks, every open request raises what broke it, unless the session resumes them.

    Args:
        connect: waits until the server is reached.
        open_stream: opens the stream.
        new_attempts: begins the count of a request's attempts.
        max_message_bytes: longest message that may be sent.
        resumes: whether a stream that breaks is opened again; see `InferenceClient.session`.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[None]],
        open_stream: Callable[[], SessionCall],
        new_attempts: Callable[[], Attempts],
        max_message_bytes: int,
        *,
        resumes: bool = False,
    ) -> None:
        self._resumes = resumes
        self._has_progress = False
        self._attempts: Attempts | None = None
        self._reconnecting: asyncio.Task[bool] | None = None
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
        if self._resumes and not start.HasField("detach"):
            start.detach = True
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
            elif any(generation.start.detach for generation in self._open.values()):
                # The end of the stream would leave them running.
                for generation in tuple(self._open.values()):
                    generation.cancel()
                self._outbox.put_nowait(None)
                await asyncio.wait([self._reader], timeout=_FAREWELL_S)
        finally:
            self._resumes = False
            if self._reconnecting is not None:
                self._reconnecting.cancel()
            self._call.cancel()
            self._writer.cancel()
            await asyncio.wait([self._reader, self._writer])
        self._reader.result()

    async def __aenter__(self) -> Self:
        if self._call is not None:
            raise RuntimeError("a session can be opened once: make another one")
        await self._connect()
        self._begin_stream()
        self._reader = asyncio.create_task(self._read(), name="headrace session reader")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close(cancel=kind is not None)

    def _begin_stream(self) -> None:
        call = self._call = self._open_stream()
        outbox = self._outbox = asyncio.Queue()
        self._writer = asyncio.create_task(self._write(call, outbox), name="headrace session writer")

    async def _write(self, call: SessionCall, outbox: asyncio.Queue[pb.SessionRequest | None]) -> None:
        # The one writer of the stream: gRPC does not allow two writes at once.
        try:
            while (message := await outbox.get()) is not None:
                await call.write(message)
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            _logger.debug("the session's stream takes no more messages (its reader tells why): %s", error)

    async def _read(self) -> None:
        end: HeadraceError = ProtocolError("the session has ended")
        try:
            while True:
                end = await self._read_stream()
                self._reconnecting = asyncio.create_task(
                    self._is_going_on(end), name="headrace session resume"
                )
                await asyncio.wait([self._reconnecting])
                if self._reconnecting.cancelled() or not self._reconnecting.result():
                    return
        finally:
            self._broken_by = end
            for resend in self._resends.values():
                resend.cancel()
            for generation in self._open.values():
                generation.fail(copy.copy(end))
            self._open.clear()
            self._one_ended.set()

    async def _read_stream(self) -> HeadraceError:
        """Read the stream to its end; why it ended."""
        call = self._call
        if call is None:
            raise AssertionError("nothing was opened")
        try:
            async for response in call:
                self._has_progress = True
                for event in response.events:
                    self._dispatch(event)
        except grpc.aio.AioRpcError as error:
            return error_from_rpc(error)
        except asyncio.CancelledError:
            # gRPC raises this when the call is cancelled from this side; nobody else cancels this task.
            return Cancelled("the session was closed", code=grpc.StatusCode.CANCELLED)
        return ProtocolError("the server ended the session")

    async def _is_going_on(self, end: HeadraceError) -> bool:
        """Whether the requests have been taken up on another stream."""
        if not self._resumes or not is_retriable(end) or (self._is_closing and not self._open):
            return False
        attempts = self._attempts_to_resume(end)
        while True:
            try:
                await asyncio.sleep(attempts.next_delay_s(end))
                await self._connect()
                break
            except HeadraceError as error:
                if error is end:
                    return False
                end = error
        if self._writer is not None:
            self._writer.cancel()
        self._begin_stream()
        for generation in tuple(self._open.values()):
            self._take_up(generation, end)
        return True

    def _attempts_to_resume(self, end: HeadraceError) -> Attempts:
        # Of a stream that said nothing the next one is another attempt.
        if self._has_progress or self._attempts is None:
            self._attempts = self._new_attempts()
        self._has_progress = False
        _logger.info("the session's stream has broken, its requests are resumed: %s", end)
        return self._attempts

    def _take_up(self, generation: SessionGeneration, end: HeadraceError) -> None:
        if generation in self._resends:
            return  # it is about to be sent anew
        if not generation.start.detach:
            self._fail(generation, copy.copy(end))
            return
        resume = pb.ResumeGeneration(request_id=generation.request_id)
        if generation.last_sequence is not None:
            resume.last_sequence = generation.last_sequence
        self._outbox.put_nowait(pb.SessionRequest(resume=resume))
        if generation.is_cancelled:
            self._send_cancel(generation)

    def _dispatch(self, message: pb.GenerationEvent) -> None:
        generation = self._open.get(message.request_id)
        if generation is None:
            _logger.warning("the server told of request %r, which is not open", message.request_id)
            return
        try:
            if message.WhichOneof("event") == "error":
                if reason_from_status(message.error) == "NOT_RESUMABLE":
                    self._begin_anew(generation, error_from_status(message.error))
                else:
                    self._send_again(generation, error_from_status(message.error))
            else:
                generation.unacknowledged += max(_EVENT_BYTES, message.ByteSize())
                if generation.receive(message):
                    self._remove(generation)
            self._acknowledge(generation)
        except ProtocolError as error:
            generation.cancel()
            self._fail(generation, error)

    def _begin_anew(self, generation: SessionGeneration, error: HeadraceError) -> None:
        """The server does not know a request that was to be resumed."""
        if generation.may_be_sent_again:
            generation.begin_again()
            self._outbox.put_nowait(pb.SessionRequest(start=generation.start))
        elif generation.is_cancelled:
            self._fail(generation, _cancelled(generation))
        else:
            self._fail(generation, error)

    def _acknowledge(self, generation: SessionGeneration) -> None:
        """Let the server forget what has come, now and then, and at the end."""
        last = generation.last_sequence
        if not generation.start.detach or last is None:
            return
        if generation.request_id not in self._open or generation.unacknowledged >= _ACKNOWLEDGED_BYTES:
            generation.unacknowledged = 0
            seen = pb.AcknowledgeEvents(request_id=generation.request_id, sequence=last)
            self._outbox.put_nowait(pb.SessionRequest(acknowledge=seen))

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
            self._fail(generation, _cancelled(generation))
        else:
            self._send_cancel(generation)

    def _send_cancel(self, generation: SessionGeneration) -> None:
        cancel = pb.CancelGeneration(request_id=generation.request_id)
        self._outbox.put_nowait(pb.SessionRequest(cancel=cancel))


def _cancelled(generation: SessionGeneration) -> Cancelled:
    return Cancelled(f"request {generation.request_id!r} was cancelled", code=grpc.StatusCode.CANCELLED)
