"""The step behind is planned while one runs: what of it is void, and whose the blocks are meanwhile."""

from __future__ import annotations

import pytest

from headrace.engine import (
    EngineDead,
    FailureEvent,
    FinishEvent,
    FinishReason,
    IntegrityError,
    LatencyTargets,
    RequestId,
)
from tests.support.ahead import Ahead
from tests.support.fake_runner import expected_output


def after(prompt: tuple[int, ...], number: int) -> int:
    """The token of this number that follows a prompt."""
    return expected_output(prompt, number)[-1]


PROMPT = (5, 6, 7)


def test_a_step_needs_one_under_way_to_be_planned_behind() -> None:
    h = Ahead()
    h.add()
    assert h.core.begin_step(ahead=True) is None
    h.begin()
    assert h.ahead() is not None
    assert h.core.num_under_way == 2
    assert h.core.begin_step(ahead=True) is None
    with pytest.raises(IntegrityError, match="never finished"):
        h.core.begin_step()


def test_steps_are_finished_in_the_order_of_their_plans() -> None:
    h = Ahead()
    request = h.add(prompt=PROMPT, max_tokens=6)
    h.run_to_end()
    assert h.tokens(request) == expected_output(PROMPT, 6)
    assert [stats.step for stats in h.stats] == list(range(6))
    assert [stats.is_ahead for stats in h.stats] == [False] + [True] * 5
    totals = h.core.load.totals
    assert (totals.num_steps, totals.num_ahead_steps) == (6, 5)


def test_whoever_ends_by_what_is_drawn_leaves_a_void_row_behind() -> None:
    h = Ahead()
    stop = after(PROMPT, 2)
    ending, other = h.add(prompt=PROMPT, stop_token_ids=frozenset({stop})), h.add(prompt=(1,), max_tokens=5)
    h.run_to_end()
    assert h.tokens(ending) == expected_output(PROMPT, 2)
    assert h.tokens(other) == expected_output((1,), 5)
    (end,) = h.ends(ending)
    assert isinstance(end, FinishEvent)
    assert (end.reason, end.matched_stop, end.usage.num_completion_tokens) == (FinishReason.STOP, stop, 2)
    # Its third row was computed, and nobody is told of it.
    assert [len(stats.rows) for stats in h.stats] == [2, 2, 1, 1, 1]
    assert [plan.num_tokens for plan in h.plans] == [4, 2, 2, 1, 1]
    totals = h.core.load.totals
    assert (totals.num_prefill_tokens, totals.num_decode_tokens) == (4, 5)


def test_a_void_row_keeps_its_blocks_until_its_step_has_returned() -> None:
    h = Ahead(block_size=1, num_blocks=20)
    h.add(prompt=PROMPT, stop_token_ids=frozenset({after(PROMPT, 1)}), uses_prefix_cache=False)
    h.add(prompt=(1,), max_tokens=9, uses_prefix_cache=False)
    h.begin()
    behind = h.ahead()
    assert behind is not None
    void = set(behind.rows[0].block_ids)
    assert len(void) == 4
    h.fetch()
    assert h.core.load.num_running == 1
    # The three of its prompt and the one that is being written to are nobody else's yet.
    assert h.core.load.blocks.live == 4 + 2
    third = h.ahead()
    assert third is not None
    assert void.isdisjoint(third.rows[0].block_ids)
    h.fetch()
    assert h.core.load.blocks.live == 3
    h.run_to_end()
    assert h.core.load.blocks.live == 0


def test_nothing_of_a_void_row_is_found_in_the_prefix_cache() -> None:
    """Its step fills a block; the text of that block was never said."""
    h = Ahead(block_size=4)
    stop = after(PROMPT, 1)
    ending = h.add(prompt=PROMPT, stop_token_ids=frozenset({stop}))
    h.begin()
    h.ahead()
    h.fetch()
    h.fetch()
    assert h.tokens(ending) == [stop]
    assert h.core.load.blocks.cached == 0


def test_a_request_that_is_cancelled_while_a_step_runs_gets_nothing_of_it() -> None:
    h = Ahead(block_size=1)
    request = h.add(prompt=PROMPT, max_tokens=20, uses_prefix_cache=False)
    h.begin()
    h.ahead()
    h.fetch()
    h.events += h.core.abort([request.request_id])
    (end,) = h.ends(request)
    assert isinstance(end, FinishEvent)
    assert end.reason is FinishReason.CANCELLED
    assert not h.core.has_work
    assert h.ahead() is None
    assert h.core.load.blocks.live == 4
    assert h.fetch() == []
    assert h.stats[-1].rows == ()
    assert h.tokens(request) == expected_output(PROMPT, 1)
    assert h.core.load.blocks.live == 0
    h.core.check_integrity()


@pytest.mark.parametrize("num_under_way", [1, 2])
def test_whoever_is_ended_before_its_first_step_returns_gets_nothing_of_any(num_under_way: int) -> None:
    h = Ahead(block_size=1)
    request, other = h.add(prompt=PROMPT, max_tokens=20), h.add(prompt=(1,), max_tokens=4)
    h.begin()
    if num_under_way == 2:
        h.ahead()
    h.events += h.core.abort([request.request_id])
    assert h.core.load.blocks.live == (6 if num_under_way == 2 else 4)
    h.run_to_end()
    assert h.tokens(request) == []
    assert len(h.ends(request)) == 1
    assert h.tokens(other) == expected_output((1,), 4)


@pytest.mark.parametrize("limit", ["time_limit_s", "deadline_s"])
def test_time_runs_out_while_steps_are_under_way(limit: str) -> None:
    h = Ahead()
    request = h.add(prompt=PROMPT, max_tokens=20, **{limit: 5.0})
    h.begin()
    h.ahead()
    h.now_s = 6.0
    h.fetch()
    h.events += h.core.expire()
    assert len(h.ends(request)) == 1
    h.run_to_end()
    assert h.tokens(request) == expected_output(PROMPT, 1)
    assert len(h.ends(request)) == 1


def test_a_request_that_is_paused_while_a_step_runs_draws_its_token_again_when_it_goes_on() -> None:
    h = Ahead(block_size=1)
    request, other = h.add(prompt=PROMPT, max_tokens=6), h.add(prompt=(1,), max_tokens=9)
    h.begin()
    h.ahead()
    h.fetch()
    assert h.core.pause([request.request_id]) == []
    h.ahead()
    h.core.resume([request.request_id])
    h.fetch()
    assert h.tokens(request) == expected_output(PROMPT, 1)
    h.run_to_end()
    assert h.tokens(request) == expected_output(PROMPT, 6)
    assert h.tokens(other) == expected_output((1,), 9)


def test_a_paused_request_does_not_come_back_while_a_void_row_of_it_is_under_way() -> None:
    """Else that row would look alive, and its token would be told twice."""
    h = Ahead(block_size=1)
    request, other = h.add(prompt=PROMPT, max_tokens=6), h.add(prompt=(1,), max_tokens=9)
    h.begin()
    h.ahead()
    h.fetch()
    h.core.pause([request.request_id])
    h.core.resume([request.request_id])
    plan = h.ahead()
    assert plan is not None
    assert len(plan.rows) == 1
    h.run_to_end()
    assert h.tokens(request) == expected_output(PROMPT, 6)
    assert h.tokens(other) == expected_output((1,), 9)


def test_whoever_loses_its_blocks_to_one_that_joins_ahead_is_counted_once() -> None:
    h = Ahead(num_blocks=6, block_size=2, max_model_len=12, config={"max_num_seqs": 2})
    lagging, other = h.add(prompt_len=4, max_tokens=6), h.add(prompt_len=2, max_tokens=6)
    h.begin()
    h.fetch()
    h.core.pause([lagging.request_id])
    h.begin()
    h.add(prompt_len=6, max_tokens=2, uses_prefix_cache=False)
    assert h.core.load.totals.num_preemptions == 0
    plan = h.ahead()
    assert plan is not None
    assert len(plan.rows) == 2
    assert h.core.load.totals.num_preemptions == 1
    h.fetch()
    assert (h.stats[-1].num_preemptions, h.core.load.totals.num_preemptions) == (0, 1)
    h.fetch()
    assert (h.stats[-1].num_preemptions, h.core.load.totals.num_preemptions) == (1, 1)
    h.core.resume([lagging.request_id])
    h.run_to_end()
    assert h.tokens(lagging) == expected_output(lagging.prompt_token_ids, 6)
    assert h.tokens(other) == expected_output(other.prompt_token_ids, 6)


def test_nobody_loses_blocks_in_place_of_one_whose_blocks_come_free_when_its_step_has_returned() -> None:
    h = Ahead(num_blocks=13, block_size=1, max_model_len=13, config={"max_num_seqs": 3})
    goes_on = h.add(prompt_len=1, max_tokens=9)
    paused, last = (h.add(prompt_len=3, max_tokens=5) for _ in range(2))
    h.begin()
    h.fetch()
    h.core.pause([paused.request_id])
    h.begin()
    h.ahead()
    h.fetch()
    h.core.pause([last.request_id])
    # Who comes now gets the blocks of the last one, a step later.
    comes = h.add(prompt_len=4, max_tokens=1)
    plan = h.ahead()
    assert plan is not None
    assert len(plan.rows) == 1
    assert h.core.load.totals.num_preemptions == 0
    h.fetch()
    plan = h.ahead()
    assert plan is not None
    assert len(plan.rows) == 2
    assert h.core.load.totals.num_preemptions == 1
    h.core.resume([paused.request_id, last.request_id])
    h.run_to_end()
    for request, num_tokens in ((goes_on, 9), (paused, 5), (last, 5), (comes, 1)):
        assert h.tokens(request) == expected_output(request.prompt_token_ids, num_tokens)


def test_a_row_that_fails_makes_the_one_behind_it_void() -> None:
    h = Ahead()
    bad, good = h.add(prompt=PROMPT), h.add(prompt=(1,), max_tokens=4)
    h.begin()
    h.ahead()
    ((request_id, event), _) = h.fetch(spoilt=0)
    assert request_id == bad.request_id
    assert isinstance(event, FailureEvent)
    h.run_to_end()
    assert h.tokens(bad) == []
    assert len(h.ends(bad)) == 1
    assert h.tokens(good) == expected_output((1,), 4)


def test_siblings_of_a_sequence_that_fails_leave_void_rows() -> None:
    h = Ahead()
    request = h.add(prompt=PROMPT, n=2, max_tokens=9)
    h.begin()
    h.fetch()
    h.begin()  # the second one joins
    h.ahead()
    h.fetch(spoilt=1)
    assert len(h.ends(request)) == 1
    h.run_to_end()
    assert len(h.ends(request)) == 1
    assert h.stats[-1].rows == ()


def test_an_engine_that_stops_ends_everybody_while_a_step_is_under_way() -> None:
    h = Ahead()
    requests = [h.add(prompt=(i,), max_tokens=9) for i in range(3)]
    h.begin()
    h.ahead()
    h.fetch()
    h.events += h.core.fail_all(EngineDead("over"))
    h.fetch()
    assert [len(h.ends(request)) for request in requests] == [1, 1, 1]
    h.core.check_integrity()


def test_slots_are_counted_as_used_for_those_who_still_hold_them() -> None:
    h = Ahead()
    prompt = tuple(range(12))
    ending = [h.add(prompt=prompt)]
    h.step()
    ending.append(h.add(prompt=prompt))
    staying = h.add(prompt=prompt)
    h.begin()
    assert h.ahead() is not None
    # What they shared with the one that stays is in no table of theirs any more, though it can't be free yet.
    h.events += h.core.abort([request.request_id for request in ending])
    h.fetch()
    assert h.stats[-1].num_kv_slots_used == len(prompt)
    h.fetch()
    assert h.stats[-1].num_kv_slots_used == len(prompt) + 1
    h.run_to_end()
    assert h.tokens(staying) == expected_output(prompt, 8)


def test_preemption_waits_until_nothing_is_under_way() -> None:
    """Two sequences that outgrow the pool together: a step is not planned ahead without the blocks for it."""
    h = Ahead(num_blocks=5, block_size=2, max_model_len=40)
    requests = [h.add(prompt_len=2, max_tokens=8) for _ in range(2)]
    h.run_to_end()
    for request in requests:
        assert h.tokens(request) == expected_output(request.prompt_token_ids, 8)
    assert h.core.load.totals.num_preemptions == 1
    assert sum(stats.num_preemptions for stats in h.stats) == 1
    assert any(plan.follows is not None for plan in h.plans)


def test_the_lead_that_a_stream_has_over_its_promise_is_lent_once() -> None:
    """To the prompt in the step under way: what comes behind it gets what is left."""
    h = Ahead(num_blocks=300, max_model_len=256, config={"max_num_batched_tokens": 300})
    h.core.latencies.set_targets(LatencyTargets(tpot_s=0.02), None)
    h.add(max_tokens=20)
    for _ in range(5):
        h.begin()
        h.fetch()
    # Five tokens at once: the next is due in 95 ms. By the prices that are believed at first a step takes 8,
    # and 0.3 for each token; so this one takes 70, and leaves 44 until the one after that is due.
    h.add(prompt_len=200, uses_prefix_cache=False)
    assert [len(row.token_ids) for row in h.begin().rows] == [1, 200]
    h.add(prompt_len=200, uses_prefix_cache=False)
    plan = h.ahead()
    assert plan is not None
    decode, _, prompt = (len(row.token_ids) for row in plan.rows)
    assert decode == 1
    assert 100 < prompt < 120
    h.run_to_end()


def test_ids_of_requests_that_are_gone_are_passed_over() -> None:
    h = Ahead()
    h.add(max_tokens=3)
    h.begin()
    h.ahead()
    assert h.core.abort([RequestId("nobody")]) == []
    h.run_to_end()
