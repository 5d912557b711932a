from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.scheduling.allowance import StepAllowance
from headrace.engine.scheduling.cost_model import StepCostModel, StepPrices, StepShape, attended_pairs

# A step of 10 ms, 1 ms for a prompt token, 2 ms for a row that decodes.
PLAIN = StepCostModel(StepPrices(0.010, 0.001, 0.002, 0.0, 0.0))


def test_what_is_not_limited_takes_everything() -> None:
    allowance = StepAllowance(PLAIN)
    assert allowance.chunk_len(0, 10**6) == 10**6
    assert allowance.may_join(10**6, math.inf)
    assert not allowance.was_tight


@pytest.mark.parametrize(("left_s", "num_tokens"), [(0.1005, 100), (0.0295, 29), (0.0155, 0), (-1.0, 0)])
def test_a_prompt_has_as_many_tokens_as_there_is_time_for_but_no_crumbs(
    left_s: float, num_tokens: int
) -> None:
    allowance = StepAllowance(PLAIN, left_s=left_s)
    assert allowance.chunk_len(0, 1000) == num_tokens
    assert allowance.was_tight


def test_the_end_of_a_prompt_may_be_a_crumb() -> None:
    assert StepAllowance(PLAIN, left_s=0.0055).chunk_len(40, 5) == 5
    assert StepAllowance(PLAIN, left_s=0.0055).chunk_len(40, 6) == 0


def test_what_one_prompt_takes_the_next_one_lacks() -> None:
    allowance = StepAllowance(PLAIN, left_s=0.1005)
    allowance.take(0, 60)
    assert allowance.chunk_len(0, 1000) == 40
    allowance.take_drafts(10)
    assert allowance.chunk_len(0, 1000) == 20


@given(
    st.floats(1e-7, 1e-2),
    st.floats(0, 1e-5),
    st.floats(0, 10),
    st.integers(0, 100_000),
)
def test_a_chunk_is_the_longest_that_fits(
    token: float, pair: float, left_s: float, first_position: int
) -> None:
    costs = StepCostModel(StepPrices(1e-3, token, 1e-3, 0.0, pair))
    prices = costs.prices
    num_tokens = StepAllowance(costs, left_s=left_s).chunk_len(first_position, 10**8)

    def cost(count: int) -> float:
        return count * prices.prefill_token + prices.attended_pair * attended_pairs(first_position, count)

    assert cost(num_tokens) <= left_s * (1 + 1e-6)
    if 16 <= num_tokens < 10**8:
        assert cost(num_tokens + 1) > left_s * (1 - 1e-6)
    if num_tokens == 0:
        assert cost(16) > left_s * (1 - 1e-6)


def test_a_prompt_that_has_waited_long_enough_gets_on_whatever_the_time() -> None:
    allowance = StepAllowance(PLAIN, left_s=-5.0, must_prefill=True)
    assert allowance.chunk_len(0, 1000, is_new=True) == 0
    assert allowance.chunk_len(0, 1000) == 16
    allowance.take(0, 16)
    assert allowance.chunk_len(0, 1000) == 0


def test_nobody_joins_whose_row_would_make_decodes_too_slow() -> None:
    # 10 ms + 2 ms a row, and nine tenths of the target: 45 ms of 50 hold 17 rows.
    sixteen = StepAllowance(PLAIN, rows=StepShape(0, 16, 100, 0), tightest_s=0.05)
    assert sixteen.may_join(10, math.inf)
    sixteen.join(10, math.inf)
    assert not sixteen.may_join(10, math.inf)


def test_the_target_of_the_one_that_joins_counts_too() -> None:
    allowance = StepAllowance(PLAIN, rows=StepShape(0, 4, 100, 0), tightest_s=0.05)
    assert not allowance.may_join(10, 0.02)
    assert allowance.may_join(10, 0.03)
    allowance.join(10, 0.03)
    # The tighter target stays: 27 ms hold 8 rows, 45 would hold 17.
    for _ in range(3):
        assert allowance.may_join(10, math.inf)
        allowance.join(10, math.inf)
    assert not allowance.may_join(10, math.inf)


def test_when_it_has_been_too_long_one_joins_whatever_the_time_and_no_second_one() -> None:
    allowance = StepAllowance(
        PLAIN, left_s=0.0, rows=StepShape(0, 99, 100, 0), tightest_s=0.05, must_join=True
    )
    assert allowance.may_join(10, math.inf)
    assert allowance.chunk_len(0, 1000, is_new=True) == 16
    allowance.join(10, math.inf)
    assert not allowance.may_join(10, math.inf)
    assert allowance.chunk_len(0, 1000, is_new=True) == 0


def test_the_first_one_always_joins() -> None:
    assert StepAllowance(PLAIN, left_s=0.0, tightest_s=1e-9).may_join(10, 1e-9)
