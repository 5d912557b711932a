"""Events that are told in one message: for each message gRPC takes as long as for many events."""

from __future__ import annotations

from headrace.v1.generation_pb2 import GenerationEvent

MAX_EVENTS_TOLD_AT_ONCE = 64
"""Of one message: made within a millisecond or two, and whoever reads has something early."""
_FULL_BYTES = 65_536
"""A message takes no further event once it is so large."""


class NextMessage:
    """The events that go into the next message of a stream."""

    def __init__(self) -> None:
        self.events: list[GenerationEvent] = []
        self._num_bytes = 0

    def add(self, event: GenerationEvent) -> None:
        """One more."""
        self.events.append(event)
        self._num_bytes += event.ByteSize()

    def handed_over(self) -> list[GenerationEvent]:
        """The events; it is empty from now on."""
        events, self.events, self._num_bytes = self.events, [], 0
        return events

    @property
    def is_full(self) -> bool:
        """Whether nothing more belongs to it."""
        return len(self.events) >= MAX_EVENTS_TOLD_AT_ONCE or self._num_bytes >= _FULL_BYTES
