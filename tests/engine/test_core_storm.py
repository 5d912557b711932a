"""Everything at once over a tiny pool: families, drafts that fail, pauses, promises, ends of every kind."""

from __future__ import annotations

import pytest

from tests.support.storm import Storm


@pytest.mark.parametrize("first", range(0, 60, 15))
def test_each_sequence_makes_what_it_makes_alone_whatever_happens(first: int) -> None:
    for seed in range(first, first + 15):
        Storm(seed).run(num_rounds=80)


def test_each_sequence_makes_what_it_makes_alone_though_steps_are_planned_ahead() -> None:
    num_ahead = num_void = 0
    for seed in range(60):
        storm = Storm(seed, is_ahead=True)
        storm.run(num_rounds=80)
        num_ahead += storm.num_ahead
        num_void += storm.num_void
    # It has really happened, and so have ends that nobody could foresee.
    assert num_ahead > 1000
    assert num_void > 100
