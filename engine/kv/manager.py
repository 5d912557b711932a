"""Who holds which KV blocks: one block table per sequence, and the full blocks that others may share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as List
from dataclasses import dataclass
from itertools import chain, takewhile

from headrace.engine.config import CacheLayout
from headrace.engine.errors import IntegrityError
from headrace.engine.kv.block_pool import BlockPool
from headrace.engine.kv.prefix_cache import BlockKey, PrefixCache, chain_root, next_key
from headrace.engine.kv.under_way import SequencesUnderWay
from headrace.engine.outputs import BlockCounts
from headrace.engine.sequence import SequenceId


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Blocks that hold the beginning of a sequence already.

    Args:
        block_ids: in order from the first token.
        num_tokens: how many tokens they hold.
        num_unused: how many of them nobody refers to now, so that taking them lowers what is available.
    """

    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    num_unused: int = 0


NO_MATCH = PrefixMatch()


class DraftedBlocks:
    """Which blocks hold the KV of the draft model, too: who shares them finds both there."""

    def __init__(self) -> None:
        self._block_ids: set[int] = set()

    def mark(self, block_ids: List[int]) -> None:
        """The draft model has computed all tokens of these."""
        self._block_ids.update(block_ids)

    def count(self, block_ids: List[int]) -> int:
        """How many of these, from the first on, it has computed."""
        return sum(1 for _ in takewhile(self._block_ids.__contains__, block_ids))

    def forget(self, block_ids: List[int]) -> None:
        """These hold something else from now on."""
        if self._block_ids:
            self._block_ids.difference_update(block_ids)


class _BlockTable:
    """The blocks of one sequence, in order.

    Args:
        block_ids: the first ones.
        num_shareable: how many of them others can find already.
        as_tuple: a copy of all of them, or of those that there were once.
    """

    __slots__ = ("as_tuple", "block_ids", "num_shareable")

    def __init__(self, block_ids: List[int] = (), num_shareable: int = 0) -> None:
        self.block_ids = list(block_ids)
        self.num_shareable = num_shareable
        self.as_tuple: tuple[int, ...] = ()


class KVCacheManager:
    """The one owner of block tables. Leaving by any path is `free`, once. What a step that is under way may
    still write to is free when that one has returned.

    Args:
        layout: the pool as allocated.
        model: name of what computes the KV; part of what makes a block's content known.
    """

    def __init__(self, layout: CacheLayout, model: str = "") -> None:
        self.layout = layout
        self._model = model
        self._block_size = layout.block_size
        self._cache = PrefixCache()
        self._pool = BlockPool(layout.num_blocks, on_evict=self._on_evict)
        self._tables: dict[SequenceId, _BlockTable] = {}
        # Per sequence: the keys of its full blocks, as far as they were needed. Known tokens never change.
        self._chains: dict[SequenceId, list[BlockKey]] = {}
        # Per waiting sequence: what it was found to share, and how many blocks had been forgotten by then.
        self._matches: dict[SequenceId, tuple[int, list[int]]] = {}
        self.under_way = SequencesUnderWay(self._pool)
        self.drafted = DraftedBlocks()

    @property
    def num_available_blocks(self) -> int:
        """Blocks that a sequence can get at once."""
        return self._pool.num_available

    @property
    def num_live_blocks(self) -> int:
        """Blocks that sequences hold."""
        return self._pool.num_usable - self._pool.num_available

    @property
    def num_shared_slots(self) -> int:
        """KV slots saved by sharing: those of blocks that further tables hold beside the first."""
        num_references, num_held = self._pool.num_references, self.num_live_blocks
        if self.under_way.parked:
            # What was given back and isn't free yet stands in no table any more.
            num_references -= sum(map(len, self.under_way.parked))
            num_held -= len(self._held_by_no_table())
        return (num_references - num_held) * self._block_size

    @property
    def num_remembered(self) -> int:
        """Entries that are kept for sequences: none once all are over."""
        return len(self._tables) + len(self._chains) + len(self._matches) + len(self.under_way.parked)

    @property
    def ref_counts(self) -> List[int]:
        """How many tables hold each block, by its id."""
        return self._pool.ref_counts

    @property
    def counts(self) -> BlockCounts:
        """The pool now."""
        cached = self._pool.num_kept
        free = self._pool.num_available - cached
        return BlockCounts(total=self._pool.num_usable, free=free, cached=cached, live=self.num_live_blocks)

    def block_ids(self, sequence_id: SequenceId) -> tuple[int, ...]:
        """The block table of a sequence; empty when it holds nothing."""
        table = self._tables.get(sequence_id)
        if table is None:
            return ()
        # Made anew only when the table has grown: most steps write to blocks that are there.
        if len(table.as_tuple) != len(table.block_ids):
            table.as_tuple = tuple(table.block_ids)
        return table.as_tuple

    def num_missing_blocks(self, sequence_id: SequenceId, num_tokens: int) -> int:
        """Blocks that a sequence would still need to hold `num_tokens` tokens; below 0 when it has more."""
        table = self._tables.get(sequence_id)
        held = 0 if table is None else len(table.block_ids)
        return -(-num_tokens // self._block_size) - held

    def allocate_slots(self, sequence_id: SequenceId, num_tokens: int) -> list[int] | None:
        """Let the table reach `num_tokens` tokens in all.

        Returns:
            The new block ids (none when the table is long enough); None and no change when they can't be had.
        """
        table = self._tables.get(sequence_id)
        held = 0 if table is None else len(table.block_ids)
        if num_tokens <= held * self._block_size:
            return []
        new_blocks = self._pool.allocate(-(-num_tokens // self._block_size) - held)
        if new_blocks is None:
            return None
        if table is None:
            table = self._tables[sequence_id] = _BlockTable()
        table.block_ids += new_blocks
        self.drafted.forget(new_blocks)
        return new_blocks

    def match_prefix(self, sequence_id: SequenceId, token_ids: List[int], isolation_key: str) -> PrefixMatch:
        """Find the longest run of shareable blocks that begins a sequence; whoever waits and asks again is
        only told what has come since, unless something has gone.

        At least one token is left out: the last one must be computed, for its logits are wanted.

        Args:
            token_ids: all known tokens of the sequence.
            isolation_key: blocks are found only under the key that they were made under.
        """
        num_forgotten, block_ids = self._matches.get(sequence_id, (0, []))
        if num_forgotten != self._cache.num_forgotten:
            block_ids = []
        for i in range(len(block_ids), (len(token_ids) - 1) // self.layout.block_size):
            # One key at a time: most chains are broken off at their first block.
            block_id = self._cache.find(self._chain(sequence_id, token_ids, i + 1, isolation_key)[i])
            if block_id is None:
                break
            block_ids.append(block_id)
        if block_ids:
            self._matches[sequence_id] = self._cache.num_forgotten, block_ids
        return PrefixMatch(
            block_ids=tuple(block_ids),
            num_tokens=len(block_ids) * self.layout.block_size,
            num_unused=sum(self._pool.ref_counts[block_id] == 0 for block_id in block_ids),
        )

    def adopt(self, sequence_id: SequenceId, match: PrefixMatch) -> None:
        """Begin the table of a sequence with the blocks of a match, found just now.

        Raises:
            IntegrityError: the sequence holds blocks already.
        """
        if sequence_id in self._tables:
            raise IntegrityError(f"sequence {sequence_id} has a block table already")
        self._matches.pop(sequence_id, None)
        if match.block_ids:
            self._pool.share(match.block_ids)
            self._tables[sequence_id] = _BlockTable(match.block_ids, num_shareable=len(match.block_ids))

    def offer(
        self, sequence_id: SequenceId, token_ids: List[int], num_computed: int, isolation_key: str
    ) -> None:
        """Let others share the blocks that a finished step has filled.

        Args:
            token_ids: all known tokens of the sequence.
            num_computed: tokens whose KV is valid.
        """
        table = self._tables[sequence_id]
        num_full = num_computed // self._block_size
        if table.num_shareable >= num_full:
            return
        chain = self._chain(sequence_id, token_ids, num_full, isolation_key)
        for i in range(table.num_shareable, num_full):
            if self._cache.add(chain[i], table.block_ids[i]):
                self._pool.keep(table.block_ids[i])
        table.num_shareable = num_full

    def free(self, sequence_id: SequenceId, *, num_kept_tokens: int = 0, is_over: bool = False) -> int:
        """Give back what a sequence holds. Nothing happens when it holds nothing.

        Args:
            num_kept_tokens: so many tokens keep their blocks; at least those whose KV is valid, or none.
            is_over: whether it will never come back, so that nothing need be remembered for it.

        Returns:
            How many blocks it no longer holds.
        """
        if is_over:
            self._chains.pop(sequence_id, None)
            self._matches.pop(sequence_id, None)
        table = self._tables.get(sequence_id)
        num_kept = -(-num_kept_tokens // self._block_size)
        if table is None or num_kept >= len(table.block_ids):
            return 0
        given_back = table.block_ids[num_kept:]
        if num_kept == 0:
            del self._tables[sequence_id]
        else:
            del table.block_ids[num_kept:]
            # It may be as long again soon, with other blocks.
            table.as_tuple = ()
        # Last block first: what begins a text is likelier to be asked for again than what ends it.
        self.under_way.give_back(sequence_id, given_back[::-1])
        return len(given_back)

    def withdraw(self, sequence_id: SequenceId) -> None:
        """Let nobody else share what a sequence has offered: its content is not to be trusted."""
        for block_id in self.block_ids(sequence_id):
            if self._cache.forget(block_id):
                self._pool.unkeep(block_id)

    def flush(self) -> int:
        """Give up all content that no sequence holds; returns the number of blocks."""
        # Not free yet, and nobody's: found by nobody when they are.
        forgotten = [block_id for block_id in self._held_by_no_table() if self._cache.forget(block_id)]
        for block_id in forgotten:
            self._pool.unkeep(block_id)
        return len(forgotten) + self._pool.evict_all()

    def _held_by_no_table(self) -> list[int]:
        """Blocks that are live only because a step under way may still write to them."""
        num_parked = Counter(chain.from_iterable(self.under_way.parked))
        return [i for i, number in num_parked.items() if number == self._pool.ref_counts[i]]

    def check_integrity(self) -> None:
        """Audit tables against counts.

        Raises:
            IntegrityError: they don't add up.
        """
        tables = [table.block_ids for table in self._tables.values()]
        self._pool.check_integrity([*tables, *self.under_way.parked])

    def _on_evict(self, block_id: int) -> None:
        if not self._cache.forget(block_id):
            raise IntegrityError(f"block {block_id} was kept, yet nobody could have found it")

    def _chain(
        self, sequence_id: SequenceId, token_ids: List[int], num_blocks: int, isolation_key: str
    ) -> List[BlockKey]:
        """The keys of a sequence's full blocks, at least the first `num_blocks`."""
        chain = self._chains.get(sequence_id)
        if chain is None:
            chain = self._chains[sequence_id] = []
        size = self._block_size
        while len(chain) < num_blocks:
            parent = chain[-1][0] if chain else chain_root(isolation_key, self._model)
            first = len(chain) * size
            chain.append(next_key(parent, token_ids[first : first + size]))
        return chain


def would_free(
    kv: KVCacheManager, num_blocks: int, sequence_ids: List[SequenceId], spared_block_ids: List[int] = ()
) -> bool:
    """Whether at least so many blocks would be nobody's if these sequences gave up all that they hold.

    A block that others hold, too, would not.

    Args:
        spared_block_ids: don't count.
    """
    tables = [kv.block_ids(sequence_id) for sequence_id in sequence_ids]
    if sum(map(len, tables)) < num_blocks:
        return False
    spared, num_seen, num_freed = frozenset(spared_block_ids), Counter[int](), 0
    for block_ids in tables:
        for block_id in block_ids:
            num_seen[block_id] += 1
            is_nobodys = num_seen[block_id] == kv.ref_counts[block_id]
            num_freed += is_nobodys and block_id not in spared
        if num_freed >= num_blocks:
            return True
    return False
