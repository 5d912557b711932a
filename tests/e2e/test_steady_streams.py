"""Running answers go on while prompts are read, however long and however many: in virtual time, where a gap
between tokens is what the plans make of it and nothing else."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest

from headrace.engine.config import EngineConfig, LatencyConfig, LatencyTargets, ModelConfig, SchedulerConfig
from headrace.engine.scheduling.cost_model import StepPrices, StepShape
from tests.support.virtual_time import Arrival, Machine, Served, cost, simulate

PRICES = StepPrices(6.7e-3, 2.8e-4, 2.6e-4, 4e-7, 4e-8)
BUDGET = 64
LONGEST = 4096
STREAMS = [Arrival(0.0, 16, 500) for _ in range(4)]


def gaps_s(served: list[Served]) -> list[float]:
    """All gaps between tokens of the four streams, the shortest first."""
    return sorted(later - earlier for one in served[:4] for earlier, later in pairwise(one.token_s))


def run(prompts: list[Arrival], targets: LatencyTargets | None = None) -> list[Served]:
    config = EngineConfig(
        ModelConfig(Path("unused")),
        scheduler=SchedulerConfig(16, BUDGET),
        latency=LatencyConfig(targets or LatencyTargets()),
    )
    return simulate(config, [*STREAMS, *prompts], Machine(PRICES))


@pytest.mark.parametrize(
    "prompts",
    [
        [Arrival(1.0 + 0.5 * i, LONGEST // 2, 1) for i in range(12)],
        [Arrival(1.0, LONGEST - 1, 1)],
    ],
    ids=["prompts that come steadily", "one prompt as long as can be"],
)
def test_a_gap_is_never_longer_than_one_step_of_the_token_budget(prompts: list[Arrival]) -> None:
    idle_s = gaps_s(run([]))[-1]
    served = run(prompts)
    gaps = gaps_s(served)
    # A full step at the end of the longest prompt, beside four rows that read all that they have.
    longest_s = cost(StepShape(BUDGET, 4, 4 * 516, BUDGET * LONGEST), PRICES)
    assert len(gaps) == 4 * 499
    assert gaps[-1] <= longest_s
    assert gaps[math.ceil(0.99 * len(gaps)) - 1] <= 5 * idle_s
    assert all(one.is_over for one in served), "a prompt was never read"


def test_with_a_promise_gaps_are_what_is_promised_while_a_long_prompt_is_read() -> None:
    served = run([Arrival(1.0, LONGEST - 1, 1)], LatencyTargets(tpot_s=0.012))
    assert max(one.tpot_s for one in served[:4]) <= 0.012
    assert served[4].is_over
