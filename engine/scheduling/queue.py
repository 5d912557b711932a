"""Sequences in the order in which they are served."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from headrace.engine.sequence import Sequence, SequenceId


def arrival_order(sequence: Sequence) -> SequenceId:
    """First come, first served. A preempted sequence keeps its place: ids grow with arrival."""
    return sequence.sequence_id


class SequenceQueue:
    """A list of sequences kept sorted, oldest first. Another policy is another key."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over a snapshot: the queue may change meanwhile."""
        return iter(tuple(self._items))

    def add(self, sequence: Sequence) -> None:
        """Put a sequence at its place."""
        insort(self._items, sequence, key=arrival_order)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out.

        Raises:
            ValueError: it is not here.
        """
        place = bisect_left(self._items, arrival_order(sequence), key=arrival_order)
        if place == len(self._items) or self._items[place] is not sequence:
            raise ValueError(f"sequence {sequence.sequence_id} is not in this queue")
        del self._items[place]

    @property
    def last(self) -> Sequence:
        """The youngest: the first to lose its place."""
        return self._items[-1]
