from __future__ import annotations

import pytest

from headrace.clients.events import KvBlocks, Load, StepTotals
from headrace.clients.step_log import Work
from headrace.clients.top import Lane, TopState
from tests.support.step_reports import STEP_S, make_report, make_reports


def make_load(
    num_steps: int = 0, prefill: int = 0, output: int = 0, preemptions: int = 0, num_running: int = 2
) -> Load:
    totals = StepTotals(
        num_steps=num_steps,
        num_prefill_tokens=prefill,
        # With speculation fewer rows than tokens.
        num_decode_tokens=output // 2,
        num_output_tokens=output,
        num_preemptions=preemptions,
    )
    return Load(num_running, 1, 3, KvBlocks(100, 80, 0, 20), totals, "continuous", "tiny", 60.0)


def state_of(*steps: str, load: Load | None = None) -> TopState:
    state = TopState()
    state.take_load(load or make_load(), 0.0)
    for report in make_reports(1, *steps):
        state.take_step(report, report.start_s)
    return state


def test_rates_are_those_of_the_last_seconds_by_the_servers_own_counts() -> None:
    state = TopState()
    state.take_load(make_load(), 0.0)
    state.take_load(make_load(100, 1000, 100, preemptions=3), 20.0)
    state.take_load(make_load(110, 1000, 200, preemptions=3), 24.0)
    state.take_load(make_load(120, 1050, 300, preemptions=5), 25.0)
    shown = state.snapshot(25.0)
    assert (shown.output_tokens_per_s, shown.prefill_tokens_per_s, shown.steps_per_s) == (40, 10, 4)
    assert (shown.num_preemptions, shown.num_recent_preemptions) == (5, 2)
    assert shown.history == (55.0, 25.0, 150.0)


def test_a_first_look_has_no_rates_and_no_times() -> None:
    shown = state_of().snapshot(0.0)
    assert (shown.tokens_per_s, shown.steps_per_s, shown.parts, shown.history) == (0, 0, (), ())
    assert shown.lanes == (Lane(0), Lane(1), Lane(2))


def test_a_lane_tells_who_does_what_and_how_much() -> None:
    state = state_of("a .", "a b12", "a b", "a b", "a b/1")
    whole, half, idle = state.snapshot(1.0).lanes
    assert (whole.request, whole.work, whole.num_output_tokens) == ("97:a", Work.DECODE, 5)
    # It ran when the watch began: what came before is not known.
    assert not whole.is_whole
    assert whole.tokens_per_s == pytest.approx(1 / STEP_S)
    assert (half.request, half.index, half.num_output_tokens) == ("98:b", 1, 1)
    assert half.is_whole
    assert idle == Lane(2)


def test_what_begins_after_steps_that_were_not_seen_is_not_whole() -> None:
    state = state_of("a", "-", "-", "a b12")
    shown = state.snapshot(1.0)
    assert shown.num_missed == 2
    assert not shown.lanes[1].is_whole


def test_who_has_finished_leaves_an_idle_lane() -> None:
    assert [lane.request for lane in state_of("a! b", load=make_load()).snapshot(1.0).lanes] == [
        None,
        "98:b",
        None,
    ]


def test_a_server_with_nothing_to_do_has_idle_lanes_whatever_the_last_step_was() -> None:
    state = state_of("a b", load=make_load(num_running=0))
    assert all(lane.request is None for lane in state.snapshot(1.0).lanes)


def test_times_of_the_parts_are_those_of_recent_steps() -> None:
    state = state_of(*["a"] * 10)
    parts = {part.name: (part.p50_s, part.p99_s) for part in state.snapshot(1.0).parts}
    assert parts["step"] == pytest.approx((STEP_S, STEP_S))
    assert parts["schedule"] == pytest.approx((0.001, 0.001))
    assert list(parts) == ["step", "schedule", "execute", "update"]
    assert state.snapshot(100.0).parts == ()


def test_a_server_that_was_started_anew_begins_anew() -> None:
    state = state_of("a", "a", "-", "a", load=make_load(num_steps=100, output=500))
    assert state.snapshot(1.0).num_missed == 1
    state.take_step(make_report(1, "b"), 2.0)
    state.take_load(make_load(num_steps=1, output=1), 2.0)
    shown = state.snapshot(2.0)
    assert (shown.num_missed, shown.tokens_per_s) == (0, 0)
    assert shown.lanes[0] == Lane(0)
    state.take_step(make_report(2, "b"), 2.0)
    assert state.snapshot(2.0).lanes[0].request == "98:b"
