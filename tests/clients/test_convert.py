"""From the protocol's messages to the client's values."""

from __future__ import annotations

import math

import pytest

from headrace.clients.convert import sampling_from_proto
from headrace.v1 import generation_pb2


@pytest.mark.parametrize(
    "value", [0.2, 0.9, 1.0, 0.0, 1.05, -0.1, 1e-8, 100.0, 0.123456789, 1 / 3, 3.4028235e38, math.inf]
)
def test_a_number_of_32_bits_is_told_as_the_shortest_that_means_it(value: float) -> None:
    asked = generation_pb2.SamplingOptions(temperature=value, logit_bias={7: value})
    told = sampling_from_proto(asked)
    assert generation_pb2.SamplingOptions(temperature=told.temperature).temperature == asked.temperature
    assert len(repr(told.temperature)) <= len(repr(asked.temperature))
    assert told.logit_bias == ((7, told.temperature),)


def test_what_was_typed_comes_back() -> None:
    told = sampling_from_proto(generation_pb2.SamplingOptions(temperature=0.2, top_p=0.9, min_p=0.05))
    assert (told.temperature, told.top_p, told.min_p) == (0.2, 0.9, 0.05)
