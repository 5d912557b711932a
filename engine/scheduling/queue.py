"""Sequences in the order in which they are served: those that run, and those that wait.

Two orders. The *rank* of a sequence never changes: a request of priority p counts as if it had come p ageing
times earlier. It says who runs on when memory is short: only a sequence of better rank can take another's
blocks, so the best one of all is never interrupted, and nobody's place is won by turns.

Who waits is let in by class first: a request's priority, and one more for each ageing time that it has
waited, up to the highest priority that waits. Within a class the client is next who has had least (see
`fairness`), and of one client the oldest request.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from operator import attrgetter

from headrace.engine.scheduling.fairness import ClientLedger
from headrace.engine.sequence import Rank, Request, Sequence, SequenceId

_rank = attrgetter("rank")
_arrival = attrgetter("sequence_id")


def rank_of(sequence: Sequence, ageing_s: float) -> Rank:
    """A sequence's place for good, best first: arrival, put earlier by its priority."""
    return sequence.arrival_s - sequence.request.priority * ageing_s, sequence.sequence_id


def sharing_key_of(request: Request, *, prefix_caching: bool) -> str | None:
    """Under which key a request's sequences share KV; None when they share none.

    Args:
        prefix_caching: whether those of different requests may.
    """
    if prefix_caching and request.uses_prefix_cache:
        return f"shared {request.isolation_key}"
    # The sequences of one request share its prompt, whatever it wants of others.
    return f"private {request.request_id}" if request.best_of > 1 else None


class SequenceQueue:
    """A list of sequences kept sorted by rank, best first."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over a snapshot: the queue may change meanwhile."""
        return iter(tuple(self._items))

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def add(self, sequence: Sequence) -> None:
        """Put a sequence at its place."""
        insort(self._items, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out.

        Raises:
            ValueError: it is not here.
        """
        place = bisect_left(self._items, sequence.rank, key=_rank)
        if place == len(self._items) or self._items[place] is not sequence:
            raise ValueError(f"sequence {sequence.sequence_id} is not in this queue")
        del self._items[place]

    @property
    def last(self) -> Sequence:
        """The one of lowest rank: the first to lose its place."""
        return self._items[-1]


class WaitingQueue:
    """The sequences that wait, one line for each client and priority, and for those of them that are late.

    To begin to choose takes time by the number of lines; each one chosen takes the logarithm of that.

    Args:
        ledger: what each client has had.
        ageing_s: waiting time that is worth one class, seconds.
    """

    def __init__(self, ledger: ClientLedger, ageing_s: float) -> None:
        self._ledger = ledger
        self._ageing_s = ageing_s
        self._lines: dict[tuple[str, int, bool], list[Sequence]] = {}
        self._num_sequences = 0
        self._num_late = 0
        self._num_tokens = 0
        self._held: dict[str, tuple[int, int]] = {}

    def __len__(self) -> int:
        return self._num_sequences

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, in no order that means anything."""
        return iter([sequence for line in self._lines.values() for sequence in line])

    @property
    def num_in_time(self) -> int:
        """How many are not late."""
        return self._num_sequences - self._num_late

    @property
    def num_tokens(self) -> int:
        """The most that all of them together may come to hold: prompts, and all that may be made."""
        return self._num_tokens

    def held_by(self, client: str) -> tuple[int, int]:
        """How many sequences of a client wait, and the most tokens that they may come to hold."""
        return self._held.get(client, (0, 0))

    def add(self, sequence: Sequence) -> None:
        """Put a sequence at its place; one that comes back has the place that it had."""
        insort(self._lines.setdefault(_line_of(sequence), []), sequence, key=_arrival)
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out.

        Raises:
            ValueError: it is not here.
        """
        name = _line_of(sequence)
        line = self._lines.get(name, [])
        place = bisect_left(line, sequence.sequence_id, key=_arrival)
        if place == len(line) or line[place] is not sequence:
            raise ValueError(f"sequence {sequence.sequence_id} is not in this queue")
        del line[place]
        if not line:
            del self._lines[name]
        self._count(sequence, -1)

    def put_off(self, sequence: Sequence) -> None:
        """Let a sequence wait among those that are late from now on."""
        self.remove(sequence)
        sequence.is_late = True
        self.add(sequence)

    def take_back(self) -> None:
        """Let those that were put off wait among the others again."""
        for sequence in [sequence for sequence in self if sequence.is_late]:
            self.remove(sequence)
            sequence.is_late = False
            self.add(sequence)

    def in_order(self, now_s: float, *, late: bool = False) -> Iterator[Sequence]:
        """Yield them in the order of admission. Who asks may take out the one that it was given last, or put
        it off, and charge its client meanwhile; nothing else may change.

        Args:
            late: whether those that are late are wanted, or all others.
        """
        lines = [(name, line) for name, line in self._lines.items() if name[2] is late]
        if not lines:
            return
        top = self._top
        heads = [self._entry(i, 0, line[0], top, now_s) for i, (_, line) in enumerate(lines)]
        heapify(heads)
        while heads:
            negative_class, counter, sequence_id, i, place = heads[0]
            (client, _, _), line = lines[i]
            owed = self._ledger.counter(client)
            if owed != counter:
                heapreplace(heads, (negative_class, owed, sequence_id, i, place))
                continue
            sequence = line[place]
            yield sequence
            heappop(heads)
            if place < len(line) and line[place] is sequence:
                place += 1
            if place < len(line):
                heappush(heads, self._entry(i, place, line[place], top, now_s))

    def class_of(self, sequence: Sequence, now_s: float) -> int:
        """The class of a sequence that waits, now."""
        return self._class_of(sequence, self._top, now_s)

    @property
    def _top(self) -> int:
        return max(priority for _, priority, _ in self._lines)

    def _entry(
        self, line: int, place: int, sequence: Sequence, top: int, now_s: float
    ) -> tuple[int, float, SequenceId, int, int]:
        request = sequence.request
        return (
            -self._class_of(sequence, top, now_s),
            self._ledger.counter(request.client),
            sequence.sequence_id,
            line,
            place,
        )

    def _class_of(self, sequence: Sequence, top: int, now_s: float) -> int:
        num_gained = int((now_s - sequence.arrival_s) / self._ageing_s)
        return min(top, sequence.request.priority + num_gained)

    def _count(self, sequence: Sequence, sign: int) -> None:
        client, num_tokens = sequence.request.client, sign * sequence.max_len
        self._num_sequences += sign
        self._num_late += sign if sequence.is_late else 0
        self._num_tokens += num_tokens
        num_sequences, held_tokens = self._held.get(client, (0, 0))
        if num_sequences + sign:
            self._held[client] = (num_sequences + sign, held_tokens + num_tokens)
        else:
            del self._held[client]


def _line_of(sequence: Sequence) -> tuple[str, int, bool]:
    return sequence.request.client, sequence.request.priority, sequence.is_late
