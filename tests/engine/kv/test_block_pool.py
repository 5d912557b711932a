from typing import cast

import pytest

from headrace.engine.errors import IntegrityError
from headrace.engine.kv.block_pool import NULL_BLOCK, BlockPool


def make_pool(num_blocks: int, evicted: list[int] | None = None) -> BlockPool:
    return BlockPool(num_blocks, on_evict=(evicted if evicted is not None else []).append)


def test_the_null_block_is_never_handed_out():
    pool = make_pool(5)
    assert pool.num_usable == 4
    assert sorted(pool.allocate(4) or []) == [1, 2, 3, 4]
    assert NULL_BLOCK not in range(1, 5)


def test_allocation_is_all_or_nothing():
    pool = make_pool(4)
    assert pool.allocate(4) is None
    assert pool.num_available == 3
    assert len(pool.allocate(3) or []) == 3
    assert pool.num_available == 0
    assert pool.allocate(0) == []


def test_a_released_block_can_be_taken_again():
    pool = make_pool(3)
    first = pool.allocate(2)
    assert first is not None
    pool.release(first)
    assert pool.num_available == 2
    assert sorted(pool.allocate(2) or []) == sorted(first)


def test_blocks_that_were_used_come_before_blocks_that_never_were():
    pool = make_pool(100)
    used = pool.allocate(10)
    assert used == list(range(1, 11))
    # As tables are released: the end of a sequence first.
    pool.release(reversed(used))
    assert pool.allocate(7) == used[:7]
    assert [pool.allocate(1) for _ in range(3)] == [[block_id] for block_id in used[7:]]
    assert pool.allocate(1) == [11]


def test_releasing_a_block_that_nobody_holds_is_an_error():
    pool = make_pool(3)
    block_ids = pool.allocate(1)
    assert block_ids is not None
    pool.release(block_ids)
    with pytest.raises(IntegrityError, match="released more often"):
        pool.release(block_ids)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([[1, 1], [2]], "holds an id twice"),
        ([[1, 0], [2]], "null block"),
        ([[1, 2], [1]], "block 1 counts 1 references, 2 tables hold it"),
        ([[1]], "block 2 counts 1 references, 0 tables hold it"),
        ([[1, 2], [2]], "block 2 counts 1 references, 2 tables hold it"),
        ([[1, 2, 5]], r"never allocated: \[5\]"),
        ([[1, 2, -1]], r"never allocated: \[-1\]"),
        ([[1, 2, 3]], "block 3 counts 0 references, 1 tables hold it"),
    ],
)
def test_the_audit_finds_what_does_not_add_up(tables, message):
    pool = make_pool(5)
    pool.allocate(2)
    with pytest.raises(IntegrityError, match=message):
        pool.check_integrity(tables)


def test_the_audit_finds_a_block_that_is_in_two_places_or_in_none():
    for broken_id, message in ((3, "block 3 is 2 times"), (NULL_BLOCK, "block 0 is 1 times")):
        pool = make_pool(5)
        # As a reference that nobody took would.
        cast("list[int]", pool.ref_counts)[broken_id] = 1
        with pytest.raises(IntegrityError, match=f"block {broken_id} counts 1 references, 0 tables hold it"):
            pool.check_integrity([])
        pool.release([broken_id])
        with pytest.raises(IntegrityError, match=message):
            pool.check_integrity([])
    pool = make_pool(5)
    pool.allocate(2)
    cast("list[int]", pool.ref_counts)[2] = 0
    with pytest.raises(IntegrityError, match="block 2 is 0 times"):
        pool.check_integrity([[1]])


def test_the_audit_passes_a_pool_that_adds_up():
    pool = make_pool(5)
    first, second = pool.allocate(2), pool.allocate(1)
    assert first is not None
    assert second is not None
    pool.check_integrity([first, second])
    pool.release(first)
    pool.check_integrity([second])


def test_a_kept_block_survives_its_last_holder_until_memory_is_needed():
    evicted: list[int] = []
    pool = make_pool(5, evicted)
    block_ids = pool.allocate(3)
    assert block_ids is not None
    for block_id in block_ids[:2]:
        pool.keep(block_id)
    pool.release(reversed(block_ids))
    assert (pool.num_kept, pool.num_available) == (2, 4)
    assert pool.allocate(2) is not None
    assert evicted == [], "free blocks go before kept ones"
    assert pool.allocate(1) == [block_ids[1]]
    assert evicted == [block_ids[1]], "the first that was released is the first to go"
    assert pool.num_kept == 1


def test_a_shared_block_is_free_only_when_all_have_let_go():
    pool = make_pool(3)
    block_ids = pool.allocate(1)
    assert block_ids is not None
    pool.share(block_ids)
    pool.release(block_ids)
    assert pool.num_available == 1
    assert pool.ref_counts[block_ids[0]] == 1
    pool.release(block_ids)
    assert pool.num_available == 2


def test_a_kept_block_that_is_shared_again_can_not_be_evicted():
    pool = make_pool(3)
    block_ids = pool.allocate(1)
    assert block_ids is not None
    pool.keep(block_ids[0])
    pool.release(block_ids)
    pool.share(block_ids)
    assert pool.num_kept == 0
    assert pool.allocate(2) is None
    pool.check_integrity([block_ids])


def test_a_free_block_can_neither_be_shared_nor_kept():
    pool = make_pool(3)
    with pytest.raises(IntegrityError, match="can't be shared"):
        pool.share([1])
    with pytest.raises(IntegrityError, match="nobody's"):
        pool.keep(1)


@pytest.mark.parametrize("is_held", [True, False])
def test_a_block_that_is_no_longer_worth_keeping_becomes_free(is_held):
    evicted: list[int] = []
    pool = make_pool(3, evicted)
    block_ids = pool.allocate(1)
    assert block_ids is not None
    pool.keep(block_ids[0])
    if not is_held:
        pool.release(block_ids)
    pool.unkeep(block_ids[0])
    if is_held:
        pool.release(block_ids)
    assert (pool.num_kept, pool.num_available, evicted) == (0, 2, [])
    pool.check_integrity([])


def test_everything_that_is_kept_can_be_evicted_at_once():
    evicted: list[int] = []
    pool = make_pool(4, evicted)
    block_ids = pool.allocate(3)
    assert block_ids is not None
    for block_id in block_ids:
        pool.keep(block_id)
    pool.release(block_ids[:2])
    assert pool.evict_all() == 2
    assert evicted == block_ids[:2]
    pool.check_integrity([block_ids[2:]])
