"""Requests of a stream that have ended, so that they are told from those that were never there."""

from __future__ import annotations

from collections import OrderedDict


class EndedLabels:
    """Remembers their labels, the latest ones.

    Args:
        most: so many.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._labels: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, label: str) -> bool:
        return label in self._labels

    def add(self, label: str) -> None:
        """A request has ended."""
        self._labels[label] = None
        self._labels.move_to_end(label)
        while len(self._labels) > self._most:
            self._labels.popitem(last=False)
