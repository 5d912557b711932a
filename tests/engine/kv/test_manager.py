import pytest
from headrace.engine.config import CacheLayout
from headrace.engine.errors import IntegrityError
from headrace.engine.kv.manager import KVCacheManager
from headrace.engine.outputs import BlockCounts
from headrace.engine.sequence import SequenceId

A, B = SequenceId(1), SequenceId(2)


def make_manager(num_blocks: int = 4, block_size: int = 4) -> KVCacheManager:
    return KVCacheManager(CacheLayout(num_blocks + 1, block_size))


def test_blocks_are_taken_only_when_the_last_one_is_full():
    kv = make_manager()
    assert len(kv.allocate_slots(A, 1) or []) == 1
    assert kv.allocate_slots(A, 4) == []
    assert len(kv.allocate_slots(A, 5) or []) == 1
    assert len(kv.block_ids(A)) == 2
    assert kv.counts == BlockCounts(total=4, free=2, cached=0, live=2)


def test_a_failed_allocation_changes_nothing():
    kv = make_manager()
    kv.allocate_slots(A, 8)
    table = kv.block_ids(A)
    assert kv.allocate_slots(A, 17) is None
    assert kv.allocate_slots(B, 9) is None
    assert kv.block_ids(A) == table
    assert kv.block_ids(B) == ()
    assert kv.num_free_blocks == 2
    kv.check_integrity()


def test_freeing_gives_everything_back_once():
    kv = make_manager()
    kv.allocate_slots(A, 16)
    kv.free(A)
    kv.free(A)
    kv.free(B)
    assert kv.num_free_blocks == 4
    assert kv.block_ids(A) == ()
    kv.check_integrity()


def test_missing_blocks_count_what_is_held_already():
    kv = make_manager(block_size=4)
    assert kv.num_missing_blocks(A, 9) == 3
    kv.allocate_slots(A, 5)
    assert kv.num_missing_blocks(A, 9) == 1


def test_tables_of_different_sequences_never_overlap():
    kv = make_manager(num_blocks=8)
    for num_tokens in (1, 5, 9, 13):
        kv.allocate_slots(A, num_tokens)
        kv.allocate_slots(B, num_tokens)
    assert not set(kv.block_ids(A)) & set(kv.block_ids(B))
    kv.check_integrity()


def test_a_layout_without_a_usable_block_is_refused():
    with pytest.raises(Exception, match="null block and at least one more"):
        CacheLayout(1, 16)


def test_integrity_errors_are_bugs_not_answers():
    assert not issubclass(IntegrityError, ValueError)
