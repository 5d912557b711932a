import pytest

from headrace.engine.config import CacheLayout
from headrace.engine.errors import IntegrityError
from headrace.engine.kv.manager import KVCacheManager, would_free
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
    assert kv.num_available_blocks == 2
    kv.check_integrity()


def test_freeing_gives_everything_back_once():
    kv = make_manager()
    kv.allocate_slots(A, 16)
    kv.free(A)
    kv.free(A)
    kv.free(B)
    assert kv.num_available_blocks == 4
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


def fill(kv: KVCacheManager, sequence_id: SequenceId, token_ids: list[int], *, key: str = "") -> None:
    """What a prefill does: slots for all tokens, then every full block offered."""
    assert kv.allocate_slots(sequence_id, len(token_ids)) is not None
    kv.offer(sequence_id, token_ids, len(token_ids), key)


@pytest.mark.parametrize(
    ("length", "num_cached"), [(3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8), (13, 8), (20, 8)]
)
def test_all_but_the_last_token_may_come_from_full_blocks(length, num_cached):
    kv = make_manager(num_blocks=8)
    text = list(range(20))
    fill(kv, A, text[:11])
    match = kv.match_prefix(B, text[:length], "")
    assert match.num_tokens == num_cached
    assert match.block_ids == kv.block_ids(A)[: num_cached // 4]
    assert match.num_unused == 0


def test_what_is_not_computed_yet_is_not_shared():
    kv = make_manager(num_blocks=8)
    text = list(range(12))
    kv.allocate_slots(A, 12)
    kv.offer(A, text, 7, "")
    assert kv.match_prefix(B, text, "").num_tokens == 4


def test_another_isolation_key_finds_nothing():
    kv = make_manager(num_blocks=8)
    fill(kv, A, list(range(9)), key="a")
    assert kv.match_prefix(B, list(range(9)), "b").num_tokens == 0
    assert kv.match_prefix(SequenceId(3), list(range(9)), "a").num_tokens == 8


def test_adopted_blocks_are_shared_and_outlive_their_maker():
    kv = make_manager(num_blocks=8)
    text = list(range(9))
    fill(kv, A, text)
    kv.adopt(B, kv.match_prefix(B, text, ""))
    kv.allocate_slots(B, 9)
    assert kv.block_ids(B)[:2] == kv.block_ids(A)[:2]
    assert kv.block_ids(B)[2] != kv.block_ids(A)[2]
    assert (kv.num_live_blocks, kv.num_shared_slots) == (4, 8)
    kv.free(A, is_over=True)
    assert kv.num_live_blocks == 3
    kv.check_integrity()
    kv.free(B, is_over=True)
    assert kv.counts == BlockCounts(total=8, free=6, cached=2, live=0)


def test_cached_blocks_give_way_tail_first_and_are_then_not_found():
    kv = make_manager(num_blocks=4)
    text = list(range(13))
    fill(kv, A, text)
    kv.free(A, is_over=True)
    assert kv.counts == BlockCounts(total=4, free=1, cached=3, live=0)
    assert kv.allocate_slots(B, 8) is not None
    assert kv.match_prefix(SequenceId(3), text, "").num_tokens == 8
    kv.check_integrity()


def test_equal_prefixes_computed_side_by_side_are_never_aliased():
    kv = make_manager(num_blocks=8)
    text = list(range(8))
    fill(kv, A, text)
    fill(kv, B, text)
    assert not set(kv.block_ids(A)) & set(kv.block_ids(B))
    kv.free(A, is_over=True)
    kv.check_integrity()
    assert kv.match_prefix(SequenceId(3), [*text, 9], "").num_tokens == 8
    kv.free(B, is_over=True)
    assert kv.counts == BlockCounts(total=8, free=6, cached=2, live=0)


def test_what_is_withdrawn_is_not_found_and_not_kept():
    kv = make_manager(num_blocks=8)
    text = list(range(9))
    fill(kv, A, text)
    kv.withdraw(A)
    assert kv.match_prefix(B, text, "").num_tokens == 0
    kv.free(A, is_over=True)
    assert kv.counts == BlockCounts(total=8, free=8, cached=0, live=0)


def test_flushing_gives_up_only_what_nobody_holds():
    kv = make_manager(num_blocks=8)
    fill(kv, A, list(range(8)))
    fill(kv, B, list(range(50, 58)))
    kv.free(A, is_over=True)
    assert kv.flush() == 2
    assert kv.match_prefix(SequenceId(3), [*range(50, 58), 1], "").num_tokens == 8
    assert kv.counts == BlockCounts(total=8, free=6, cached=0, live=2)


def test_a_table_is_begun_once():
    kv = make_manager(num_blocks=8)
    fill(kv, A, list(range(8)))
    match = kv.match_prefix(B, list(range(9)), "")
    kv.adopt(B, match)
    with pytest.raises(IntegrityError, match="a block table already"):
        kv.adopt(B, match)


def test_blocks_beyond_what_is_needed_can_be_given_back():
    kv = make_manager(num_blocks=5)
    kv.allocate_slots(A, 20)
    first, second, *unused = kv.block_ids(A)
    assert kv.free(A, num_kept_tokens=5) == 3
    assert kv.block_ids(A) == (first, second)
    assert kv.num_available_blocks == 3
    assert [kv.free(A, num_kept_tokens=number) for number in (5, 8, 9)] == [0, 0, 0]
    assert kv.free(B, num_kept_tokens=1) == 0
    # As long again as it was before, with other blocks: the table that is told is the one that is held.
    kv.allocate_slots(B, 4)
    kv.allocate_slots(A, 16)
    assert kv.block_ids(A)[:2] == (first, second)
    assert not set(kv.block_ids(A)) & set(kv.block_ids(B))
    assert set(kv.block_ids(A) + kv.block_ids(B)) == {first, second, *unused}
    kv.check_integrity()


def test_who_asks_again_is_told_what_has_come_and_what_has_gone():
    kv, text = make_manager(num_blocks=6, block_size=2), list(range(9))
    kv.allocate_slots(A, 8)

    def found() -> tuple[int, int]:
        match = kv.match_prefix(B, text, "key")
        assert match.block_ids == kv.match_prefix(SequenceId(99), text, "key").block_ids, "as if asked first"
        return match.num_tokens, match.num_unused

    assert found() == (0, 0)
    kv.offer(A, text, 4, "key")
    assert found() == (4, 0)
    kv.offer(A, text, 8, "key")
    assert found() == (8, 0)
    kv.free(A)
    assert found() == (8, 4)
    # Of six blocks four are kept: the last of the text is given up for this.
    kv.allocate_slots(SequenceId(3), 6)
    assert found() == (6, 3)
    kv.free(SequenceId(3))
    kv.flush()
    assert found() == (0, 0)


def test_a_block_that_holds_something_else_by_now_is_found_by_nobody_who_has_found_it_before():
    kv, text, other = make_manager(num_blocks=2, block_size=2), [1, 2, 3], [7, 8, 9]
    kv.allocate_slots(A, 2)
    kv.offer(A, text, 2, "key")
    assert kv.match_prefix(B, text, "key").num_tokens == 2
    kv.free(A)
    kv.flush()
    kv.allocate_slots(SequenceId(3), 4)
    kv.offer(SequenceId(3), [*other, 1], 4, "key")
    assert kv.match_prefix(B, text, "key").num_tokens == 0


def test_nothing_is_kept_for_a_sequence_that_has_found_its_beginning_and_never_ran():
    kv, text = make_manager(block_size=2), list(range(5))
    kv.allocate_slots(A, 4)
    kv.offer(A, text, 4, "key")
    assert kv.match_prefix(B, text, "key").num_tokens == 4
    assert kv.num_remembered > 0
    for sequence_id in (A, B):
        kv.free(sequence_id, is_over=True)
    assert kv.num_remembered == 0


def test_only_what_nobody_else_holds_would_be_free():
    kv, text, both = make_manager(num_blocks=6, block_size=2), list(range(7)), [A, B]
    kv.allocate_slots(A, 6)
    kv.offer(A, text, 4, "key")
    kv.adopt(B, kv.match_prefix(B, text, "key"))
    kv.allocate_slots(B, 7)
    assert [would_free(kv, n, [A]) for n in (1, 2)] == [True, False]
    assert [would_free(kv, n, [B]) for n in (2, 3)] == [True, False]
    assert [would_free(kv, n, both) for n in (5, 6)] == [True, False], "what both hold is free without both"
    assert [would_free(kv, n, both, kv.block_ids(A)[:2]) for n in (3, 4)] == [True, False]


def test_what_a_step_under_way_may_write_to_is_free_when_it_has_returned() -> None:
    kv = KVCacheManager(CacheLayout(6, 2))
    for number in (1, 2):
        kv.allocate_slots(SequenceId(number), 4)
    kv.under_way.note({SequenceId(1)})

    assert kv.free(SequenceId(1), is_over=True) == 2
    assert kv.free(SequenceId(2), is_over=True) == 2

    assert kv.block_ids(SequenceId(1)) == ()
    assert (kv.num_available_blocks, kv.num_live_blocks, kv.num_remembered) == (3, 2, 1)
    kv.check_integrity()
    assert kv.allocate_slots(SequenceId(3), 8) is None
    kv.under_way.note(())
    assert (kv.num_available_blocks, kv.num_live_blocks, kv.num_remembered) == (5, 0, 0)
    kv.check_integrity()


def test_what_is_given_back_waits_for_the_last_step_that_may_write_to_it() -> None:
    kv = KVCacheManager(CacheLayout(6, 2))
    for number in (1, 2):
        kv.allocate_slots(SequenceId(number), 4)
    kv.under_way.note({SequenceId(1), SequenceId(2)})
    kv.free(SequenceId(1))
    kv.free(SequenceId(2), num_kept_tokens=2)
    kv.under_way.note({SequenceId(2)})
    assert kv.num_live_blocks == 2
    kv.under_way.note(())
    assert kv.num_live_blocks == 1
    kv.check_integrity()


def test_a_block_that_is_worth_keeping_is_found_while_it_waits_to_be_free() -> None:
    kv = KVCacheManager(CacheLayout(6, 2))
    first, second = SequenceId(1), SequenceId(2)
    kv.allocate_slots(first, 3)
    kv.offer(first, [5, 6, 7], 2, "key")
    kv.under_way.note({first})
    kv.free(first, is_over=True)
    match = kv.match_prefix(second, [5, 6, 8], "key")
    assert match.num_tokens == 2
    kv.adopt(second, match)
    kv.under_way.note(())
    assert kv.num_live_blocks == 1
    kv.check_integrity()


def test_flushing_gives_up_what_waits_to_be_free_unless_somebody_else_holds_it() -> None:
    kv = KVCacheManager(CacheLayout(8, 2))
    first, second, third = (SequenceId(number) for number in range(3))
    token_ids = [5, 6, 7, 8, 9]
    kv.allocate_slots(first, 5)
    kv.offer(first, token_ids, 4, "key")
    kv.adopt(second, kv.match_prefix(second, [5, 6, 1], "key"))
    kv.under_way.note({first})
    kv.free(first, is_over=True)
    assert kv.flush() == 1
    kv.under_way.note(())
    assert kv.match_prefix(third, token_ids, "key").num_tokens == 2
    assert (kv.counts.cached, kv.num_live_blocks) == (0, 1)
    kv.check_integrity()
