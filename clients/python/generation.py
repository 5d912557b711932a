"""One request as its caller sees it: iterate over its events, cancel it, or wait for the whole answer."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeAlias

import grpc

from headrace.clients.convert import event_from_proto
from headrace.clients.errors import Cancelled, ProtocolError, error_from_rpc
from headrace.clients.events import Accepted, Answer, Completion, Delta, Event, Finished
from headrace.clients.retry import Attempts
from headrace.v1 import generation_pb2 as pb

GenerateCall: TypeAlias = "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]"


class Generation(ABC):
    """A request. Iterate over it, once: its events are `Accepted`, `Delta` ... `Finished`.

    With `n` sequences there are `n` `Finished`, and the events of different sequences interleave: each
    tells its `index`.

    Leaving the loop early, by `break`, an exception or cancellation of the task, cancels the request on the
    server. (`break` does so when the loop's iterator is dropped, which CPython does at once. `async with`
    is certain whoever still holds the iterator.)

        async with client.generate("...") as generation:
            async for event in generation:
                ...

    A request that had to be sent again tells `Accepted` again: the last one counts.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._is_iterated = False

    @property
    def request_id(self) -> str:
        """The request's label, as given or as made by this client."""
        return self._request_id

    def __aiter__(self) -> AsyncIterator[Event]:
        """Begin to read.

        Raises, when it is iterated:
            HeadraceError: the request failed; the class says why.
            Cancelled: `cancel` was called and the server has no last word on it.
        """
        if self._is_iterated:
            raise RuntimeError(
                f"request {self.request_id!r} is iterated already: its events can be read once"
            )
        self._is_iterated = True
        # No reference is kept: when the loop drops the iterator, its `finally` must run.
        return self._events()

    @abstractmethod
    def cancel(self) -> None:
        """Give the request up. Returns at once; harmless when it is finished or cancelled already."""

    @abstractmethod
    def _events(self) -> AsyncGenerator[Event]: ...

    async def answer(self) -> Answer:
        """Read to the end and return the whole.

        Raises:
            HeadraceError: the request failed; the class says why.
        """
        accepted: Accepted | None = None
        deltas: dict[int, list[Delta]] = {}
        finishes: dict[int, Finished] = {}
        async for event in self:
            match event:
                case Accepted():
                    accepted = event
                case Delta():
                    deltas.setdefault(event.index, []).append(event)
                case Finished():
                    finishes[event.index] = event
        if accepted is None or not finishes:
            raise ProtocolError(f"request {self.request_id!r} ended without being accepted and finished")
        return Answer(
            request_id=self.request_id,
            accepted=accepted,
            completions=tuple(
                _completion(deltas.get(index, []), finishes[index]) for index in sorted(finishes)
            ),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()


def _completion(deltas: list[Delta], finished: Finished) -> Completion:
    whole = Delta.joined(deltas) if deltas else Delta("", ())
    return Completion(
        whole.text, whole.token_ids, finished, finished.index, whole.logprobs, whole.prompt_logprobs
    )


class EventOrder:
    """Checks that the events of a request arrive whole: numbered without gaps, each sequence finished last.

    Args:
        num_sequences: how many of them have to finish.
    """

    def __init__(self, request_id: str, num_sequences: int) -> None:
        self._request_id = request_id
        self._num_sequences = num_sequences
        self._finished: set[int] = set()
        self._next = 0

    @property
    def last(self) -> int | None:
        """Number of the last event that has come; None before there is one."""
        return self._next - 1 if self._next else None

    @property
    def is_finished(self) -> bool:
        """Whether every sequence has finished."""
        return len(self._finished) >= self._num_sequences

    def take(self, message: pb.GenerationEvent) -> Event:
        """The value of the next event.

        Raises:
            ProtocolError: an event is missing, out of order or after the end.
        """
        if message.sequence != self._next or self.is_finished:
            raise ProtocolError(
                f"request {self._request_id!r}: event {message.sequence} came where {self._next} was due"
                + (", after the end" if self.is_finished else "")
            )
        if message.index >= self._num_sequences or message.index in self._finished:
            raise ProtocolError(
                f"request {self._request_id!r}: event {message.sequence} is of sequence {message.index}, "
                "which is none of its own or has ended"
            )
        self._next += 1
        event = event_from_proto(message)
        if isinstance(event, Finished):
            self._finished.add(event.index)
        return event


class RpcGeneration(Generation):
    """A request with an RPC of its own.

    Args:
        send: opens the RPC, given the time left for it, seconds.
        new_attempts: begins the count of attempts; called when reading begins.
    """

    def __init__(
        self,
        start: pb.StartGeneration,
        send: Callable[[float | None], GenerateCall],
        new_attempts: Callable[[], Attempts],
    ) -> None:
        super().__init__(start.request_id)
        self._num_sequences = start.n if start.HasField("n") else 1
        self._send = send
        self._new_attempts = new_attempts
        self._call: GenerateCall | None = None
        self._cancel_requested = asyncio.Event()

    def cancel(self) -> None:
        self._cancel_requested.set()
        if self._call is not None:
            self._call.cancel()

    async def _events(self) -> AsyncGenerator[Event]:
        attempts = self._new_attempts()
        while True:
            if self._cancel_requested.is_set():
                raise self._cancelled()
            has_output = False
            order = EventOrder(self.request_id, self._num_sequences)
            call = self._call = self._send(attempts.remaining_s)
            try:
                async for response in call:
                    event = order.take(response.event)
                    has_output = has_output or not isinstance(event, Accepted)
                    yield event
                if not order.is_finished:
                    raise ProtocolError(
                        f"request {self.request_id!r}: the stream ended before the answer did"
                    )
                return
            except grpc.aio.AioRpcError as rpc_error:
                error = error_from_rpc(rpc_error)
            except asyncio.CancelledError:
                # gRPC raises this for our own `cancel`, too; the caller's task is then not being cancelled.
                if not self._cancel_requested.is_set() or is_task_cancelled():
                    raise
                raise self._cancelled() from None
            finally:
                call.cancel()
            if has_output:
                raise error
            delay_s = attempts.next_delay_s(error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._cancel_requested.wait(), delay_s)

    def _cancelled(self) -> Cancelled:
        return Cancelled(f"request {self.request_id!r} was cancelled", code=grpc.StatusCode.CANCELLED)


def is_task_cancelled() -> bool:
    """Whether somebody has asked the running task to stop."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
