"""The definitions, by numbers that can be checked by hand."""

from __future__ import annotations

import pytest

from headrace.clients.bench_stats import (
    RequestRecord,
    Targets,
    distribution,
    peak_concurrency,
    percentile,
    summarize,
)


def record(
    *arrivals: tuple[float, int], due_s: float = 0.0, sent_s: float | None = None, **fields: object
) -> RequestRecord:
    """A complete request, unless `error` is given."""
    made = RequestRecord(
        number=0,
        num_wanted=sum(count for _, count in arrivals),
        due_s=due_s,
        sent_s=due_s if sent_s is None else sent_s,
        arrivals=list(arrivals),
        end_s=arrivals[-1][0] if arrivals else due_s,
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([7.0], 99, 7.0),
        ([1.0, 2.0], 50, 1.5),
        ([4.0, 1.0, 3.0, 2.0], 50, 2.5),
        ([4.0, 1.0, 3.0, 2.0], 90, 3.7),
        ([float(i) for i in range(101)], 95, 95.0),
        ([10.0, 20.0, 30.0], 0, 10.0),
        ([10.0, 20.0, 30.0], 100, 30.0),
    ],
)
def test_a_percentile_lies_between_neighbours_in_proportion(
    values: list[float], percent: float, expected: float
) -> None:
    assert percentile(values, percent) == pytest.approx(expected)


def test_a_distribution_leaves_out_what_does_not_exist() -> None:
    assert distribution([None, None]) is None
    found = distribution([3.0, None, 1.0])
    assert found is not None
    assert (found.count, found.mean, found.minimum, found.maximum, found.at(50)) == (2, 2.0, 1.0, 3.0, 2.0)


def test_latencies_count_from_when_a_request_was_due_not_from_when_it_was_sent() -> None:
    one = record((3.0, 1), (3.5, 1), (4.5, 1), due_s=1.0, sent_s=2.5)
    assert (one.ttft_s, one.e2e_s, one.lateness_s) == (2.0, 3.5, 1.5)


def test_tpot_is_the_time_after_the_first_token_shared_by_the_tokens_after_it() -> None:
    assert record((1.0, 1), (1.5, 1), (2.5, 1)).tpot_s == pytest.approx(0.75)
    assert record((1.0, 2), (3.0, 2)).tpot_s == pytest.approx(2 / 3)
    assert record((1.0, 3)).tpot_s == 0.0


def test_one_token_has_no_tpot_and_no_gap() -> None:
    only = record((1.0, 1))
    assert (only.tpot_s, only.itls_s, only.ttft_s, only.e2e_s) == (None, [], 1.0, 1.0)


def test_tokens_that_arrive_together_have_gaps_of_zero() -> None:
    assert record((1.0, 2), (3.0, 3), (3.5, 1)).itls_s == [0.0, 2.0, 0.0, 0.0, 0.5]


def test_no_token_means_no_latency() -> None:
    nothing = record(error="UNAVAILABLE")
    assert (nothing.ttft_s, nothing.tpot_s, nothing.e2e_s, nothing.is_complete) == (None, None, None, False)


def test_throughput_is_of_complete_requests_over_the_whole_run_failures_included() -> None:
    summary = summarize(
        [
            record((1.0, 1), (2.0, 3), num_prompt_tokens=10),
            record((1.0, 1), (4.0, 5), due_s=0.5, num_prompt_tokens=20),
            record((2.0, 7), due_s=1.0, num_prompt_tokens=99, error="INTERNAL", end_s=5.0),
        ]
    )
    assert summary.wall_s == 5.0
    assert (summary.num_complete, summary.num_failed, summary.num_lost_tokens) == (2, 1, 7)
    assert summary.output_tokens_per_s == 10 / 5
    assert summary.total_tokens_per_s == 40 / 5
    assert summary.requests_per_s == 2 / 5
    assert summary.ttft_s is not None
    assert summary.ttft_s.count == 2


def test_failures_are_counted_by_code() -> None:
    codes = ["INTERNAL", "HTTP_503", "INTERNAL"]
    summary = summarize([record((1.0, 1)), *(record(error=code) for code in codes)])
    assert summary.errors == (("INTERNAL", 2), ("HTTP_503", 1))
    assert summary.num_requests == 4


def test_an_answer_that_is_shorter_than_asked_for_is_counted() -> None:
    assert summarize([record((1.0, 3), num_wanted=5), record((1.0, 3))]).num_short == 1


def test_a_run_without_requests_has_figures_of_zero() -> None:
    summary = summarize([])
    assert (summary.num_requests, summary.wall_s, summary.output_tokens_per_s) == (0, 0.0, 0.0)
    assert (summary.ttft_s, summary.goodput_per_s) == (None, None)


@pytest.mark.parametrize(
    ("targets", "is_good"),
    [
        (Targets(), True),
        (Targets(ttft_s=1.0), True),
        (Targets(ttft_s=0.99), False),
        (Targets(tpot_s=0.75), True),
        (Targets(tpot_s=0.7), False),
        (Targets(itl_s=1.0), True),
        (Targets(itl_s=0.9), False),
        (Targets(e2e_s=2.5), True),
        (Targets(e2e_s=2.4), False),
        (Targets(ttft_s=1.0, e2e_s=2.4), False),
    ],
)
def test_a_good_request_meets_every_target(targets: Targets, is_good: bool) -> None:
    assert targets.are_met_by(record((1.0, 1), (1.5, 1), (2.5, 1))) is is_good


def test_a_failed_request_is_never_good_however_fast_it_was() -> None:
    assert not Targets(ttft_s=9.0).are_met_by(record((0.1, 1), error="INTERNAL"))


def test_one_token_keeps_any_promise_about_the_tokens_after_it() -> None:
    assert Targets(tpot_s=0.001, itl_s=0.001).are_met_by(record((1.0, 1)))


def test_goodput_is_good_requests_per_second_and_a_share_of_all() -> None:
    records = [record((1.0, 1)), record((4.0, 1)), record(error="INTERNAL", end_s=4.0), record((2.0, 1))]
    summary = summarize(records, Targets(ttft_s=2.0))
    assert summary.goodput_per_s == 2 / 4
    assert summary.good_share == 2 / 4


def test_the_peak_counts_open_requests_and_gives_a_place_to_the_next_at_once() -> None:
    first = record((1.0, 1))
    second = record((2.0, 1), due_s=1.0)
    third = record((3.0, 1), due_s=1.5)
    assert peak_concurrency([first, second]) == 1
    assert peak_concurrency([first, second, third]) == 2
    assert peak_concurrency([]) == 0
