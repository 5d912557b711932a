"""When requests expire: by their time limit or their deadline, whichever is first."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count

from headrace.engine.live import LiveRequest


class Expiries:
    """Live requests by the moment that ends them."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, LiveRequest]] = []
        self._ids = count()

    def add(self, live: LiveRequest, num_live: int) -> None:
        """Take in a request that has begun, if anything ends it.

        Args:
            num_live: how many requests are live.
        """
        expires_s = live.open[0].sequence.expires_s
        if expires_s is None:
            return
        # Requests end long before they expire: what waits for that must not outgrow those that are live.
        if len(self._heap) > 2 * num_live + 64:
            self._heap = [entry for entry in self._heap if entry[2].open]
            heapify(self._heap)
        heappush(self._heap, (expires_s, next(self._ids), live))

    @property
    def next_s(self) -> float | None:
        """When the next request expires; None for never."""
        while self._heap and not self._heap[0][2].open:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now_s: float) -> Iterator[LiveRequest]:
        """Take out those that have expired."""
        while self._heap and self._heap[0][0] <= now_s:
            live = heappop(self._heap)[2]
            if live.open:
                yield live
