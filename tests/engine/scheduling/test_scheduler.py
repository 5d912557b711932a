import pytest

from headrace.engine.config import BatchingPolicy
from headrace.engine.sequence import SequenceStatus
from tests.support.sequences import SchedulerHarness


def test_a_finished_sequence_s_slot_is_taken_in_the_very_next_step():
    h = SchedulerHarness(max_num_seqs=1)
    first = h.add(prompt_len=2, max_tokens=2)
    second = h.add(prompt_len=2, max_tokens=1)
    assert h.step() == {first.sequence_id: 2}
    assert h.step() == {first.sequence_id: 1}
    assert first.is_finished
    assert h.step() == {second.sequence_id: 2}


def test_decode_is_never_skipped_while_a_prompt_is_chunked():
    h = SchedulerHarness(max_num_batched_tokens=8)
    talker = h.add(prompt_len=2, max_tokens=20)
    h.step()
    reader = h.add(prompt_len=30, max_tokens=1)
    for _ in range(4):
        assert h.step() == {talker.sequence_id: 1, reader.sequence_id: 7}
    assert h.step() == {talker.sequence_id: 1, reader.sequence_id: 2}
    assert reader.is_finished


def test_an_older_prefill_does_not_take_the_budget_of_younger_decodes():
    h = SchedulerHarness(max_num_batched_tokens=8, max_prefill_chunk=4, num_blocks=100)
    reader = h.add(prompt_len=40, max_tokens=1)
    talker = h.add(prompt_len=2, max_tokens=9)
    assert h.step() == {reader.sequence_id: 4, talker.sequence_id: 2}
    for _ in range(8):
        assert h.step()[talker.sequence_id] == 1


def test_the_token_budget_holds_prefill_and_decode_together():
    h = SchedulerHarness(max_num_batched_tokens=10, max_num_seqs=8)
    for _ in range(8):
        h.add(prompt_len=7, max_tokens=6)
    while h.scheduler.running or h.scheduler.waiting:
        assert sum(h.step().values()) <= 10


def test_prompts_are_chunked_to_the_limit_of_one_sequence():
    h = SchedulerHarness(max_prefill_chunk=3)
    sequence = h.add(prompt_len=7, max_tokens=1)
    assert [h.step()[sequence.sequence_id] for _ in range(3)] == [3, 3, 1]


def test_the_youngest_gives_way_when_a_running_sequence_can_not_grow():
    h = SchedulerHarness(num_blocks=4, block_size=2, max_num_seqs=2)
    old = h.add(prompt_len=2, max_tokens=6)
    young = h.add(prompt_len=2, max_tokens=6)
    while not young.num_preemptions:
        h.step()
    assert old.num_preemptions == 0
    assert young.status is SequenceStatus.WAITING
    assert young.num_computed_tokens == 0
    assert young.batch_slot is None
    assert h.kv.block_ids(young.sequence_id) == ()
    h.run()
    assert old.is_finished
    assert young.is_finished
    assert h.kv.num_live_blocks == 0


def test_a_preempted_sequence_resumes_only_when_its_whole_known_length_fits():
    h = SchedulerHarness(num_blocks=5, block_size=2, max_num_seqs=2)
    old = h.add(prompt_len=3, max_tokens=7)
    young = h.add(prompt_len=3, max_tokens=5)
    while not young.num_preemptions:
        h.step()
    known = len(young.token_ids)
    while young.status is SequenceStatus.WAITING:
        h.step()
    assert h.kv.layout.num_blocks_for(known) <= 5 - len(h.kv.block_ids(old.sequence_id))
    h.run()
    assert young.num_preemptions == 1, "resumed only to be preempted again"


def test_a_preempted_sequence_is_served_before_later_arrivals():
    h = SchedulerHarness(num_blocks=4, block_size=2, max_num_seqs=2)
    h.add(prompt_len=2, max_tokens=6)
    young = h.add(prompt_len=2, max_tokens=6)
    while not young.num_preemptions:
        h.step()
    late = h.add(prompt_len=6, max_tokens=2)
    while young.status is SequenceStatus.WAITING:
        h.step()
    assert late.status is SequenceStatus.WAITING


def test_nobody_is_admitted_in_a_step_that_had_to_preempt():
    h = SchedulerHarness(num_blocks=6, block_size=2, max_num_seqs=2)
    h.add(prompt_len=2, max_tokens=10)
    young = h.add(prompt_len=2, max_tokens=10)
    late = h.add(prompt_len=1, max_tokens=1)
    while not young.num_preemptions:
        assert late.status is SequenceStatus.WAITING
        h.step()
    assert late.status is SequenceStatus.WAITING, (
        "took the blocks that somebody had just been made to give up"
    )
    h.run()
    assert late.is_finished


def test_a_sequence_that_does_not_fit_lets_small_ones_pass_but_not_for_ever():
    h = SchedulerHarness(num_blocks=10, block_size=2, max_num_seqs=3, max_num_skips=5)
    hog = h.add(prompt_len=10, max_tokens=10)
    h.step()
    big = h.add(prompt_len=16, max_tokens=2)
    smalls = [h.add(prompt_len=1, max_tokens=1) for _ in range(20)]
    while big.status is SequenceStatus.WAITING:
        h.step()
    passed = [s for s in smalls if s.is_finished]
    assert hog.is_finished
    assert big.num_skips == 5
    assert len(passed) == 5


def test_nobody_passes_when_passing_is_switched_off():
    h = SchedulerHarness(num_blocks=10, block_size=2, max_num_skips=0)
    h.add(prompt_len=10, max_tokens=10)
    h.step()
    big = h.add(prompt_len=16, max_tokens=2)
    small = h.add(prompt_len=1, max_tokens=1)
    while big.status is SequenceStatus.WAITING:
        h.step()
        assert small.status is SequenceStatus.WAITING or big.status is not SequenceStatus.WAITING


def test_arrivals_are_admitted_in_order():
    h = SchedulerHarness(max_num_seqs=2)
    sequences = [h.add(prompt_len=3, max_tokens=2) for _ in range(6)]
    started: list[int] = []
    while h.scheduler.running or h.scheduler.waiting:
        started += [i for i in h.step() if i not in started]
    assert started == [s.sequence_id for s in sequences]


def test_slots_are_kept_while_running_and_never_shared():
    h = SchedulerHarness(max_num_seqs=3)
    sequences = [h.add(prompt_len=2, max_tokens=2 + i % 4) for i in range(9)]
    slot_of: dict[int, int | None] = {}
    while h.scheduler.running or h.scheduler.waiting:
        h.step()
        running = [s for s in sequences if s.status is SequenceStatus.RUNNING]
        slots = [s.batch_slot for s in running]
        assert len(set(slots)) == len(slots)
        for s in running:
            assert s.batch_slot in range(3)
            assert slot_of.setdefault(s.sequence_id, s.batch_slot) == s.batch_slot


def test_one_client_s_thousand_requests_do_not_starve_another_s_one():
    h = SchedulerHarness(max_num_seqs=4, num_blocks=64, max_num_batched_tokens=64)
    for _ in range(1_000):
        h.add(client="flood", prompt_len=4, max_tokens=3)
    for _ in range(30):
        h.step()
    single = h.add(client="modest", prompt_len=4, max_tokens=3)
    # The next place that is free is its.
    while single.status is SequenceStatus.WAITING:
        h.step()
        assert h.num_steps <= 30 + 3


def test_clients_that_always_wait_get_equal_tokens_however_they_ask():
    h = SchedulerHarness(max_num_seqs=4, num_blocks=400, max_num_batched_tokens=256)
    for _ in range(300):
        h.add(client="short", prompt_len=2, max_tokens=1)
        h.add(client="long", prompt_len=40, max_tokens=15)
    both = h.scheduler.ledger
    for _ in range(120):
        h.step()
        # Four places: no more than so many requests are charged for ahead of the other client.
        assert abs(both.counter("short") - both.counter("long")) <= 4 * (40 + 2 * 15)
    tokens = {client: h.computed_of(client) for client in ("short", "long")}

    assert sum(tokens["long"]) > 500
    for client, (num_prompt, num_output) in tokens.items():
        assert both.counter(client) == num_prompt + 2 * num_output


def test_weights_divide_the_server_as_they_say():
    h = SchedulerHarness(max_num_seqs=1, client_weights={"gold": 3.0})
    for _ in range(60):
        h.add(client="gold", prompt_len=4, max_tokens=3)
        h.add(client="tin", prompt_len=4, max_tokens=3)
    ended = []
    while len(ended) < 40:
        h.step()
        ended = [s for s in h.sequences if s.is_finished]
    assert sum(s.request.client == "gold" for s in ended) == 30


def test_what_is_computed_again_is_charged_to_nobody():
    h = SchedulerHarness(num_blocks=4, block_size=2, max_num_seqs=2)
    h.add(client="a", prompt_len=2, max_tokens=6)
    young = h.add(client="b", prompt_len=2, max_tokens=6)
    h.run()
    assert young.num_preemptions == 1
    assert h.scheduler.ledger.counter("b") == 2 + 2 * 6


def test_a_higher_priority_is_admitted_first_but_takes_nobody_s_place():
    h = SchedulerHarness(max_num_seqs=1)
    running, waiting = h.add(max_tokens=5), h.add()
    h.step()
    urgent = h.add(priority=1)
    while not running.is_finished:
        assert urgent.status is SequenceStatus.WAITING
        h.step()
    h.step()
    assert urgent.status is SequenceStatus.RUNNING
    assert waiting.status is SequenceStatus.WAITING
    assert running.num_preemptions == 0


def test_nobody_starves_under_a_stream_of_higher_priority():
    h = SchedulerHarness(max_num_seqs=1, priority_ageing_s=5.0)
    low = h.add(priority=-2, max_tokens=1)
    while low.status is SequenceStatus.WAITING:
        h.add(priority=1, prompt_len=1, max_tokens=1)
        h.add(priority=1, prompt_len=1, max_tokens=1)
        h.step()
        # Three classes of 5 s each; a step is a second. Then it is the oldest of its class.
        assert h.num_steps <= 16
    assert h.num_steps == 16


@pytest.mark.parametrize("priority", [-1, 0, 1])
def test_the_lowest_priority_loses_its_blocks_first_and_of_equals_the_youngest(priority):
    h = SchedulerHarness(num_blocks=6, block_size=2, max_num_seqs=3)
    first = h.add(prompt_len=2, max_tokens=8, priority=priority)
    second = h.add(prompt_len=2, max_tokens=8)
    third = h.add(prompt_len=2, max_tokens=8)
    while not h.num_preemptions:
        h.step()
    victim = first if priority < 0 else third
    assert [s.num_preemptions for s in (first, second, third)] == [
        s is victim for s in (first, second, third)
    ]
    h.run()


def test_the_best_of_all_is_never_interrupted_and_nobody_s_place_is_won_by_turns():
    """Whatever the priorities: blocks go from lower ranks to better ones only, and between two preemptions of
    one sequence somebody has given up blocks."""
    h = SchedulerHarness(num_blocks=9, block_size=2, max_num_seqs=5, priority_ageing_s=3.0)
    number = 0
    for _ in range(400):
        if number < 60 and len(h.scheduler.waiting) < 6:
            h.add(
                prompt_len=1 + number * 5 % 7,
                max_tokens=1 + number * 3 % 11,
                priority=number * 7 % 5 - 2,
                client="ab"[number % 2],
            )
            number += 1
        ranks = {s.sequence_id: s.rank for s in h.scheduler.running}
        before = {s.sequence_id: s.num_preemptions for s in h.scheduler.running}
        h.step()
        preempted = [i for i, n in before.items() if h.by_id(i).num_preemptions > n]
        kept = [i for i in before if i not in preempted]
        assert not preempted or max(ranks[i] for i in kept) < min(ranks[i] for i in preempted)
    h.run()
    assert h.num_preemptions > 10
    assert all(s.is_finished for s in h.sequences)


@pytest.mark.parametrize("phase", ["waiting", "mid-prefill", "decoding", "preempted"])
def test_finishing_in_any_phase_gives_everything_back_once(phase):
    budget = 16 if phase == "preempted" else 2
    h = SchedulerHarness(num_blocks=4, block_size=2, max_num_seqs=2, max_num_batched_tokens=budget)
    other = h.add(prompt_len=2, max_tokens=6)
    sequence = h.add(prompt_len=3, max_tokens=5)
    arrived = {
        "waiting": lambda: True,
        "mid-prefill": lambda: 0 < sequence.num_computed_tokens < 3,
        "decoding": lambda: sequence.is_decoding,
        "preempted": lambda: sequence.num_preemptions > 0,
    }[phase]
    while not arrived():
        assert not sequence.is_finished, "the phase never came"
        h.step()
    h.scheduler.finish(sequence)
    h.scheduler.finish(sequence)
    assert sequence.is_finished
    assert h.kv.block_ids(sequence.sequence_id) == ()
    h.kv.check_integrity()
    h.run()
    assert other.is_finished
    assert h.kv.num_live_blocks == 0


def test_static_batching_lets_nobody_join_a_batch_that_has_lost_a_member():
    h = SchedulerHarness(max_num_seqs=2, batching=BatchingPolicy.STATIC)
    long = h.add(prompt_len=2, max_tokens=6)
    short = h.add(prompt_len=2, max_tokens=2)
    third = h.add(prompt_len=2, max_tokens=1)
    while not long.is_finished:
        h.step()
        assert third.status is SequenceStatus.WAITING
    assert short.is_finished
    assert h.step() == {third.sequence_id: 2}


def test_a_static_batch_may_form_over_several_steps_of_a_small_budget():
    h = SchedulerHarness(max_num_seqs=3, max_num_batched_tokens=4, batching=BatchingPolicy.STATIC)
    sequences = [h.add(prompt_len=4, max_tokens=5) for _ in range(4)]
    for _ in range(4):
        h.step()
    assert [s.status for s in sequences[:3]] == [SequenceStatus.RUNNING] * 3
    assert sequences[3].status is SequenceStatus.WAITING


def test_a_static_batch_waits_to_be_filled_and_begins_at_once_when_it_is():
    h = SchedulerHarness(max_num_seqs=3, batching=BatchingPolicy.STATIC, static_batch_wait_s=9.5)
    first = h.add(max_tokens=2)
    assert (h.step(), h.scheduler.due_s) == ({}, 9.5)
    second = h.add(max_tokens=2)
    assert (h.step(), h.scheduler.due_s) == ({}, 9.5)
    third = h.add(max_tokens=2)
    assert h.step().keys() == {s.sequence_id for s in (first, second, third)}
    assert h.scheduler.due_s is None


def test_a_static_batch_waits_no_longer_than_is_said_for_its_oldest():
    h = SchedulerHarness(max_num_seqs=3, batching=BatchingPolicy.STATIC, static_batch_wait_s=3.0)
    first = h.add(max_tokens=4)
    h.step()
    second = h.add(max_tokens=2)
    assert [h.step() for _ in range(2)] == [{}, {}]
    assert h.step().keys() == {first.sequence_id, second.sequence_id}
    # Who came while the last batch ran has waited already.
    third = h.add(max_tokens=1)
    while not first.is_finished:
        h.step()
    assert h.step() == {third.sequence_id: 4}


def test_who_leaves_while_a_static_batch_is_waited_for_leaves_nothing_to_wait_for():
    h = SchedulerHarness(max_num_seqs=3, batching=BatchingPolicy.STATIC, static_batch_wait_s=5.0)
    first = h.add()
    h.step()
    h.scheduler.finish(first)
    assert (h.step(), h.scheduler.due_s) == ({}, None)


def test_continuous_batching_waits_for_nobody():
    h = SchedulerHarness(max_num_seqs=3, static_batch_wait_s=5.0)
    assert h.step() == {}
    first = h.add()
    assert h.step() == {first.sequence_id: 4}


@pytest.mark.parametrize("batching", list(BatchingPolicy))
def test_twenty_over_eight_takes_the_steps_that_a_count_on_paper_gives(batching):
    lengths = [4, 30, 9, 2, 17, 25, 3, 12, 8, 40, 6, 5, 22, 3, 11, 28, 7, 2, 19, 10]
    h = SchedulerHarness(max_num_seqs=8, num_blocks=400, max_num_batched_tokens=64, batching=batching)
    for length in lengths:
        h.add(prompt_len=2, max_tokens=length)
    assert h.run() == count_steps(lengths, 8, batching)


def count_steps(lengths: list[int], num_slots: int, batching: BatchingPolicy) -> int:
    """Steps for requests of these output lengths, prompts taken in one step each."""
    if batching is BatchingPolicy.STATIC:
        return sum(max(lengths[i : i + num_slots]) for i in range(0, len(lengths), num_slots))
    waiting, running, steps = lengths[::-1], [], 0
    while waiting or running:
        while waiting and len(running) < num_slots:
            running.append(waiting.pop())
        steps += 1
        running = [left - 1 for left in running if left > 1]
    return steps
