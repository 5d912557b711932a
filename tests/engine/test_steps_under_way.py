"""No moment is counted for two steps, though two are under way."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.engine import LatencyTargets
from tests.support.ahead import Ahead


def test_no_moment_is_counted_for_two_steps() -> None:
    h = Ahead()
    h.add(max_tokens=6)
    took: list[float] = []
    h.core.latencies.set_targets(LatencyTargets(tpot_s=100.0))
    h.now_s = 10.0
    h.begin()
    h.now_s = 11.0
    h.ahead()
    for moment in (15.0, 18.0, 22.0, 27.0, 33.0):
        h.now_s = moment
        h.fetch()
        h.now_s += 0.5
        h.ahead()
    h.now_s = 40.0
    h.fetch()
    took = [stats.schedule_s + stats.execute_s + stats.update_s for stats in h.stats]
    assert [stats.started_s for stats in h.stats] == [10.0, 15.0, 18.0, 22.0, 27.0, 33.0]
    assert took == [5.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert [stats.schedule_s for stats in h.stats] == [0.0] * 6
    assert h.core.load.totals.step_s == 30.0


def test_what_a_step_costs_is_learned_from_the_time_between_two_results() -> None:
    """Else a step that was planned ahead would seem to take next to nothing."""

    def learned(run: Callable[[Ahead], None]) -> float:
        h = Ahead(max_model_len=400, num_blocks=100)
        h.core.latencies.set_targets(LatencyTargets(tpot_s=100.0))
        h.add(prompt=(5, 6, 7), max_tokens=300)
        run(h)
        return h.core.load.latency.predicted_step_s

    def ahead(h: Ahead) -> None:
        h.begin()
        h.ahead()
        for _ in range(200):
            h.now_s += 2.0
            h.fetch()
            h.ahead()

    def plain(h: Ahead) -> None:
        for _ in range(200):
            h.begin()
            h.now_s += 2.0
            h.fetch()

    assert learned(plain) == pytest.approx(2.0, rel=0.01)
    assert learned(ahead) == pytest.approx(2.0, rel=0.01)


def test_a_step_that_is_longer_than_its_target_leaves_is_counted_ahead_too() -> None:
    def num_over(*, is_ahead: bool) -> int:
        h = Ahead()
        h.core.latencies.set_targets(LatencyTargets(tpot_s=1.0))
        for _ in range(3):  # what a row or two take, no target is below
            h.add(max_tokens=20)
        h.begin()
        h.fetch()
        h.begin()
        for _ in range(10):
            if is_ahead:
                h.ahead()
            h.now_s += 3.0
            h.fetch()
            if not is_ahead:
                h.begin()
        h.fetch()
        h.core.begin_step()
        return h.core.load.latency.num_steps_over

    assert num_over(is_ahead=True) == num_over(is_ahead=False) == 10


def test_a_step_is_held_to_what_was_promised_when_it_was_planned() -> None:
    h = Ahead()
    for _ in range(3):
        h.add(max_tokens=20)
    h.begin()
    h.fetch()
    h.begin()
    h.core.latencies.set_targets(LatencyTargets(tpot_s=1.0))
    h.ahead()
    h.now_s += 100.0
    h.fetch()
    assert h.core.load.latency.num_steps_over == 0
    h.now_s += 100.0
    h.fetch()
    h.core.begin_step()
    assert h.core.load.latency.num_steps_over == 1
