from __future__ import annotations

import pytest

from headrace.engine.config import LatencyConfig, LatencyTargets
from headrace.engine.outputs import LatencyClass
from headrace.engine.scheduling.budget import LatencyBudget
from headrace.engine.scheduling.fairness import ClientLedger
from headrace.engine.scheduling.promises import LEAST_AIM, MOST_AIM, ClassRecord, TpotAim
from headrace.engine.scheduling.queue import WaitingQueue
from headrace.engine.sequence import Sequence
from tests.support.sequences import make_sequence


def ended(*token_s: float, arrival_s: float = 0.0, priority: int = 0) -> Sequence:
    """A sequence that got a token at each of these times."""
    sequence = make_sequence(arrival_s=arrival_s, priority=priority)
    sequence.token_ids += [0] * len(token_s)
    if token_s:
        sequence.first_token_s, sequence.last_token_s = token_s[0], token_s[-1]
    return sequence


def test_each_target_is_counted_by_itself() -> None:
    record, targets = ClassRecord(), LatencyTargets(tpot_s=0.1, ttft_s=1.0)
    record.note(ended(1.5, 1.55), targets)
    record.note(ended(10.5, 10.75, 10.9, arrival_s=10.0), targets)
    record.note(ended(0.5), targets)
    assert record.told(3, targets, is_attainable=False) == LatencyClass(
        priority=3,
        tpot_s=0.1,
        ttft_s=1.0,
        is_attainable=False,
        num_sequences=3,
        num_over_tpot=1,
        num_over_ttft=1,
        attained_tpot_p95_s=(10.9 - 10.5) / 2,
        attained_ttft_p95_s=1.5,
    )


def test_without_targets_latencies_are_told_and_nothing_is_over() -> None:
    record = ClassRecord()
    record.note(ended(5.0, 9.0), LatencyTargets())
    told = record.told(None, LatencyTargets(), is_attainable=True)
    assert (told.num_sequences, told.num_over_tpot, told.num_over_ttft) == (1, 0, 0)
    assert (told.attained_tpot_p95_s, told.attained_ttft_p95_s) == (4.0, 5.0)


def test_for_how_long_readers_held_it_up_is_no_matter_of_either_target() -> None:
    record, sequence = ClassRecord(), ended(31.0, 131.5, 131.6)
    sequence.first_token_s = None
    sequence.note_pause(30.5)
    sequence.first_token_s = 31.0
    sequence.note_pause(100.0)
    assert record.note(sequence, LatencyTargets(tpot_s=0.4, ttft_s=1.0)) is False
    told = record.told(None, LatencyTargets(), is_attainable=True)
    assert (told.num_over_tpot, told.num_over_ttft) == (0, 0)
    assert told.attained_ttft_p95_s == 0.5
    assert told.attained_tpot_p95_s == pytest.approx(0.3)


def test_a_sequence_without_a_token_says_nothing() -> None:
    record = ClassRecord()
    record.note(ended(), LatencyTargets(tpot_s=0.1))
    assert record.told(None, LatencyTargets(), is_attainable=True) == LatencyClass(None)


@pytest.mark.parametrize("changed", [None, 7])
def test_percentiles_are_of_those_that_ended_since_the_targets_were_set(changed: int | None) -> None:
    targets = LatencyTargets(tpot_s=0.2)
    budget = LatencyBudget(LatencyConfig(targets, {7: targets}))
    waiting = WaitingQueue(ClientLedger({}), 10.0)

    def told() -> LatencyClass:
        return next(each for each in budget.status([], waiting).classes if each.priority == changed)

    budget.note_end(ended(1.0, 1.5, priority=changed or 0))
    assert (told().attained_tpot_p95_s, told().attained_ttft_p95_s) == (0.5, 1.0)
    budget.set_targets(LatencyTargets(tpot_s=0.3), changed)
    assert (told().attained_tpot_p95_s, told().attained_ttft_p95_s) == (None, None)
    budget.note_end(ended(2.0, 2.25, priority=changed or 0))
    assert (told().attained_tpot_p95_s, told().attained_ttft_p95_s) == (0.25, 2.0)
    assert (told().num_sequences, told().num_over_tpot) == (2, 1)


def test_percentiles_are_of_the_last_256_and_totals_of_all() -> None:
    record, targets = ClassRecord(), LatencyTargets(ttft_s=50.0)
    for number in range(1, 301):
        record.note(ended(1000.0 - number), targets)
    for number in range(1, 257):
        record.note(ended(float(number)), targets)
    told = record.told(None, targets, is_attainable=True)
    assert (told.num_sequences, told.num_over_ttft) == (556, 300 + 206)
    assert told.attained_ttft_p95_s == 244.0


def test_plans_get_tighter_by_misses_and_looser_by_none_within_bounds() -> None:
    aim = TpotAim()

    def judge(num_missed: int) -> float:
        for i in range(32):
            aim.note(is_missed=i < num_missed)
        return aim.share

    assert judge(0) == MOST_AIM
    assert judge(1) == MOST_AIM, "one in 32 is within what is allowed"
    assert judge(2) == pytest.approx(MOST_AIM - 0.03)
    assert judge(1) == pytest.approx(MOST_AIM - 0.03)
    assert judge(0) == pytest.approx(MOST_AIM - 0.025)
    assert [judge(32) for _ in range(9)][-1] == LEAST_AIM
    assert [judge(0) for _ in range(40)][-1] == MOST_AIM
