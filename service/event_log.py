"""Events of a request that have been sent and may have to be sent again."""

from __future__ import annotations

from collections import deque

from headrace.engine import FieldViolation
from headrace.service.status import invalid_action
from headrace.v1.generation_pb2 import GenerationEvent

_MESSAGE_BYTES = 256
"""What a message takes beside its content, rounded up."""


class EventLog:
    """Keeps them until they are acknowledged.

    Args:
        max_bytes: of what is kept; beyond that it is full, and nothing more should be sent.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._events: deque[GenerationEvent] = deque()
        self._first = 0
        self._num_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether something has to be acknowledged first."""
        return self._num_bytes > self._max_bytes

    @property
    def is_empty(self) -> bool:
        """Whether everything has been acknowledged."""
        return not self._events

    def add(self, event: GenerationEvent) -> GenerationEvent:
        """Keep the next event, and give it back."""
        self._events.append(event)
        self._num_bytes += _MESSAGE_BYTES + event.ByteSize()
        return event

    def acknowledge(self, sequence: int) -> None:
        """Forget the events up to number `sequence`; those that are forgotten already are no matter.

        Raises:
            RpcFailure: INVALID_ARGUMENT, no such event has been sent.
        """
        if sequence >= self._num_sent:
            raise invalid_action(FieldViolation("acknowledge.sequence", self._never_sent()))
        while self._first <= sequence:
            self._num_bytes -= _MESSAGE_BYTES + self._events.popleft().ByteSize()
            self._first += 1

    def after(self, sequence: int | None) -> list[GenerationEvent]:
        """What comes behind number `sequence`; everything, with None.

        Raises:
            RpcFailure: INVALID_ARGUMENT, it has been acknowledged, or no such event has been sent.
        """
        first = 0 if sequence is None else sequence + 1
        if not self._first <= first <= self._num_sent:
            problem = (
                f"events up to {self._first - 1} were acknowledged, and are forgotten"
                if first < self._first
                else self._never_sent()
            )
            raise invalid_action(FieldViolation("resume.last_sequence", problem))
        return list(self._events)[first - self._first :]

    @property
    def _num_sent(self) -> int:
        return self._first + len(self._events)

    def _never_sent(self) -> str:
        return f"is of no event that was sent: there are {self._num_sent}, from 0 on"
