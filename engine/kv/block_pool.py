"""Owner of all KV block ids (PagedAttention, SOSP '23). Knows counts, not contents."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from headrace.engine.errors import IntegrityError

NULL_BLOCK = 0
"""Never allocated; padding of block tables and slot mappings points into it."""


class BlockPool:
    """Hands out block ids, all or nothing, and counts who refers to each.

    A reference belongs to the physical block: it is free when, and only when, its count is zero.

    Args:
        num_blocks: all ids, the null block included.
    """

    def __init__(self, num_blocks: int) -> None:
        self._ref_counts = [0] * num_blocks
        self._free: deque[int] = deque(range(1, num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return len(self._ref_counts) - 1

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take `num_blocks` blocks with one reference each; None and no change when there are fewer."""
        if num_blocks > len(self._free):
            return None
        block_ids = [self._free.popleft() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference of each block.

        Raises:
            IntegrityError: nobody held one of them.
        """
        for block_id in block_ids:
            if self._ref_counts[block_id] <= 0:
                raise IntegrityError(f"block {block_id} was released more often than it was taken")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free.append(block_id)

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Compare the counts with the tables that exist.

        Args:
            block_tables: every block table of every sequence that holds blocks.

        Raises:
            IntegrityError: an id is held twice by one table, counted wrongly, lost, or both free and held.
        """
        held: Counter[int] = Counter()
        for table in block_tables:
            if len(set(table)) != len(table):
                raise IntegrityError(f"a block table holds an id twice: {list(table)}")
            held.update(table)
        if held[NULL_BLOCK]:
            raise IntegrityError("a block table holds the null block")
        free = set(self._free)
        if len(free) != len(self._free):
            raise IntegrityError("the free list holds an id twice")
        for block_id in range(1, len(self._ref_counts)):
            if self._ref_counts[block_id] != held[block_id]:
                raise IntegrityError(
                    f"block {block_id} counts {self._ref_counts[block_id]} references, "
                    f"{held[block_id]} tables hold it"
                )
            if (block_id in free) == (held[block_id] > 0):
                raise IntegrityError(
                    f"block {block_id} is {'both free and held' if held[block_id] else 'lost'}"
                )
