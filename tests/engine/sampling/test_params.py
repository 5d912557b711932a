import math

import pytest

from headrace.engine.errors import InvalidRequest
from headrace.engine.sampling.params import SamplingParams

NOT_NUMBERS = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [*NOT_NUMBERS, -0.1, 100.1]),
        ("top_k", [-1]),
        ("top_p", [*NOT_NUMBERS, 0.0, -0.5, 1.01]),
        ("min_p", [*NOT_NUMBERS, -0.01, 1.01]),
        ("seed", [-1, 2**64]),
    ],
)
def test_values_out_of_range_are_refused_by_name(field, values):
    for value in values:
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**{field: value})
        assert [v.field for v in caught.value.violations] == [f"sampling.{field}"]
        assert repr(value) in str(caught.value)


def test_the_ends_of_the_ranges_are_allowed():
    SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
    SamplingParams(temperature=100.0, top_k=10**9, top_p=1e-9, min_p=1.0, seed=2**64 - 1)


def test_everything_that_is_wrong_is_named_at_once():
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(temperature=-1.0, top_p=2.0, min_p=math.nan)
    assert {v.field for v in caught.value.violations} == {
        "sampling.temperature",
        "sampling.top_p",
        "sampling.min_p",
    }


@pytest.mark.parametrize(
    ("params", "is_greedy"),
    [
        (SamplingParams(temperature=0.0), True),
        (SamplingParams(temperature=1e-12), True),
        (SamplingParams(temperature=0.7, top_k=1), True),
        (SamplingParams(temperature=0.7), False),
        (SamplingParams(temperature=0.7, top_k=2), False),
    ],
)
def test_greedy_is_a_tiny_temperature_or_a_single_candidate(params, is_greedy):
    assert params.is_greedy is is_greedy
