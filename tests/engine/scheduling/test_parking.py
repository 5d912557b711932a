"""Paused sequences: they hold no place, and their blocks only as long as nobody needs them."""

import pytest

from headrace.engine.config import BatchingPolicy
from headrace.engine.sequence import SequenceStatus
from tests.support.sequences import SchedulerHarness


def make_harness(**options: object) -> SchedulerHarness:
    return SchedulerHarness(**options)  # type: ignore[arg-type]  # checked by the harness


def test_a_paused_sequence_gives_its_place_to_the_next_at_once_and_keeps_its_blocks() -> None:
    harness = make_harness(max_num_seqs=1)
    first, second = harness.add(max_tokens=8), harness.add(max_tokens=8)
    harness.step()
    held = harness.kv.block_ids(first.sequence_id)
    harness.scheduler.pause(first, 1.0)
    assert harness.step() == {second.sequence_id: 4}
    assert (first.status, first.batch_slot) == (SequenceStatus.PAUSED, None)
    assert harness.kv.block_ids(first.sequence_id) == held[:1], "the blocks of what is computed, and no more"
    assert first.num_preemptions == 0


def test_who_goes_on_computes_nothing_again_that_it_still_holds() -> None:
    harness = make_harness()
    sequence = harness.add(prompt_len=6)
    harness.step()
    harness.scheduler.pause(sequence, 1.0)
    assert harness.step() == {}
    harness.scheduler.resume(sequence, 2.0)
    assert harness.step() == {sequence.sequence_id: 1}
    harness.run()
    assert sequence.num_preemptions == 0


def test_who_goes_on_waits_for_a_place_where_its_arrival_puts_it() -> None:
    harness = make_harness(max_num_seqs=1)
    first, second = harness.add(max_tokens=8), harness.add(max_tokens=2)
    harness.step()
    harness.scheduler.pause(first, 1.0)
    harness.step()
    third = harness.add()
    harness.scheduler.resume(first, 2.0)
    assert harness.step() == {second.sequence_id: 1}, "nobody who runs is put out for it"
    assert harness.step() == {first.sequence_id: 1}, "it came before the third"
    assert third.status is SequenceStatus.WAITING


@pytest.mark.parametrize("asks", ["one that grows", "one that waits"])
def test_whoever_needs_blocks_gets_those_of_a_paused_one_before_anybody_who_runs_loses_any(asks: str) -> None:
    harness = make_harness(num_blocks=5, block_size=4, max_num_batched_tokens=32)
    paused, running = harness.add(prompt_len=7, max_tokens=9), harness.add(prompt_len=7, max_tokens=9)
    harness.step()
    harness.scheduler.pause(paused, 0.0)
    if asks == "one that waits":
        waiting = harness.add(prompt_len=7, max_tokens=1)
        harness.step()
        assert waiting.num_computed_tokens == 7
    else:
        harness.run()
    assert running.num_preemptions == 0
    assert (paused.num_preemptions, paused.num_computed_tokens) == (1, 0)
    assert harness.kv.block_ids(paused.sequence_id) == ()
    assert harness.num_preemptions == 1, "it is told of as any preemption"
    harness.scheduler.resume(paused, 9.0)
    harness.run()
    assert paused.num_output_tokens == 9


def test_blocks_that_are_in_nobodys_way_are_held_for_a_while_and_no_longer() -> None:
    harness = make_harness(paused_hold_s=2.0)
    sequence = harness.add()
    harness.step()
    harness.scheduler.pause(sequence, 1.0)
    assert harness.step() == {}
    dues = [harness.scheduler.due_s]
    harness.step()
    assert harness.kv.counts.live > 0
    harness.step()
    assert harness.kv.counts.live == 0
    dues.append(harness.scheduler.due_s)
    assert dues == [3.0, None], "nothing is waited for then but its reader"
    assert (harness.num_preemptions, sequence.num_preemptions) == (1, 1)


def test_a_paused_sequence_is_not_stripped_for_one_that_would_not_fit_anyway() -> None:
    harness = make_harness(num_blocks=6, block_size=4, max_num_batched_tokens=64)
    paused, running = harness.add(prompt_len=4, max_tokens=2), harness.add(prompt_len=12, max_tokens=9)
    harness.step()
    harness.scheduler.pause(paused, 0.0)
    large = harness.add(prompt_len=20, max_tokens=4)
    harness.step()
    assert harness.kv.block_ids(paused.sequence_id) != ()
    assert large.status is SequenceStatus.WAITING
    assert running.num_output_tokens == 2


def test_blocks_that_others_hold_too_are_nobodys_to_give_up() -> None:
    harness = make_harness(num_blocks=8, block_size=4, max_num_batched_tokens=64, prefix_caching=True)
    running = harness.add(prompt=tuple(range(9)), max_tokens=9)
    harness.step()
    paused = harness.add(prompt=tuple(range(9)), max_tokens=9)
    harness.step()
    shared = harness.kv.block_ids(running.sequence_id)[:2]
    assert harness.kv.block_ids(paused.sequence_id)[:2] == shared
    harness.scheduler.pause(paused, 0.0)
    large = harness.add(prompt_len=20, max_tokens=4)
    harness.step()
    # Four are free, of which the running one needs one soon, and the paused one has but one of its own.
    assert (large.status, paused.num_preemptions) == (SequenceStatus.WAITING, 0)
    smaller = harness.add(prompt_len=16, max_tokens=4)
    harness.step()
    assert (smaller.status, paused.num_preemptions) == (SequenceStatus.RUNNING, 1)


def test_blocks_of_one_that_waits_again_are_not_counted_where_it_keeps_them() -> None:
    harness = make_harness(num_blocks=9, block_size=4, max_num_batched_tokens=64)
    running = harness.add(prompt_len=9, max_tokens=9)
    paused, again = harness.add(prompt_len=2, max_tokens=2), harness.add(prompt_len=10, max_tokens=9)
    harness.step()
    harness.scheduler.pause(paused, 0.0)
    harness.scheduler.pause(again, 0.0)
    harness.scheduler.resume(again, 0.0)
    large = harness.add(prompt_len=16, max_tokens=4, priority=50)
    harness.step()
    assert (large.status, running.num_preemptions) == (SequenceStatus.WAITING, 0)
    assert (again.status, again.num_preemptions) == (SequenceStatus.RUNNING, 0)
    assert paused.num_preemptions == 0


def test_one_that_may_be_passed_no_more_gets_the_blocks_of_those_that_wait_again() -> None:
    harness = make_harness(num_blocks=4, block_size=4, max_num_seqs=1, max_num_skips=0)
    early, large = harness.add(prompt_len=8, max_tokens=2), harness.add(prompt_len=12, max_tokens=2)
    later = harness.add(prompt_len=4, max_tokens=8)
    harness.step()
    harness.scheduler.pause(early, 0.0)
    harness.scheduler.finish(large)
    harness.step()
    harness.scheduler.pause(later, 0.0)
    harness.scheduler.resume(later, 0.0)
    first = harness.add(prompt_len=16, max_tokens=0, priority=50)
    harness.step()
    assert first.status is SequenceStatus.RUNNING, "nobody runs: the first of all is let in"
    assert harness.kv.block_ids(early.sequence_id) == harness.kv.block_ids(later.sequence_id) == ()


@pytest.mark.parametrize("phase", ["waiting", "running", "paused", "stripped", "waiting again"])
def test_an_end_in_every_phase_leaves_nothing_behind(phase: str) -> None:
    harness = make_harness(paused_hold_s=0.0 if phase == "stripped" else 100.0)
    sequence = harness.add()
    if phase != "waiting":
        harness.step()
    if phase in ("paused", "stripped", "waiting again"):
        harness.scheduler.pause(sequence, 0.0)
    if phase == "stripped":
        harness.step()
    if phase == "waiting again":
        harness.scheduler.resume(sequence, 0.0)
    harness.scheduler.finish(sequence)
    assert harness.kv.counts.live == harness.scheduler.computed.num_held == 0
    assert harness.scheduler.parking.num_paused == len(harness.scheduler.waiting) == 0
    assert not harness.scheduler.parking.is_holding
    other = harness.add()
    harness.run()
    assert other.num_output_tokens == 8


def test_a_client_whose_reader_was_away_has_no_claim_to_what_others_had_meanwhile() -> None:
    harness = make_harness(max_num_seqs=1)
    lazy = harness.add(client="lazy", max_tokens=4)
    harness.step()
    harness.scheduler.pause(lazy, 0.0)
    for _ in range(20):
        harness.add(client="busy", max_tokens=8)
    for _ in range(80):
        harness.step()
    busy = harness.scheduler.ledger.counter("busy")
    harness.scheduler.resume(lazy, 80.0)
    assert harness.scheduler.ledger.counter("lazy") >= busy - 20.0


def test_how_long_a_reader_held_it_up_is_no_matter_of_a_promised_pace() -> None:
    harness = make_harness()
    sequence = harness.add()
    harness.step()
    sequence.first_token_s = 1.0
    harness.scheduler.pause(sequence, 2.0)
    harness.scheduler.resume(sequence, 7.5)
    assert sequence.paused_s == 5.5


def test_who_was_late_before_a_pause_need_not_be_after_it() -> None:
    harness = make_harness()
    waiting = harness.scheduler.waiting
    late = harness.add()
    waiting.put_off(late)
    harness.scheduler.pause(late, 0.0)
    harness.scheduler.resume(late, 1.0)
    assert waiting.num_in_time == len(waiting) == 1
    assert list(waiting.in_order(1.0)) == [late]


@pytest.mark.parametrize("how", ["paused", "preempted"])
def test_who_has_begun_waits_by_its_arrival_whatever_it_was_before(how: str) -> None:
    harness = make_harness(num_blocks=4, block_size=4)
    first, late = harness.add(prompt_len=3, max_tokens=10), harness.add(prompt_len=3, max_tokens=10)
    harness.scheduler.waiting.put_off(late)
    harness.step()
    if how == "preempted":
        while late.num_preemptions == 0:
            harness.step()
    else:
        harness.scheduler.pause(late, 0.0)
        harness.scheduler.resume(late, 0.0)
    assert first.num_preemptions == 0
    assert harness.scheduler.waiting.num_in_time == 1


def test_nobody_takes_the_place_in_a_static_batch_that_is_another_ones() -> None:
    harness = make_harness(max_num_seqs=3, max_num_batched_tokens=4, batching=BatchingPolicy.STATIC)
    first, second, third = (harness.add(prompt_len=2, max_tokens=4) for _ in range(3))
    harness.step()
    assert third.status is SequenceStatus.WAITING, "it has a place, but there were no tokens left"
    harness.scheduler.pause(first, 0.0)
    harness.scheduler.resume(first, 0.0)
    while not second.is_finished:
        harness.step()
        assert first.status is SequenceStatus.WAITING, "its place was given once"
    harness.step()
    assert [first.status, third.status] == [SequenceStatus.RUNNING] * 2
