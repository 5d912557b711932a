"""What has arrived for one request and was not read yet."""

from __future__ import annotations

import asyncio
from collections import deque

from headrace.clients.errors import HeadraceError
from headrace.clients.events import Delta, Event


class Inbox:
    """Events of one request, from the stream's reader to the request's reader.

    Putting never waits. What waits is bounded by the request's own answer; neighbouring deltas of one
    sequence are joined when they are taken, so a slow reader catches up in one go.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._error: HeadraceError | None = None
        self._is_ended = False
        self._is_discarding = False
        self._changed = asyncio.Event()

    def put(self, event: Event) -> None:
        """Add an event."""
        if not self._is_discarding:
            self._events.append(event)
            self._changed.set()

    def end(self, error: HeadraceError | None = None) -> None:
        """Nothing more comes; `error` is raised behind the events that did. Only the first end counts."""
        if not self._is_ended:
            self._is_ended = True
            self._error = error
            self._changed.set()

    def discard(self) -> None:
        """Nobody reads any more: forget what is here and what comes."""
        self._is_discarding = True
        self._events.clear()

    async def take(self) -> Event | None:
        """The next event, as soon as there is one; None at the end.

        Raises:
            HeadraceError: what `end` was told.
        """
        while not self._events:
            if self._error is not None:
                raise self._error
            if self._is_ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        event = self._events.popleft()
        return self._joined(event) if isinstance(event, Delta) else event

    def _joined(self, first: Delta) -> Delta:
        parts = [first]
        while self._events:
            following = self._events[0]
            if not isinstance(following, Delta) or following.index != first.index:
                break
            parts.append(following)
            self._events.popleft()
        return first if len(parts) == 1 else Delta.joined(parts)
