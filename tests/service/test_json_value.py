from __future__ import annotations

import math

import pytest
from google.protobuf.struct_pb2 import Struct

from headrace.engine import InvalidRequest
from headrace.service.json_value import measure, object_from_struct


def struct(**values: object) -> Struct:
    built = Struct()
    built.update(values)  # type: ignore[arg-type]
    return built


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (struct(), (0, 0)),
        (struct(a=None, b=1), (2, 1)),
        (struct(a=[1, [2, 3], {}]), (6, 3)),
        (struct(a={"b": {"c": True}}, d="x"), (4, 3)),
    ],
)
def test_values_are_counted_at_any_depth(value: Struct, size: tuple[int, int]) -> None:
    assert measure(value, 100) == size


@pytest.mark.parametrize("value", [struct(a=[1] * 1000), struct(**{str(i): i for i in range(1000)})])
def test_counting_ends_beyond_the_bound(value: Struct) -> None:
    assert measure(value, 10)[0] == 11


def test_a_long_key_is_not_repeated_whole_in_the_refusal() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        object_from_struct(struct(**{"k" * 10_000: [math.nan]}), "here")
    assert refusal.value.violations[0].field == f"here.{'k' * 64}[0]"
