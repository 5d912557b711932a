"""Sequences that have left the batch and still hold their blocks.

A sequence is *paused* while its reader lags: nothing is computed for it, it has no place in the batch, and
its blocks are its own until somebody else needs them, or until they have been held for long enough. Then it
is preempted as any other: when it goes on, all that it knows is computed again.

One that goes on waits for a place as everybody does, and until it has one it holds what it held.
"""

from __future__ import annotations

from collections import Counter

from headrace.engine.errors import Overloaded
from headrace.engine.kv.manager import KVCacheManager, PrefixMatch, would_free
from headrace.engine.scheduling.queue import SequenceQueue
from headrace.engine.sequence import Request, Sequence, SequenceStatus


class Parking:
    """Keeps account of them; what becomes of a sequence is the scheduler's to decide.

    Args:
        kv: where their blocks are held.
        hold_s: how long a paused sequence keeps its blocks though nobody needs them, seconds.
    """

    def __init__(self, kv: KVCacheManager, hold_s: float) -> None:
        self._kv = kv
        self._hold_s = hold_s
        self._paused: dict[Sequence, float] = {}
        self._holding: dict[Sequence, float] = {}
        self._waiting = SequenceQueue()

    @property
    def num_paused(self) -> int:
        """How many are paused, with blocks or without."""
        return len(self._paused)

    @property
    def paused(self) -> tuple[Sequence, ...]:
        """They, the longest paused first."""
        return tuple(self._paused)

    @property
    def most_in_the_way(self) -> Request:
        """The longest paused request of the client that has the most of them; somebody is paused."""
        clients = Counter(sequence.request.client for sequence in self._paused)
        client = max(clients, key=clients.__getitem__)
        return next(each.request for each in self._paused if each.request.client == client)

    def crowded(self, most: int) -> Overloaded:
        """What the one is told that is given up because more than `most` are paused."""
        return Overloaded(
            f"the readers of {self.num_paused} sequences lag, and {most} may; of the client with the most of "
            "them the longest unread one is given up: read faster, or grant credit in time",
            retry_after_s=1.0,
        )

    @property
    def due_s(self) -> float | None:
        """When the next paused one has held its blocks for long enough; None for never."""
        return next(iter(self._holding.values()), None)

    @property
    def is_holding(self) -> bool:
        """Whether anybody here holds blocks."""
        return bool(self._holding) or bool(self._waiting)

    def holds(self, sequence: Sequence) -> bool:
        """Whether a sequence that doesn't run has blocks."""
        return bool(self._kv.block_ids(sequence.sequence_id))

    def pause(self, sequence: Sequence, now_s: float) -> None:
        """Take in a sequence that is paused from now on."""
        self._paused[sequence] = now_s
        if self.holds(sequence):
            if sequence.status is SequenceStatus.WAITING:
                self._waiting.remove(sequence)
            self._holding[sequence] = now_s + self._hold_s

    def resume(self, sequence: Sequence) -> float:
        """A paused sequence waits for a place from now on; returns since when it was paused."""
        if self._holding.pop(sequence, None) is not None:
            self._waiting.add(sequence)
        return self._paused.pop(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence that holds nothing any more, runs again, or is over; paused it may still be."""
        if self._holding.pop(sequence, None) is None and sequence in self._waiting:
            self._waiting.remove(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that is over, whatever it was."""
        self.leave(sequence)
        self._paused.pop(sequence, None)

    def overdue(self, now_s: float) -> list[Sequence]:
        """Who has held blocks for long enough."""
        return [sequence for sequence, due_s in self._holding.items() if due_s <= now_s]

    def can_give(
        self, num_blocks: int, match: PrefixMatch, *, among_waiting: bool, but: Sequence | None = None
    ) -> bool:
        """Whether at least so many blocks can be had of all those whom `victim` may choose.

        Args:
            match: what is wanted as it is, whoever gives it up.
        """
        holders = [*self._holding, *(each for each in self._waiting if among_waiting and each is not but)]
        return would_free(self._kv, num_blocks, [each.sequence_id for each in holders], match.block_ids)

    def victim(self, *, among_waiting: bool, but: Sequence | None = None) -> Sequence | None:
        """Who gives up its blocks first: of those that are paused the one of lowest rank, and with none left
        of those that wait for a place.

        Args:
            among_waiting: whether one that waits for a place may be chosen at all.
            but: who may not.
        """
        if self._holding:
            return max(self._holding, key=lambda sequence: sequence.rank)
        if not among_waiting:
            return None
        return next((each for each in reversed(tuple(self._waiting)) if each is not but), None)
