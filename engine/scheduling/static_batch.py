"""Static batching: who has a place in the batch that runs, and when the next one begins."""

from __future__ import annotations

from headrace.engine.config import BatchingPolicy, SchedulerConfig
from headrace.engine.scheduling.queue import WaitingQueue


class StaticBatch:
    """Places of one batch: nobody joins it who had none when it began, and none is given a second time.

    With continuous batching everybody has a place.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._is_static = config.batching is BatchingPolicy.STATIC
        self._max_num_seqs = config.max_num_seqs
        self._wait_s = config.static_batch_wait_s
        self._num_places = 0

    def open(self, waiting: WaitingQueue, now_s: float) -> float | None:
        """Nobody runs: give places to as many as wait, or to nobody yet if more would have room and may still
        come.

        Returns:
            When the batch begins that is not full; None when it has begun.
        """
        if not self._is_static:
            return None
        self._num_places = min(self._max_num_seqs, len(waiting))
        if self._num_places < self._max_num_seqs:
            due_s = min(each.arrival_s for each in waiting) + self._wait_s
            if now_s < due_s:
                self._num_places = 0
                return due_s
        return None

    @property
    def may_join(self) -> bool:
        """Whether one more may join."""
        return not self._is_static or self._num_places > 0

    def join(self) -> None:
        """One has joined."""
        self._num_places -= 1

    def close(self) -> None:
        """Nobody joins any more."""
        self._num_places = 0
