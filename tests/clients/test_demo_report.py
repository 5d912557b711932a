"""Figures follow from the counts, and the words from the figures."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from headrace.clients.demo_report import RunFigures, explanation, figures_as_json, percentile, print_report
from headrace.clients.events import StepTotals


def figures(batching: str, num_steps: int, num_rows: int, wall_s: float) -> RunFigures:
    return RunFigures(
        batching=batching,
        num_slots=8,
        num_tokens=1000,
        wall_s=wall_s,
        latencies_s=(1.0, 2.0, 6.0),
        first_token_s=(0.1, 0.2, 0.6),
        totals=StepTotals(
            num_steps=num_steps, num_rows=num_rows, num_kv_slots_allocated=1030, num_kv_slots_used=1000
        ),
    )


GOOD, BAD = figures("continuous", 200, 1200, 10.0), figures("static", 500, 1200, 25.0)


def test_figures_are_what_they_are_called() -> None:
    assert GOOD.tokens_per_s == 100.0
    assert GOOD.occupancy == pytest.approx(0.75)
    assert GOOD.kv_waste == pytest.approx(0.03)
    assert GOOD.mean_latency_s == 3.0
    assert GOOD.p99_latency_s == 6.0
    assert GOOD.mean_first_token_s == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ((5.0,), 0.99, 5.0),
        ((3.0, 1.0, 2.0), 0.5, 2.0),
        (tuple(range(1, 101)), 0.99, 99),
        ((1.0, 2.0), 0.0, 1.0),
    ],
    ids=str,
)
def test_percentile_is_one_of_the_values(values: tuple[float, ...], share: float, expected: float) -> None:
    assert percentile(values, share) == expected


def test_the_report_shows_both_runs_and_their_ratio() -> None:
    out = io.StringIO()
    print_report(Console(file=out, width=100), [GOOD, BAD], num_equal_answers=3)
    text = out.getvalue()
    assert "continuous" in text
    assert "static" in text
    (steps_line,) = (line for line in text.splitlines() if "steps" in line and "0.40 ×" in line)
    assert "200" in steps_line
    assert "500" in steps_line
    assert "75.0%" in text
    assert "3.0%" in text


def test_the_words_do_not_claim_what_was_not_measured() -> None:
    assert "took 200 steps instead of 500" in explanation(GOOD, BAD, 3)
    assert "saved no steps this time: 500 against 200" in explanation(BAD, GOOD, 3)


def test_the_json_has_both_ratios() -> None:
    written = figures_as_json([GOOD, BAD], 2, "m")
    assert written["steps_ratio"] == 2.5
    assert written["tokens_per_s_ratio"] == 2.5
    assert written["num_equal_answers"] == 2
