"""Reductions along the vocabulary: right, and the same whatever shares the batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.native.kit import native_kit
from headrace.engine.sampling import reductions
from headrace.engine.sampling.reductions import RUN, at_least, highest, numbered, totals

KITS = [pytest.param(True, id="compiled"), pytest.param(False, id="torch")]
WIDTHS = [1, 2, 17, RUN - 1, RUN, RUN + 1, 3 * RUN, 1021]


@pytest.fixture(params=KITS)
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiled kernels, where they are built, and without."""
    if not request.param:
        monkeypatch.setattr(reductions, "native_kit", lambda: None)
    elif native_kit() is None:
        pytest.skip("the kernels are not built")


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize("width", WIDTHS)
def test_the_highest_is_the_lowest_id_that_has_it(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    logits = torch.randint(0, 4, (50, width), generator=generator).float()

    values, token_ids = highest(logits)

    for row, value, token_id in zip(logits.tolist(), values.tolist(), token_ids.tolist(), strict=True):
        assert value == max(row)
        assert token_id == row.index(value)


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("logit", [-5.0, -math.inf])
def test_what_fills_up_the_last_run_is_never_the_highest(width: int, logit: float) -> None:
    values, token_ids = highest(torch.full((2, width), logit))

    assert values.tolist() == [logit, logit]
    assert token_ids.tolist() == [0, 0]


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize("place", [0, RUN - 1, RUN, 600])
def test_one_nan_shows(place: int) -> None:
    logits = torch.zeros(3, 601)
    logits[1, place] = math.nan

    values, token_ids = highest(logits)

    assert values.isnan().tolist() == [False, True, False]
    assert token_ids.tolist() == [0, place, 0]


@pytest.mark.parametrize("width", WIDTHS)
def test_totals_are_exact_and_the_same_alone_and_in_any_batch(width: int) -> None:
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(40, width, generator=generator)

    together = totals(weights)

    assert together.tolist() == [totals(weights[i : i + 1]).item() for i in range(40)]
    exact = [math.fsum(row) for row in weights.tolist()]
    torch.testing.assert_close(together, torch.tensor(exact, dtype=torch.float64), rtol=1e-6, atol=0.0)


def test_at_least_takes_each_row_by_its_own_measure() -> None:
    scores = torch.tensor([[1.0, 2.0, math.nan], [1.0, 2.0, -math.inf]])

    assert at_least(scores, torch.tensor([2.0, -math.inf])).tolist() == [[0.0, 1.0, 0.0], [1.0, 1.0, 1.0]]


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=6))
def test_numbered_counts_anew_in_each_row(rows: list[list[bool]]) -> None:
    which, token_ids, places = numbered(torch.tensor(rows))

    found = list(zip(which.tolist(), token_ids.tolist(), places.tolist(), strict=True))
    assert found == [(i, j, sum(row[:j])) for i, row in enumerate(rows) for j in range(4) if row[j]]
