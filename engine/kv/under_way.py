"""Blocks that are given back while a step may still write to them."""

from __future__ import annotations

from collections.abc import Container

from headrace.engine.kv.block_pool import BlockPool
from headrace.engine.sequence import SequenceId


class SequencesUnderWay:
    """The sequences that steps under way may write to, and what those have given back meanwhile.

    Args:
        pool: where it goes in the end.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._sequence_ids: Container[SequenceId] = ()
        self._parked: list[tuple[SequenceId, list[int]]] = []

    def __contains__(self, sequence_id: SequenceId) -> bool:
        return sequence_id in self._sequence_ids

    def note(self, sequence_ids: Container[SequenceId]) -> None:
        """A step has begun or returned: who may be written to from now on. What others have given back is
        free."""
        self._sequence_ids = sequence_ids
        parked, self._parked = self._parked, []
        for sequence_id, block_ids in parked:
            self.give_back(sequence_id, block_ids)

    def give_back(self, sequence_id: SequenceId, block_ids: list[int]) -> None:
        """Release blocks, as soon as no step may write to them.

        Args:
            sequence_id: whose they were.
            block_ids: the first of those that become unused is the first to be evicted.
        """
        if sequence_id in self._sequence_ids:
            self._parked.append((sequence_id, block_ids))
        else:
            self._pool.release(block_ids)

    @property
    def parked(self) -> list[list[int]]:
        """Blocks that were given back and are not free yet, by the table that they stood in."""
        return [block_ids for _, block_ids in self._parked]
