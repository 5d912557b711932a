"""Chooses how many tokens to propose for whom: as many as make the most tokens per second, or none.

A draft is worth the chance that it is kept, which needs the ones before it to be kept; it costs what it makes
the step longer. The worthiest come first, whoever they belong to, as long as what the step is expected to
make per second grows. So where a step's time hangs on reading weights drafts are nearly free and many are
made, and in a batch that is full of work none are. Liu et al., "Optimizing speculative decoding for serving
large language models using goodput" (2024), choose one length for a whole batch by the same measure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

LEAST_GAIN = 1.04
"""What is won must be more than what estimates are off by, and than what rows of unequal lengths cost."""

StepSeconds = Callable[[int, int], float]
"""What a step takes: (drafts in it, most drafts of one row) -> seconds."""


def choose_lengths(
    chances: Sequence[Sequence[float]], num_rows: int, most: int, step_seconds: StepSeconds
) -> list[int]:
    """How many of each row's drafts to make.

    Args:
        chances: per row that has drafts to offer, how likely each is to be kept if those before it are.
        num_rows: rows of the step that make a token anyway, these included.
        most: no more drafts than these, in all.
        step_seconds: never falls in either argument; no draft costs less than the one before it.

    Returns:
        A number per row of `chances`.
    """
    gains = _gains(chances)
    longest = max((len(offered) for offered in chances), default=0)
    if not gains or most <= 0:
        return [0] * len(chances)
    plain = num_rows / step_seconds(0, 0)
    best_rate, best = plain * LEAST_GAIN, (0, 0)
    # What the draft model takes grows with the longest row, so each longest length is a case of its own.
    is_depth_free = step_seconds(1, longest) <= step_seconds(1, 1)
    for depth in (longest,) if is_depth_free else range(1, longest + 1):
        num_made, num_drafts = float(num_rows), 0
        last_rate = 0.0
        for gain, place, _ in gains:
            if place >= depth:
                continue
            if num_drafts == most:
                break
            num_drafts += 1
            num_made += gain
            rate = num_made / step_seconds(num_drafts, depth)
            # The next one is worth no more and costs no less: once it goes down it goes on going down.
            if rate < last_rate:
                break
            last_rate = rate
            if rate > best_rate:
                best_rate, best = rate, (num_drafts, depth)
    return _lengths(gains, best, len(chances))


def _gains(chances: Sequence[Sequence[float]]) -> list[tuple[float, int, int]]:
    """(tokens to be expected of it, its place among its row's drafts, row) of each draft, the worthiest
    first."""
    gains = []
    for row, offered in enumerate(chances):
        gain = 1.0
        for place, chance in enumerate(offered):
            gain *= chance
            gains.append((gain, place, row))
    # Among equals what comes first in its row: so the ones before a draft are always chosen with it.
    gains.sort(key=_worth, reverse=True)
    return gains


def _worth(gain: tuple[float, int, int]) -> tuple[float, int]:
    return gain[0], -gain[1]


def _lengths(gains: Sequence[tuple[float, int, int]], best: tuple[int, int], num_rows: int) -> list[int]:
    num_drafts, depth = best
    lengths = [0] * num_rows
    for _, place, row in gains:
        if num_drafts == 0:
            break
        if place < depth:
            lengths[row] += 1
            num_drafts -= 1
    return lengths
