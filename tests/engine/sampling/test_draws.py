"""Draws are uniform, and a function of their key alone."""

from __future__ import annotations

import itertools
import math

import pytest

from headrace.engine.sampling.draws import Purpose, uniform


def test_the_same_key_gives_the_same_number() -> None:
    assert uniform(42, 0, 7, Purpose.SAMPLE) == uniform(42, 0, 7, Purpose.SAMPLE)


def test_numbers_never_change_between_versions() -> None:
    """A seed's tokens are part of what a client may rely on."""
    assert uniform(0, 0, 0, Purpose.SAMPLE) == 0.7767674923625196
    assert uniform(2**64 - 1, 3, 8191, Purpose.SAMPLE) == 0.7963471243052829


def test_every_part_of_the_key_matters() -> None:
    keys = itertools.product((0, 1, 2**63, 2**64 - 1), (0, 1, 2), (0, 1, 2**20))

    assert len({uniform(*key, Purpose.SAMPLE) for key in keys}) == 4 * 3 * 3


@pytest.mark.parametrize("part", ["seed", "index", "position"])
def test_numbers_along_each_part_of_the_key_are_uniform(part: str) -> None:
    num_draws, num_bins = 40_000, 32
    key = {"seed": 5, "index": 0, "position": 9}
    numbers = [uniform(**{**key, part: i}, purpose=Purpose.SAMPLE) for i in range(num_draws)]

    assert all(0.0 <= number < 1.0 for number in numbers)
    counts = [0] * num_bins
    for number in numbers:
        counts[int(number * num_bins)] += 1
    expected = num_draws / num_bins
    chi_square = sum((count - expected) ** 2 / expected for count in counts)
    assert chi_square < (num_bins - 1) + 5 * math.sqrt(2 * (num_bins - 1))


def test_neighbouring_positions_are_not_correlated() -> None:
    numbers = [uniform(1, 0, position, Purpose.SAMPLE) - 0.5 for position in range(20_000)]

    covariance = sum(a * b for a, b in itertools.pairwise(numbers)) / len(numbers)

    assert abs(covariance * 12) < 5 / math.sqrt(len(numbers))
