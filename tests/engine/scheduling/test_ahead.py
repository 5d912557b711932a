"""When a step is planned behind one that has not returned, and when that one has to be waited for."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.engine import LatencyTargets, SamplingParams, Speculation
from headrace.engine.scheduling.plan import UNKNOWN_TOKEN
from tests.support.ahead import Ahead
from tests.support.anything import Anything
from tests.support.requests import speculating


def test_each_row_goes_on_by_the_token_that_is_drawn_before_it() -> None:
    h = Ahead()
    h.add(prompt_len=3)
    h.add(prompt_len=5, sampling=SamplingParams(temperature=0.7, seed=3, num_logprobs=2))
    first = h.begin()

    plan = h.ahead()

    assert plan is not None
    assert (plan.step, plan.follows) == (first.step + 1, first.step)
    assert [row.takes_from for row in plan.rows] == [0, 1]
    assert [row.token_ids for row in plan.rows] == [(UNKNOWN_TOKEN,)] * 2
    assert [row.first_position for row in plan.rows] == [3, 5]
    # Of four tokens each: four fit in one, six in two.
    assert [len(row.block_ids) for row in plan.rows] == [1, 2]


def test_but_for_the_token_rows_are_those_of_a_step_that_was_waited_for() -> None:
    options: dict[str, Any] = {
        "prompt": (9, 8, 7),
        "sampling": SamplingParams(temperature=0.7, seed=3, num_logprobs=1, banned_token_ids=frozenset({5})),
        "max_tokens": 8,
        "min_tokens": 3,
        "stop_token_ids": frozenset({4}),
    }
    waited, ahead = Ahead(), Ahead()
    waited.add(**options)
    ahead.add(**options)
    known = [waited.step() for _ in range(8)]
    ahead.run_to_end()
    plans = ahead.plans

    for mine, theirs in zip(plans, known, strict=True):
        (row,), (other,) = mine.rows, theirs.rows
        assert row._replace(token_ids=other.token_ids, takes_from=None) == other
    assert [len(plan.rows[0].suppressed_token_ids) for plan in plans] == [2, 2, 2, 0, 0, 0, 0, 0]


def test_whoever_ends_by_its_length_is_left_out() -> None:
    h = Ahead()
    h.add(max_tokens=1)
    h.add(max_tokens=2)
    h.begin()
    plan = h.ahead()
    assert plan is not None
    assert [row.takes_from for row in plan.rows] == [1]


def test_there_is_no_step_behind_the_end_of_all() -> None:
    h = Ahead()
    h.add(max_tokens=1)
    h.begin()
    assert h.ahead() is None


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": SamplingParams(temperature=0.0, repetition_penalty=1.2)},
        {"sampling": SamplingParams(temperature=0.0, frequency_penalty=0.5)},
        {"sampling": SamplingParams(temperature=0.0, bad_words=((1, 2),))},
        {"sampling": SamplingParams(temperature=0.0, num_prompt_logprobs=1)},
        {"constraint": Anything()},
        {"prompt_len": 40, "max_tokens": 2},
    ],
    ids=["repetition", "frequency", "bad words", "prompt logprobs", "constraint", "a piece of a prompt"],
)
def test_what_is_drawn_is_waited_for_where_something_hangs_on_it(options: dict[str, Any]) -> None:
    h = Ahead()
    h.add()
    h.add(**options)
    h.begin()
    assert h.ahead() is None


def test_a_prompt_that_is_only_read_is_waited_for() -> None:
    h = Ahead()
    h.add(max_tokens=0, sampling=SamplingParams(temperature=0.0, num_prompt_logprobs=1))
    h.begin()
    assert h.ahead() is None


def test_no_step_is_planned_ahead_where_tokens_are_proposed() -> None:
    h = Ahead(config={"speculation": speculating(Speculation.PROMPT_LOOKUP)})
    h.add()
    h.step()
    h.begin()
    assert h.ahead() is None


def test_whoever_waits_joins_the_step_that_is_planned_ahead() -> None:
    h = Ahead(config={"max_num_seqs": 2})
    h.add(max_tokens=3)
    h.begin()
    h.add(prompt=(9, 8, 7))
    plan = h.ahead()
    assert plan is not None
    assert [(row.token_ids, row.takes_from) for row in plan.rows] == [
        ((UNKNOWN_TOKEN,), 0),
        ((9, 8, 7), None),
    ]
    assert plan.follows == 0
    assert h.core.load.num_waiting == 0


def test_whoever_joins_gets_what_the_others_leave_of_the_token_budget() -> None:
    h = Ahead(config={"max_num_seqs": 4, "max_num_batched_tokens": 8})
    for _ in range(2):
        h.add(prompt_len=2)
    h.begin()
    h.add(prompt=tuple(range(20)))
    plan = h.ahead()
    assert plan is not None
    assert [len(row.token_ids) for row in plan.rows] == [1, 1, 6]
    assert not plan.rows[2].is_sampled


def test_whoever_waits_while_all_slots_are_taken_waits_on() -> None:
    h = Ahead(config={"max_num_seqs": 2})
    for _ in range(3):
        h.add(max_tokens=3)
    h.begin()
    plan = h.ahead()
    assert plan is not None
    assert [row.takes_from for row in plan.rows] == [0, 1]
    assert h.core.load.num_waiting == 1


def test_a_slot_is_taken_until_its_last_step_has_returned() -> None:
    h = Ahead(config={"max_num_seqs": 1})
    h.add(max_tokens=1)
    h.add(max_tokens=3)
    h.begin()
    assert h.ahead() is None
    assert h.core.load.num_waiting == 1


def test_a_step_of_those_that_join_alone_follows_nobody() -> None:
    h = Ahead(config={"max_num_seqs": 2})
    h.add(max_tokens=1)
    h.begin()
    h.add(max_tokens=3)
    plan = h.ahead()
    assert plan is not None
    assert [row.takes_from for row in plan.rows] == [None]
    assert plan.follows is None


def test_nobody_is_left_behind_for_whom_the_step_had_no_token() -> None:
    """A prompt that a promised latency has kept out of one step may be due in the next."""
    h = Ahead()
    h.add(max_tokens=30)
    h.step()
    h.add(prompt_len=40)
    assert [len(row.token_ids) for row in h.step().rows] == [1, 15]
    h.core.latencies.set_targets(LatencyTargets(tpot_s=0.0001))
    assert [len(row.token_ids) for row in h.begin().rows] == [1]
    assert h.ahead() is None


@pytest.mark.parametrize(("num_blocks", "is_planned"), [(3, False), (4, True)])
def test_blocks_are_taken_where_they_are_free_and_only_then(num_blocks: int, *, is_planned: bool) -> None:
    h = Ahead(num_blocks=num_blocks, block_size=2, max_model_len=6)
    for _ in range(2):
        h.add(prompt_len=2, max_tokens=2)
    h.begin()
    live = h.core.load.blocks.live
    plan = h.ahead()
    assert (plan is not None) == is_planned
    assert h.core.load.blocks.live == live + 2 * is_planned


@pytest.mark.parametrize(("now_s", "is_planned"), [(4.9, True), (5.0, False)])
def test_a_paused_sequence_loses_its_blocks_when_that_is_due(now_s: float, *, is_planned: bool) -> None:
    h = Ahead(config={"paused_hold_s": 5.0})
    lagging = h.add()
    h.add(max_tokens=30)
    h.step()
    h.core.pause([lagging.request_id])
    h.begin()
    h.now_s = now_s
    assert (h.ahead() is not None) == is_planned
