import pytest
from headrace.engine.errors import IntegrityError
from headrace.engine.kv.block_pool import NULL_BLOCK, BlockPool


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(num_blocks=5)
    assert pool.num_usable == 4
    assert sorted(pool.allocate(4) or []) == [1, 2, 3, 4]
    assert NULL_BLOCK not in range(1, 5)


def test_allocation_is_all_or_nothing():
    pool = BlockPool(num_blocks=4)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert len(pool.allocate(3) or []) == 3
    assert pool.num_free == 0
    assert pool.allocate(0) == []


def test_a_released_block_can_be_taken_again():
    pool = BlockPool(num_blocks=3)
    first = pool.allocate(2)
    assert first is not None
    pool.release(first)
    assert pool.num_free == 2
    assert sorted(pool.allocate(2) or []) == sorted(first)


def test_releasing_a_block_that_nobody_holds_is_an_error():
    pool = BlockPool(num_blocks=3)
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
        ([[1]], "block 2 counts 1 references, 0 tables hold it"),
        ([[1, 2], [2]], "block 2 counts 1 references, 2 tables hold it"),
        ([[1, 2, 3]], "block 3 counts 0 references, 1 tables hold it"),
    ],
)
def test_the_audit_finds_what_does_not_add_up(tables, message):
    pool = BlockPool(num_blocks=5)
    pool.allocate(2)
    with pytest.raises(IntegrityError, match=message):
        pool.check_integrity(tables)


def test_the_audit_passes_a_pool_that_adds_up():
    pool = BlockPool(num_blocks=5)
    first, second = pool.allocate(2), pool.allocate(1)
    assert first is not None
    assert second is not None
    pool.check_integrity([first, second])
    pool.release(first)
    pool.check_integrity([second])
