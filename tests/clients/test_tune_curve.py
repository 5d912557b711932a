from __future__ import annotations

import pytest

from headrace.clients.tune_curve import CurvePoint, LatencyBudget, best_within, find_knee, frontier


def point(concurrency: int, tpot_ms: float, tokens_per_s: float, **fields: object) -> CurvePoint:
    """A measured point; p95 is twice the median where nothing else is said."""
    defaults: dict[str, object] = {
        "concurrency": concurrency,
        "max_num_batched_tokens": None,
        "output_tokens_per_s": tokens_per_s,
        "requests_per_s": 1.0,
        "tpot_p50_s": tpot_ms / 1e3,
        "tpot_p95_s": 2 * tpot_ms / 1e3,
        "ttft_p50_s": 0.1,
        "ttft_p95_s": 0.2,
        "num_requests": 16,
    }
    return CurvePoint(**{**defaults, **fields})  # type: ignore[arg-type]


SATURATING = [
    point(1, 10, 100),
    point(2, 11, 180),
    point(4, 13, 300),
    point(8, 18, 430),
    point(16, 33, 480),
    point(32, 64, 490),
]


def test_the_knee_of_a_saturating_curve_is_where_throughput_is_ahead_by_most() -> None:
    # Scaled by hand: (8 at a time) latency 8/54 = 0.148, throughput 330/390 = 0.846, ahead by 0.698;
    # its neighbours are ahead by 0.457 and 0.548.
    assert find_knee(SATURATING) == SATURATING[3]


def test_the_order_of_measuring_does_not_matter() -> None:
    assert find_knee(SATURATING[::-1]) == SATURATING[3]


@pytest.mark.parametrize("exponent", [0.25, 0.5])
def test_the_knee_of_a_root_is_where_its_slope_is_that_of_the_diagonal(exponent: float) -> None:
    # y = x ** e is ahead of x by most where e x ** (e - 1) = 1.
    curve = [point(i + 1, 1 + i, 1 + 100 * (i / 100) ** exponent) for i in range(101)]
    expected = exponent ** (1 / (1 - exponent))
    knee = find_knee(curve)
    assert knee is not None
    assert (knee.concurrency - 1) / 100 == pytest.approx(expected, abs=0.011)


def test_without_a_bend_the_knee_is_out_of_range() -> None:
    straight = [point(i, 10 * i, 100 * i) for i in (1, 2, 3)]
    convex = [point(1, 10, 100), point(2, 20, 110), point(3, 30, 300)]
    assert find_knee(straight) is None
    assert find_knee(convex) is None
    # Beyond it nothing more is gained: there is the bend.
    assert find_knee([*straight, point(4, 45, 290)]) == straight[-1]
    assert find_knee([*straight, point(4, 45, 290, num_failed=1)]) is None


def test_a_slow_point_of_fewer_requests_is_not_beyond_the_last_one() -> None:
    # As where the machine was busy at first, or took its time to get going.
    assert find_knee([point(1, 40, 25), point(2, 20, 90)]) is None
    assert find_knee([point(1, 40, 25), point(2, 20, 90), point(4, 41, 85)]) == point(2, 20, 90)


def test_too_few_points_have_no_knee() -> None:
    assert find_knee([]) is None
    assert find_knee(SATURATING[:1]) is None
    assert find_knee(SATURATING[:2]) is None
    assert find_knee(SATURATING[:4]) == SATURATING[2]


def test_points_that_others_beat_do_not_count() -> None:
    slower_and_worse = point(64, 90, 400)
    noise = point(3, 14, 290)
    assert frontier([*SATURATING, slower_and_worse, noise]) == SATURATING
    assert find_knee([*SATURATING, slower_and_worse, noise]) == SATURATING[3]


def test_a_point_with_failed_requests_is_never_recommended() -> None:
    flawed = [point(8, 18, 900, num_failed=1), *SATURATING]
    assert find_knee(flawed) == SATURATING[3]
    assert best_within(flawed, LatencyBudget(tpot_s=1.0)) == SATURATING[5]
    assert find_knee([point(1, 1, 1, num_failed=1)]) is None


@pytest.mark.parametrize(
    ("budget", "place"),
    [
        (LatencyBudget(), 5),
        (LatencyBudget(tpot_s=0.036), 3),
        (LatencyBudget(tpot_s=0.0359), 2),
        (LatencyBudget(tpot_s=0.036, ttft_s=0.2), 3),
    ],
)
def test_the_best_point_within_a_budget_is_judged_by_p95(budget: LatencyBudget, place: int) -> None:
    assert best_within(SATURATING, budget) == SATURATING[place]


@pytest.mark.parametrize("budget", [LatencyBudget(tpot_s=0.001), LatencyBudget(ttft_s=0.1)])
def test_a_budget_that_nothing_keeps_has_no_best_point(budget: LatencyBudget) -> None:
    assert best_within(SATURATING, budget) is None
