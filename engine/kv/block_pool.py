"""Owner of all KV block ids (PagedAttention, SOSP '23). Knows counts, not contents."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from headrace.engine.errors import IntegrityError

NULL_BLOCK = 0
"""Never allocated; padding of block tables and slot mappings points into it."""


class BlockPool:
    """Hands out block ids, all or nothing, and counts who refers to each.

    A reference belongs to the physical block. At zero the block is free; one that was marked as worth keeping
    stays as it is until its memory is needed, the longest unused first.

    Args:
        num_blocks: all ids, the null block included.
        on_evict: told each kept block whose content is given up.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        self._ref_counts = [0] * num_blocks
        # The last in is the first out: memory that was used lately is in the caches, and memory that was
        # never used costs a page fault for every page of it.
        self._free = list(range(num_blocks - 1, 0, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._is_worth_keeping: set[int] = set()
        self._num_references = 0
        self._on_evict = on_evict

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return len(self._ref_counts) - 1

    @property
    def num_references(self) -> int:
        """References to all blocks together: a block that several tables hold counts several times."""
        return self._num_references

    @property
    def num_kept(self) -> int:
        """Blocks that nobody refers to and whose content is still there."""
        return len(self._kept)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free ones and kept ones."""
        return len(self._free) + len(self._kept)

    @property
    def ref_counts(self) -> Sequence[int]:
        """How many refer to each block, by its id."""
        return self._ref_counts

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take `num_blocks` blocks with one reference each; None and no change when there are fewer."""
        if num_blocks == 1 and self._free:
            # Running sequences grow by one block at a time.
            block_id = self._free.pop()
            self._ref_counts[block_id] = 1
            self._num_references += 1
            return [block_id]
        if num_blocks > self.num_available:
            return None
        while len(self._free) < num_blocks:
            self._evict_oldest()
        block_ids = [self._free.pop() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        self._num_references += num_blocks
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one reference to blocks that are held or kept.

        Raises:
            IntegrityError: one of them is free, so its content is nobody's.
        """
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                if block_id not in self._kept:
                    raise IntegrityError(f"block {block_id} is free and can't be shared")
                del self._kept[block_id]
            self._ref_counts[block_id] += 1
            self._num_references += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference of each block; of those that become unused the first is the first to be evicted.

        Raises:
            IntegrityError: nobody held one of them.
        """
        for block_id in block_ids:
            if self._ref_counts[block_id] <= 0:
                raise IntegrityError(f"block {block_id} was released more often than it was taken")
            self._ref_counts[block_id] -= 1
            self._num_references -= 1
            if self._ref_counts[block_id] == 0:
                if block_id in self._is_worth_keeping:
                    self._kept[block_id] = None
                else:
                    self._free.append(block_id)

    def keep(self, block_id: int) -> None:
        """Mark a held block: its content stays when nobody refers to it any more, while memory allows."""
        if self._ref_counts[block_id] <= 0:
            raise IntegrityError(f"block {block_id} is nobody's, so its content is worth nothing")
        self._is_worth_keeping.add(block_id)

    def unkeep(self, block_id: int) -> None:
        """Take the mark back, held or not: the content is worth nothing any more."""
        self._is_worth_keeping.discard(block_id)
        if block_id in self._kept:
            del self._kept[block_id]
            self._free.append(block_id)

    def evict_all(self) -> int:
        """Free every kept block; returns how many there were."""
        num_evicted = len(self._kept)
        while self._kept:
            self._evict_oldest()
        return num_evicted

    def _evict_oldest(self) -> None:
        block_id, _ = self._kept.popitem(last=False)
        self._is_worth_keeping.discard(block_id)
        self._free.append(block_id)
        self._on_evict(block_id)

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Compare the counts with the tables that exist.

        Args:
            block_tables: every block table of every sequence that holds blocks.

        Raises:
            IntegrityError: an id is held twice by one table, counted wrongly, lost, or in two places at once.
        """
        held: Counter[int] = Counter()
        for table in block_tables:
            if len(set(table)) != len(table):
                raise IntegrityError(f"a block table holds an id twice: {list(table)}")
            held.update(table)
        if held[NULL_BLOCK]:
            raise IntegrityError("a block table holds the null block")
        num_blocks = len(self._ref_counts)
        strangers = [block_id for block_id in held if not 0 < block_id < num_blocks]
        if strangers:
            raise IntegrityError(f"a block table holds ids that are never allocated: {strangers}")
        num_tables = [0] * num_blocks
        for block_id, number in held.items():
            num_tables[block_id] = number
        _require_equal(self._ref_counts, num_tables, "block {} counts {} references, {} tables hold it")
        num_places = [0] * num_blocks
        for block_id in chain(self._free, self._kept, held):
            num_places[block_id] += 1
        one_each = [0] + [1] * (num_blocks - 1)
        _require_equal(
            num_places, one_each, "block {} is {} times among the free, kept and held ones, not {}"
        )
        if held.total() != self._num_references:
            raise IntegrityError(f"{held.total()} references are held, {self._num_references} counted")


def _require_equal(found: list[int], wanted: list[int], told: str) -> None:
    """Both are by block id. They are compared at once: a server that has become idle audits its pool each
    time, whatever its size."""
    if found != wanted:
        block_id = next(i for i, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1])
        raise IntegrityError(told.format(block_id, found[block_id], wanted[block_id]))
