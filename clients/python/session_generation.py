"""A request of a `Session`, as its caller and its session see it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from headrace.clients.errors import HeadraceError
from headrace.clients.events import Accepted, Event
from headrace.clients.generation import EventOrder, Generation
from headrace.clients.inbox import Inbox
from headrace.clients.retry import Attempts
from headrace.v1 import generation_pb2 as pb


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
        self.unacknowledged = 0
        """Bytes of events that have come and were not acknowledged."""

    @property
    def is_cancelled(self) -> bool:
        """Whether its caller has given it up."""
        return self._is_cancelled

    @property
    def last_sequence(self) -> int | None:
        """Number of the last event that has come; None before there is one."""
        return self._order.last

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
