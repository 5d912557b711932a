from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.sampling.params import SamplingParams
from headrace.engine.scheduling.cost_model import StepCostModel, StepPrices, StepShape, attended_pairs
from headrace.engine.scheduling.plan import ScheduledSequence, StepPlan
from headrace.engine.sequence import SequenceId

MACHINE = StepPrices(
    step=6.7e-3, prefill_token=2.8e-4, decode_token=2.5e-4, context_token=5e-7, attended_pair=4e-8
)

shapes = st.builds(
    lambda prefill, decode, context: StepShape(prefill, decode, context, prefill * (prefill + 1) // 2),
    st.integers(0, 2048),
    st.integers(1, 256),
    st.integers(0, 100_000),
)


def cost(shape: StepShape, prices: StepPrices = MACHINE) -> float:
    amounts = (
        1,
        shape.num_prefill_tokens,
        shape.num_decode_tokens,
        shape.num_context_tokens,
        shape.num_attended_pairs,
    )
    return sum(price * amount for price, amount in zip(prices.as_tuple(), amounts, strict=True))


def random_shape(rng: random.Random) -> StepShape:
    """A step of up to sixteen rows that decode and, one time in three, a chunk of a prompt."""
    shape = StepShape()
    for _ in range(rng.randint(1, 16)):
        shape = shape.with_decode(rng.randint(16, 400))
    return shape.with_prefill(rng.randint(0, 300), rng.randint(2, 300)) if rng.random() < 0.33 else shape


def taught(
    num_steps: int, *, seed: int = 0, noise: float = 0.0, prior: StepPrices | None = None
) -> StepCostModel:
    """A model that has seen random steps of `MACHINE`."""
    rng, model = random.Random(seed), StepCostModel(prior)
    for _ in range(num_steps):
        shape = random_shape(rng)
        model.observe(shape, cost(shape) * rng.gauss(1, noise))
    return model


def worst_error(model: StepCostModel, prices: StepPrices = MACHINE) -> float:
    rng = random.Random(99)
    probes = [random_shape(rng) for _ in range(100)]
    return max(abs(model.predict(shape) / cost(shape, prices) - 1) for shape in probes)


def make_row(first_position: int, num_tokens: int, num_drafts: int = 0) -> ScheduledSequence:
    return ScheduledSequence(
        SequenceId(0), first_position, (1,) * num_tokens, num_drafts, (1,), True, SamplingParams()
    )


def test_a_plan_has_the_shape_of_its_rows() -> None:
    plan = StepPlan(0, (make_row(9, 1), make_row(20, 4, num_drafts=3), make_row(5, 3)))
    assert StepShape.of(plan) == StepShape(3, 5, 10 + 24, 6 + 7 + 8)
    assert StepShape().with_decode(10).with_decode(24, 4).with_prefill(5, 3) == StepShape.of(plan)


@given(st.integers(0, 1000), st.integers(0, 100))
def test_pairs_are_counted_token_by_token(first_position: int, num_tokens: int) -> None:
    expected = sum(first_position + i + 1 for i in range(num_tokens))
    assert attended_pairs(first_position, num_tokens) == expected


def test_before_any_step_the_prior_is_what_is_believed() -> None:
    shape = StepShape(100, 4, 800, 5050)
    assert StepCostModel(MACHINE).predict(shape) == pytest.approx(cost(shape))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_first_step_sets_the_scale_whatever_the_machine(scale: float) -> None:
    model, shape = StepCostModel(), StepShape(200, 0, 0, 20_100)
    model.observe(shape, scale * cost(shape))
    assert model.predict(shape) == pytest.approx(scale * cost(shape), rel=1e-6)
    other = StepShape(0, 1, 201, 0)
    assert scale * 1e-4 < model.predict(other) < scale * cost(shape)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_a_linear_machine_is_learned_from_whatever_prior(scale: float) -> None:
    prior = StepPrices(*(scale * price for price in StepPrices().as_tuple()))
    assert worst_error(taught(200, prior=prior)) < 0.02
    assert worst_error(taught(600, noise=0.05, prior=prior)) < 0.06


def test_one_step_in_thirty_that_takes_ten_times_as_long_changes_little() -> None:
    rng, model = random.Random(3), taught(100, noise=0.03)
    for _ in range(600):
        shape = random_shape(rng)
        model.observe(shape, cost(shape) * rng.gauss(1, 0.03) * (10 if rng.random() < 1 / 30 else 1))
    assert worst_error(model) < 0.1


def test_a_machine_that_becomes_slower_is_believed_within_some_steps() -> None:
    rng, model = random.Random(4), taught(600, noise=0.03)
    slower = StepPrices(*(3 * price for price in MACHINE.as_tuple()))
    for _ in range(20):
        shape = random_shape(rng)
        model.observe(shape, cost(shape, slower) * rng.gauss(1, 0.03))
    assert worst_error(model, slower) < 0.25


def test_what_has_not_been_seen_for_long_is_not_forgotten() -> None:
    model, shape = taught(600, noise=0.03), StepShape(0, 1, 300, 0)
    rng = random.Random(5)
    for _ in range(20_000):
        model.observe(shape, cost(shape) * rng.gauss(1, 0.03))
    prefill = StepShape(256, 1, 300, 256 * 257 // 2)
    assert model.predict(prefill) == pytest.approx(cost(prefill), rel=0.1)
    full = replace(shape, num_decode_tokens=16, num_context_tokens=4800)
    assert model.predict(full) == pytest.approx(cost(full), rel=0.3)


@pytest.mark.slow
def test_no_number_runs_dry_in_hours_without_a_prompt() -> None:
    model, shape = taught(100), StepShape(0, 1, 300, 0)
    for _ in range(360_000):
        model.observe(shape, cost(shape))
    prefill = StepShape(256, 1, 300, 256 * 257 // 2)
    assert model.predict(prefill) == pytest.approx(cost(prefill), rel=0.1)


@given(
    st.lists(st.tuples(shapes, st.floats(1e-6, 100)), max_size=60),
    shapes,
    st.integers(0, 500),
    st.integers(1, 500),
)
def test_more_work_never_costs_less_whatever_was_seen(
    steps: list[tuple[StepShape, float]], shape: StepShape, first_position: int, num_tokens: int
) -> None:
    model = StepCostModel()
    for seen, seconds in steps:
        model.observe(seen, seconds)
    seconds = model.predict(shape)
    assert 0 < seconds < float("inf")
    assert model.predict(shape.with_prefill(first_position, num_tokens)) >= seconds
    assert model.predict(shape.with_decode(num_tokens)) >= seconds


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_step_without_a_length_in_time_teaches_nothing(seconds: float) -> None:
    model = taught(50)
    before = model.prices
    model.observe(StepShape(0, 1, 10, 0), seconds)
    assert (model.prices, model.num_observed) == (before, 50)


@pytest.mark.parametrize("price", [-1.0, float("nan"), float("inf")])
def test_prices_that_cannot_be_are_refused(price: float) -> None:
    with pytest.raises(ValueError, match="not negative"):
        StepPrices(step=price)
