from __future__ import annotations

import math
import statistics
from itertools import islice, pairwise

import pytest

from headrace.clients.bench_arrivals import arrival_times

NUM = 20_000


def gaps(**options: object) -> list[float]:
    """The first gaps of a process at four arrivals per second."""
    times = islice(arrival_times(4.0, **options), NUM + 1)  # type: ignore[arg-type]
    return [later - earlier for earlier, later in pairwise(times)]


def variation(values: list[float]) -> float:
    """Coefficient of variation."""
    return statistics.pstdev(values) / statistics.fmean(values)


def test_the_same_seed_means_the_same_times() -> None:
    first, again, other = (list(islice(arrival_times(3.0, seed=seed), 50)) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(burstiness: float) -> None:
    drawn = gaps(burstiness=burstiness, seed=7)
    # Standard error of the mean of NUM gaps, relative: variation / sqrt(NUM), below 1.5 %.
    assert statistics.fmean(drawn) == pytest.approx(0.25, rel=0.06)
    assert variation(drawn) == pytest.approx(1 / math.sqrt(burstiness), rel=0.08)


def test_poisson_gaps_are_exponential() -> None:
    drawn = gaps(seed=3)
    for bound in (0.1, 0.25, 0.5):
        share = sum(gap <= bound for gap in drawn) / NUM
        assert share == pytest.approx(1 - math.exp(-4 * bound), abs=0.02)


def test_constant_gaps_are_equal() -> None:
    assert list(islice(arrival_times(4.0, "constant"), 4)) == [0.0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize("process", ["poisson", "constant"])
def test_an_infinite_rate_makes_all_due_at_once(process: str) -> None:
    assert list(islice(arrival_times(math.inf, process), 3)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0.0,), "no rate"),
        ((-1.0,), "no rate"),
        ((math.nan,), "no rate"),
        ((1.0, "uniform"), "poisson, constant"),
        ((1.0, "poisson", 0.0), "out of range"),
        ((1.0, "poisson", math.inf), "out of range"),
        ((1.0, "constant", 2.0), "no burstiness"),
    ],
)
def test_what_is_no_process_is_refused_at_once(arguments: tuple[float, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        arrival_times(*arguments)  # type: ignore[arg-type]
