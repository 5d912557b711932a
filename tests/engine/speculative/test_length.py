from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.speculative.length import LEAST_GAIN, choose_lengths


def expected_rate(lengths, chances, num_rows, seconds):
    made = float(num_rows)
    for length, offered in zip(lengths, chances, strict=True):
        gain = 1.0
        for chance in offered[:length]:
            gain *= chance
            made += gain
    return made / seconds(sum(lengths), max(lengths, default=0))


offers = st.lists(st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]), max_size=4), min_size=1, max_size=3)


@given(offers, st.integers(0, 2), st.sampled_from([0.0, 0.05, 0.4, 2.0]), st.sampled_from([0.0, 0.1, 1.0]))
def test_no_other_lengths_make_more_tokens_per_second(chances, num_others, per_token, per_depth):
    num_rows = len(chances) + num_others

    def seconds(num_drafts, depth):
        return 1.0 + per_token * (num_rows + num_drafts) + per_depth * depth

    chosen = choose_lengths(chances, num_rows, 100, seconds)

    best = max(
        expected_rate(lengths, chances, num_rows, seconds)
        for lengths in product(*[range(len(offered) + 1) for offered in chances])
    )
    plain = expected_rate([0] * len(chances), chances, num_rows, seconds)
    if any(chosen):
        assert expected_rate(chosen, chances, num_rows, seconds) == pytest.approx(best)
        assert best > plain * LEAST_GAIN
    else:
        assert best <= plain * LEAST_GAIN * (1 + 1e-9)


@given(offers, st.integers(0, 5))
def test_no_more_drafts_than_there_is_room_for(chances, most):
    assert sum(choose_lengths(chances, len(chances), most, lambda num_drafts, depth: 1.0)) <= most


def test_a_batch_that_is_full_of_work_gets_none_and_one_alone_gets_many():
    """A step of which half is paid before the first token, and a draft that is right half the time."""

    def seconds_for(num_rows):
        return lambda num_drafts, depth: 7.0 + 0.5 * (num_rows + num_drafts)

    offered = [0.5] * 8
    alone = choose_lengths([offered], 1, 100, seconds_for(1))
    full = choose_lengths([offered] * 64, 64, 1000, seconds_for(64))
    assert alone[0] >= 2
    assert sum(full) == 0


def test_the_worthiest_drafts_come_first_whosever_they_are():
    lengths = choose_lengths([[0.9] * 8, [0.3] * 8], 2, 3, lambda num_drafts, depth: 10.0 + 0.1 * num_drafts)
    assert lengths == [3, 0]
