"""Who holds which KV blocks: one block table per sequence."""

from __future__ import annotations

from headrace.engine.config import CacheLayout
from headrace.engine.kv.block_pool import BlockPool
from headrace.engine.outputs import BlockCounts
from headrace.engine.sequence import SequenceId


class KVCacheManager:
    """The one owner of block tables. Leaving by any path is `free`, once.

    Args:
        layout: the pool as allocated.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self._pool = BlockPool(layout.num_blocks)
        self._tables: dict[SequenceId, list[int]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that a sequence can get at once."""
        return self._pool.num_free

    @property
    def num_live_blocks(self) -> int:
        """Blocks that sequences hold."""
        return self._pool.num_usable - self._pool.num_free

    @property
    def counts(self) -> BlockCounts:
        """The pool now. Nothing outlives its sequence, so nothing is merely cached."""
        return BlockCounts(
            total=self._pool.num_usable, free=self._pool.num_free, cached=0, live=self.num_live_blocks
        )

    def block_ids(self, sequence_id: SequenceId) -> tuple[int, ...]:
        """The block table of a sequence; empty when it holds nothing."""
        return tuple(self._tables.get(sequence_id, ()))

    def num_missing_blocks(self, sequence_id: SequenceId, num_tokens: int) -> int:
        """Blocks that a sequence would still need to hold `num_tokens` tokens."""
        return self.layout.num_blocks_for(num_tokens) - len(self._tables.get(sequence_id, ()))

    def allocate_slots(self, sequence_id: SequenceId, num_tokens: int) -> list[int] | None:
        """Let the table reach `num_tokens` tokens in all.

        Returns:
            The new block ids (none when the table is long enough); None and no change when they can't be had.
        """
        missing = self.num_missing_blocks(sequence_id, num_tokens)
        if missing <= 0:
            return []
        new_blocks = self._pool.allocate(missing)
        if new_blocks is not None:
            self._tables.setdefault(sequence_id, []).extend(new_blocks)
        return new_blocks

    def free(self, sequence_id: SequenceId) -> None:
        """Give back all that a sequence holds. Nothing happens when it holds nothing."""
        # Last block first: the head of a sequence is the likeliest to be asked for again.
        self._pool.release(reversed(self._tables.pop(sequence_id, [])))

    def check_integrity(self) -> None:
        """Audit tables against counts.

        Raises:
            IntegrityError: they don't add up.
        """
        self._pool.check_integrity(self._tables.values())
