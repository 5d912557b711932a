from __future__ import annotations

import logging
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine import EngineConfig, ModelConfig
from headrace.engine.config import CacheLayout, LatencyConfig, LatencyTargets, SchedulerConfig
from headrace.engine.errors import ConfigError, Overloaded
from headrace.engine.kv.manager import KVCacheManager
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.scheduling.budget import LatencyBudget, LatencyDesk
from headrace.engine.scheduling.cost_model import StepCostModel, StepPrices
from headrace.engine.scheduling.fairness import ClientLedger
from headrace.engine.scheduling.plan import ScheduledSequence, StepPlan
from headrace.engine.scheduling.queue import WaitingQueue
from headrace.engine.scheduling.scheduler import Scheduler
from headrace.engine.sequence import Sequence, SequenceId, SequenceStatus
from tests.support.requests import make_request
from tests.support.sequences import make_sequence
from tests.support.virtual_time import Arrival, Machine, Served, poisson, simulate

# A step of 10 ms, 1 ms for a prompt token, 2 ms for a row that decodes.
PLAIN = StepPrices(0.010, 0.001, 0.002, 0.0, 0.0)
# A small model on two cores.
SMALL = StepPrices(6.7e-3, 2.8e-4, 2.6e-4, 4e-7, 4e-8)


def budget_of(
    tpot_s: float | None = None, ttft_s: float | None = None, **of_class: LatencyTargets
) -> LatencyBudget:
    """A budget over `PLAIN`; classes are named p1, p2, …"""
    by_priority = {int(name[1:]): targets for name, targets in of_class.items()}
    config = LatencyConfig(LatencyTargets(tpot_s, ttft_s), by_priority)
    return LatencyBudget(config, StepCostModel(PLAIN))


def lone_step(step: int = 1) -> StepPlan:
    """A step in which a single sequence decodes its sixth token."""
    row = ScheduledSequence(SequenceId(0), 5, (1,), 0, (1, 2), True, SamplingParams(), num_prompt_tokens=4)
    return StepPlan(step, (row,))


def decoding(num_tokens: int, first_token_s: float, *, priority: int = 0) -> Sequence:
    """A sequence that decodes and has got so many tokens."""
    sequence = make_sequence(max_tokens=1000, priority=priority)
    sequence.transition(SequenceStatus.RUNNING)
    sequence.token_ids += [0] * num_tokens
    sequence.num_computed_tokens = len(sequence.token_ids) - 1
    sequence.first_token_s = first_token_s
    return sequence


def config_of(
    num_seqs: int, num_tokens: int, targets: LatencyTargets | None = None, *, refuses_late: bool = False
) -> EngineConfig:
    return EngineConfig(
        ModelConfig(Path("unused")),
        scheduler=SchedulerConfig(num_seqs, num_tokens, max_num_waiting=10**6, max_waiting_tokens=10**9),
        latency=LatencyConfig(targets or LatencyTargets(), refuses_late=refuses_late),
    )


def goodput(served: list[Served], targets: LatencyTargets) -> int:
    return sum(one.meets(targets) for one in served)


# ---- what one step may hold, on a machine whose prices are known exactly


def test_without_targets_a_step_holds_everything() -> None:
    allowance = budget_of().begin_step([decoding(5, 0.0)], 1, 100.0)
    assert allowance.chunk_len(0, 10**6) == 10**6


def test_a_step_holds_what_the_least_slack_leaves_to_prompts() -> None:
    # Aim: 95 ms of 100. Token 3 of the first is due at 0.285 s, token 2 of the second at 1.19 s.
    running = [decoding(3, 0.0), decoding(2, 1.0)]
    allowance = budget_of(tpot_s=0.1).begin_step(running, 1, now_s=0.15)
    # 135 ms, less 14 for two decodes.
    assert allowance.chunk_len(0, 1000) == 120


def test_a_sequence_that_is_ahead_lends_its_lead() -> None:
    allowance = budget_of(tpot_s=0.1).begin_step([decoding(10, 0.0)], 1, now_s=0.15)
    # 950 - 150 ms, less 12 for one decode.
    assert allowance.chunk_len(0, 1000) == 787


def test_a_sequence_that_is_behind_bears_four_fifths_of_its_target() -> None:
    allowance = budget_of(tpot_s=0.1).begin_step([decoding(3, 0.0)], 1, now_s=99.0)
    # 76 ms, less 12.
    assert allowance.chunk_len(0, 1000) == 63


def test_who_has_no_target_does_not_limit_a_step() -> None:
    budget = budget_of(p5=LatencyTargets(tpot_s=0.1))
    assert budget.begin_step([decoding(3, 0.0)], 1, 99.0).chunk_len(0, 1000) == 1000
    with_fifth = [decoding(3, 0.0), decoding(3, 0.0, priority=5)]
    assert budget.begin_step(with_fifth, 1, 99.0).chunk_len(0, 1000) == 61


def test_for_a_target_out_of_reach_three_times_the_shortest_step_is_planned() -> None:
    budget = budget_of(tpot_s=0.001)
    budget.observe(lone_step(), 0.012, budget.allowance)
    # Aim: 36 ms. Token 3 is due at 108 ms: 106 ms, less 12 for the decode.
    assert budget.begin_step([decoding(3, 0.0)], 1, now_s=0.002).chunk_len(0, 1000) == 93


def test_a_target_that_can_just_be_kept_leaves_prompts_a_quarter_of_the_shortest_step() -> None:
    budget = budget_of(tpot_s=0.0151)
    budget.observe(lone_step(), 0.012, budget.allowance)
    # Aim: 15 ms, 1.25 times the 12 of a single row. Token 3 is due at 45 ms: 43 ms, less 12 for the decode.
    assert budget.begin_step([decoding(3, 0.0)], 1, now_s=0.002).chunk_len(0, 1000) == 30


def test_a_target_at_the_border_of_reach_does_not_come_and_go() -> None:
    budget, waiting = budget_of(tpot_s=0.0125), WaitingQueue(ClientLedger({}), 10.0)
    told = []
    for lone_s in (0.0099, 0.0101, 0.0098, 0.0092, 0.0088, 0.0099):
        for _ in range(40):
            budget.observe(lone_step(), lone_s, budget.allowance)
        told.append(budget.status([], waiting).classes[0].is_attainable)
    assert told == [True, False, False, False, True, True]


def test_misses_make_the_plans_of_their_class_tighter_until_a_target_is_set_anew() -> None:
    budget = budget_of(tpot_s=0.1, p7=LatencyTargets(tpot_s=0.1))
    for _ in range(64):
        missed = decoding(11, 0.0, priority=7)
        missed.last_token_s = 1.2
        budget.note_end(missed)

    def room(priority: int) -> int:
        running = [decoding(10, 0.0, priority=priority)]
        return budget.begin_step(running, 1, now_s=0.0).chunk_len(0, 10_000)

    # 95 and 89 ms of 100 for each of ten tokens, less 12 for the decode.
    assert (room(0), room(7)) == (937, 877)
    budget.set_targets(LatencyTargets(tpot_s=0.1), 7)
    assert room(7) == 937


def test_only_steps_with_a_row_or_two_say_that_a_target_is_out_of_reach() -> None:
    budget = budget_of(tpot_s=0.05)
    crowded = StepPlan(0, lone_step().rows * 30)
    for _ in range(200):
        budget.observe(crowded, 0.2, budget.allowance)
    waiting = WaitingQueue(ClientLedger({}), 10.0)
    assert budget.status([], waiting).classes[0].is_attainable
    for _ in range(40):
        budget.observe(lone_step(), 0.2, budget.allowance)
    assert not budget.status([], waiting).classes[0].is_attainable


def test_prompts_that_get_nothing_for_sixteen_steps_get_something() -> None:
    budget = budget_of(tpot_s=0.02)
    reading = make_sequence(prompt_len=1000)
    running = [*(decoding(3, 0.0) for _ in range(30)), reading]
    got = [budget.begin_step(running, 0, now_s=99.0).chunk_len(0, 1000) for _ in range(18)]
    assert got == [0] * 15 + [16, 16, 16]


def test_after_ten_seconds_without_anybody_one_joins() -> None:
    budget, sequence = budget_of(tpot_s=0.02), make_sequence()
    running = [decoding(3, 0.0) for _ in range(30)]
    budget.begin_step(running, 0, now_s=0.0)
    budget.begin_step(running, 1, now_s=9.9)
    assert not budget.may_join(sequence)
    budget.begin_step(running, 1, now_s=10.0)
    assert budget.may_join(sequence)
    budget.join(sequence, now_s=10.0)
    budget.begin_step(running, 1, now_s=10.1)
    assert not budget.may_join(sequence)


# ---- who is late


def test_late_is_who_would_be_late_even_alone() -> None:
    budget, sequence = budget_of(ttft_s=1.0), make_sequence(prompt_len=500, arrival_s=7.0)
    # 950 ms of 1000 are planned for; the prompt takes 500.
    assert not budget.is_late(sequence, now_s=7.44)
    assert budget.is_late(sequence, now_s=7.46)
    sequence.first_token_s = 7.5
    assert not budget.is_late(sequence, now_s=99.0)
    assert not budget_of(tpot_s=1.0).is_late(make_sequence(), now_s=99.0)


def test_every_eighth_place_is_for_one_that_is_late() -> None:
    budget = budget_of(ttft_s=1.0)
    for _ in range(2):
        late = make_sequence()
        late.is_late = True
        for _ in range(7):
            assert not budget.is_turn_of_late
            budget.join(make_sequence(), now_s=0.0)
        assert budget.is_turn_of_late
        budget.join(late, now_s=0.0)
        assert not late.is_late, "once it has joined nobody goes before it for that any more"


def test_who_is_late_is_refused_only_where_that_is_wanted() -> None:
    request = make_request(prompt_len=2000)
    LatencyBudget(LatencyConfig(LatencyTargets(ttft_s=1.0)), StepCostModel(PLAIN)).check(request, 0)
    config = LatencyConfig(LatencyTargets(ttft_s=1.0), {3: LatencyTargets()}, refuses_late=True)
    strict = LatencyBudget(config, StepCostModel(PLAIN))
    with pytest.raises(Overloaded, match=r"after 2\.01 s, and 1 s are promised") as refusal:
        strict.check(request, 0)
    assert refusal.value.retry_after_s == pytest.approx(2.012 - 0.95, rel=1e-3)
    strict.check(replace(request, priority=3), 0)
    strict.check(make_request(prompt_len=900), 0)


# ---- what is told


def test_targets_are_by_class_until_they_are_set_for_all() -> None:
    budget, first, second = budget_of(tpot_s=0.1), LatencyTargets(tpot_s=0.2), LatencyTargets(ttft_s=3.0)
    budget.set_targets(first, 7)
    assert budget.targets_of(make_sequence(priority=7)) == first
    assert budget.targets_of(make_sequence(priority=6)) == LatencyTargets(tpot_s=0.1)
    budget.set_targets(second, None)
    assert budget.targets == ((None, second),)
    for priority in range(64):
        budget.set_targets(first, priority)
    with pytest.raises(ConfigError, match="64 priority classes"):
        budget.set_targets(first, 64)
    budget.set_targets(second, 63)
    assert budget.targets_of(make_sequence(priority=63)) == second


def test_the_status_tells_each_class_and_the_next_step() -> None:
    budget = budget_of(tpot_s=0.1, p7=LatencyTargets(tpot_s=0.001))
    budget.observe(lone_step(), 0.012, budget.allowance)
    for priority in (0, 0, 7):
        ended = decoding(11, 1.0, priority=priority)
        ended.last_token_s = 1.5
        budget.note_end(ended)
    waiting = WaitingQueue(ClientLedger({}), 10.0)
    late = make_sequence()
    for sequence in (make_sequence(), late):
        waiting.add(sequence)
    waiting.put_off(late)
    status = budget.status([decoding(3, 0.0)] * 3, waiting)
    everybody, seventh = status.classes
    assert (everybody.num_sequences, everybody.num_over_tpot, everybody.is_attainable) == (2, 0, True)
    assert (seventh.num_sequences, seventh.num_over_tpot, seventh.is_attainable) == (1, 1, False)
    assert seventh.attained_tpot_p95_s == pytest.approx(0.05)
    assert status.predicted_step_s == pytest.approx(0.016)
    assert status.num_late == 1


def test_what_is_out_of_reach_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.engine")
    budget = budget_of(tpot_s=0.005)
    for step in range(640):
        budget.observe(lone_step(step), 0.010, budget.allowance)
    for step in range(640, 2000):
        budget.observe(lone_step(step), 0.001, budget.allowance)
    told = [(record.levelname, "out of reach" in record.message) for record in caplog.records]
    assert told == [("WARNING", True), ("INFO", False)]


# ---- whole runs, in virtual time


def plans_of(config: EngineConfig, arrivals: list[Arrival]) -> list[StepPlan]:
    plans: list[StepPlan] = []
    simulate(config, arrivals, Machine(SMALL), on_plan=lambda core, plan: plans.append(plan))
    return plans


def test_without_targets_the_plans_are_those_of_a_budget_that_nothing_exceeds() -> None:
    arrivals = poisson(12, 4, random.Random(1))
    generous = LatencyTargets(tpot_s=3600.0, ttft_s=3600.0)
    assert plans_of(config_of(8, 128), arrivals) == plans_of(config_of(8, 128, generous), arrivals)


def test_running_streams_are_protected_from_a_burst_of_prompts() -> None:
    targets = LatencyTargets(tpot_s=0.02)
    streams = [Arrival(0.0, 32, 150) for _ in range(4)]
    burst = [Arrival(0.5, 1500, 8) for _ in range(6)]
    unprotected = simulate(config_of(16, 512), [*streams, *burst], Machine(SMALL))
    protected = simulate(config_of(16, 512, targets), [*streams, *burst], Machine(SMALL))
    assert min(one.tpot_s for one in unprotected[:4]) > 0.025
    assert max(one.tpot_s for one in protected[:4]) <= 0.02
    assert all(one.is_over for one in protected)


def test_no_more_rows_join_than_are_quick_enough() -> None:
    # 10 ms + 2 ms a row: nine tenths of the 47.5 ms that are aimed at hold 16 rows.
    kv = KVCacheManager(CacheLayout(1000, 4))
    scheduler = Scheduler(SchedulerConfig(32, 512), kv, budget=budget_of(tpot_s=0.05))
    for _ in range(30):
        scheduler.add(make_sequence(prompt_len=2))
    plan, _ = scheduler.schedule(0, now_s=0.0)
    assert plan is not None
    assert len(plan.rows) == len(scheduler.running) == 16


def test_who_is_late_by_old_targets_need_not_be_by_new_ones() -> None:
    budget, waiting, late = budget_of(ttft_s=0.1), WaitingQueue(ClientLedger({}), 10.0), make_sequence()
    waiting.add(late)
    waiting.put_off(late)
    assert list(waiting.in_order(0.0)) == []
    LatencyDesk(budget, waiting).set_targets(LatencyTargets(ttft_s=9.0))
    assert list(waiting.in_order(0.0)) == [late]
    assert list(waiting.in_order(0.0, late=True)) == []
    assert budget.targets == ((None, LatencyTargets(ttft_s=9.0)),)


def test_decodes_are_never_left_out_whatever_is_promised() -> None:
    arrivals = poisson(25, 4, random.Random(2), prompt_lens=(16, 600))
    steps_of: dict[int, list[int]] = {}
    for plan in plans_of(config_of(32, 512, LatencyTargets(0.02, 0.5)), arrivals):
        for row in plan.rows:
            if row.first_position >= row.num_prompt_tokens:
                steps_of.setdefault(row.sequence_id, []).append(plan.step)
    assert len(steps_of) == len(arrivals)
    for steps in steps_of.values():
        assert steps == list(range(steps[0], steps[0] + len(steps)))


@settings(max_examples=25, deadline=None)
@given(
    st.floats(1e-4, 0.2),
    st.none() | st.floats(1e-4, 5.0),
    st.integers(0, 2**20),
    st.floats(1e-5, 0.1),
    st.integers(1, 8),
)
def test_everybody_is_served_in_the_end_whatever_is_promised(
    tpot_s: float, ttft_s: float | None, seed: int, step_s: float, num_seqs: int
) -> None:
    rng = random.Random(seed)
    machine = Machine(replace(SMALL, step=step_s), noise=lambda: rng.choice((0.5, 1.0, 1.0, 4.0)))
    arrivals = [Arrival(rng.uniform(0, 1), rng.randint(1, 300), rng.randint(1, 20)) for _ in range(25)]
    served = simulate(
        config_of(num_seqs, 64, LatencyTargets(tpot_s, ttft_s)), arrivals, machine, num_blocks=200
    )
    assert [len(one.token_s) for one in served] == [one.arrival.num_tokens for one in served]


def test_at_overload_some_are_in_time_and_the_late_ones_are_served_too() -> None:
    targets = LatencyTargets(tpot_s=0.025, ttft_s=0.5)
    arrivals = poisson(24, 12, random.Random(3))
    default = simulate(config_of(16, 512), arrivals, Machine(SMALL), until_s=15)
    budget = simulate(config_of(48, 512, targets), arrivals, Machine(SMALL), until_s=15)
    refusing = simulate(config_of(48, 512, targets, refuses_late=True), arrivals, Machine(SMALL), until_s=15)
    assert goodput(budget, targets) > 1.5 * goodput(default, targets)
    assert goodput(refusing, targets) > goodput(budget, targets)
    # Every eighth place is for one that came too late to be in time.
    late = [one for one in budget if one.token_s and one.ttft_s > 0.5]
    assert len(late) >= 12
    assert all(one.retry_after_s > 0 for one in refusing if one.retry_after_s is not None)
    assert any(one.retry_after_s is not None for one in refusing)


def test_under_any_load_that_can_be_kept_it_is_kept() -> None:
    targets = LatencyTargets(tpot_s=0.02, ttft_s=1.0)
    for rate in (7.0, 11.0):
        served = simulate(config_of(64, 512, targets), poisson(rate, 8, random.Random(4)), Machine(SMALL))
        assert goodput(served, targets) >= 0.98 * len(served)


def test_a_tpot_out_of_reach_costs_neither_throughput_nor_first_tokens() -> None:
    # A lone row takes 7 ms: a row or two at a time for the sake of 5 would keep no promise.
    arrivals = poisson(14, 8, random.Random(5))
    hopeless = simulate(config_of(64, 512, LatencyTargets(0.005, 1.0)), arrivals, Machine(SMALL))
    free = simulate(config_of(64, 512, LatencyTargets(None, 1.0)), arrivals, Machine(SMALL))
    assert all(one.ttft_s <= 1.0 for one in hopeless)
    over_s, free_s = (max(one.token_s[-1] for one in served) for served in (hopeless, free))
    assert over_s <= 1.05 * free_s


@pytest.mark.parametrize("load", [0.8, 1.0])
def test_steps_that_vary_by_fifteen_in_a_hundred_break_no_promise(load: float) -> None:
    # With 16 rows the machine serves 15 such requests per second.
    targets, rng = LatencyTargets(tpot_s=0.02, ttft_s=1.0), random.Random(7)
    machine = Machine(SMALL, noise=lambda: max(0.3, rng.gauss(1, 0.15)))
    served = simulate(config_of(64, 512, targets), poisson(15 * load, 12, random.Random(5)), machine)
    assert sum(one.tpot_s <= 0.02 for one in served) >= 0.95 * len(served)


def test_where_steps_stall_now_and_then_plans_get_tighter_until_nearly_all_are_kept() -> None:
    # One step in a hundred takes ten times as long: the model of costs rightly takes no notice.
    targets, rng = LatencyTargets(tpot_s=0.02), random.Random(7)
    machine = Machine(SMALL, noise=lambda: 10.0 if rng.random() < 0.01 else 1.0)
    served = simulate(config_of(64, 512, targets), poisson(15, 30, random.Random(5)), machine)
    later = served[len(served) // 3 :]
    assert sum(one.tpot_s <= 0.02 for one in later) >= 0.93 * len(later)
