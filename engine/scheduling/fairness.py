"""Who is owed how much: each client's served tokens, counted so that no client waits behind another's flood.

Virtual token counters ("Fairness in Serving Large Language Models", OSDI '24). A client's counter grows by
what is computed for it, divided by its weight; of the clients that wait, the one with the least counter is
next. A client that comes back is lifted to the least counter among those that wait: nobody saves up by being
away.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from headrace.engine.errors import IntegrityError

PROMPT_COST = 1.0
"""What a prompt token counts that had to be computed; one from the prefix cache counts nothing."""
OUTPUT_COST = 2.0
"""What a token counts that was made. Both as in the paper: an output token takes more of a machine."""
_MAX_REMEMBERED = 4096


class ClientLedger:
    """The counters of all clients.

    Args:
        weights: share of a client relative to others; 1 for whoever is not in it. All above 0.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._counters: dict[str, float] = {}
        self._num_live: dict[str, int] = {}
        self._num_waiting: dict[str, int] = {}
        # Counters only grow, so an entry that has become too low is found and mended when it comes up.
        self._least: list[tuple[float, str]] = []
        self._floor = 0.0
        # Clients without live sequences who have had more than their share, the longest idle first.
        self._idle: dict[str, None] = {}

    @property
    def num_clients(self) -> int:
        """How many are remembered."""
        return len(self._counters)

    def counter(self, client: str) -> float:
        """Tokens charged to a client, by its weight; of one that is not known, what it would begin with."""
        return self._counters.get(client, self._floor)

    def arrive(self, client: str) -> None:
        """A new sequence of a client waits."""
        self._num_live[client] = self._num_live.get(client, 0) + 1
        self.come_back(client)

    def come_back(self, client: str) -> None:
        """A sequence of a client waits that was away of its own will: that is no claim to what others had
        meanwhile."""
        if client not in self._num_waiting:
            self._floor = max(self._floor, self._least_waiting())
            self._counters[client] = max(self._counters.get(client, 0.0), self._floor)
            self._idle.pop(client, None)
        self.wait(client)

    def wait(self, client: str) -> None:
        """A sequence of a client waits that has run before."""
        if client not in self._num_waiting:
            self._num_waiting[client] = 0
            heappush(self._least, (self._counters[client], client))
            if len(self._least) > 2 * len(self._num_waiting) + 64:
                self._least = [(self._counters[waiting], waiting) for waiting in self._num_waiting]
                heapify(self._least)
        self._num_waiting[client] += 1

    def stop_waiting(self, client: str) -> None:
        """One of a client's sequences waits no more."""
        left = self._num_waiting[client] - 1
        if left:
            self._num_waiting[client] = left
            return
        del self._num_waiting[client]
        if not self._num_waiting:
            # The last to leave an empty queue is the measure of whoever comes next.
            self._floor = max(self._floor, self._counters[client])
            self._least.clear()

    def depart(self, client: str) -> None:
        """One of a client's sequences is over."""
        left = self._num_live.get(client, 0) - 1
        if left < 0:
            raise IntegrityError(f"client {client!r} has had more ends than sequences")
        if left:
            self._num_live[client] = left
            return
        del self._num_live[client]
        if self._counters[client] <= self._floor:
            del self._counters[client]
            return
        self._idle[client] = None
        if len(self._idle) > _MAX_REMEMBERED:
            forgotten = next(iter(self._idle))
            del self._idle[forgotten]
            del self._counters[forgotten]

    def charge_prompt(self, client: str, num_tokens: int) -> None:
        """Count prompt tokens that are computed for a client with live sequences."""
        self._counters[client] += PROMPT_COST * num_tokens / self._weights.get(client, 1.0)

    def charge_output(self, client: str, num_tokens: int) -> None:
        """Count tokens that were made for a client with live sequences."""
        self._counters[client] += OUTPUT_COST * num_tokens / self._weights.get(client, 1.0)

    def _least_waiting(self) -> float:
        while self._least:
            noted, client = self._least[0]
            if client not in self._num_waiting:
                heappop(self._least)
            elif self._counters[client] > noted:
                heappop(self._least)
                heappush(self._least, (self._counters[client], client))
            else:
                return noted
        return self._floor
