"""Log-probabilities, ranks and likeliest tokens: exact, also at ties, and the same in any batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.engine.outputs import TokenLogprob, TokenLogprobs
from headrace.engine.sampling.logprobs import logprob_table, read_logprobs
from tests.support.far_device import as_if_far


@pytest.fixture(scope="module", autouse=True, params=["here", "far"])
def where(request: pytest.FixtureRequest) -> Iterator[None]:
    """On a CPU, and as on a device whose numbers take waiting to look at: results are the same."""
    with as_if_far() if request.param == "far" else nullcontext():
        yield


LEVELS = st.sampled_from([0.0, 0.5, 1.0, 3.0, -7.0, -math.inf])


def tell(logits: Tensor, token_ids: list[int], num_top: int, width: int | None = None) -> list[TokenLogprobs]:
    """Through a table that is made for `width` likeliest tokens."""
    table = logprob_table(logits, torch.tensor(token_ids), num_top if width is None else width)
    told = [read_logprobs(row, num_top) for row in table.tolist()]
    assert None not in told
    return [entry for entry in told if entry is not None]


def expected(logits: list[float], token_id: int, num_top: int) -> TokenLogprobs:
    """The definition, in plain floats."""
    log_total = max(logits) + math.log(math.fsum(math.exp(x - max(logits)) for x in logits))

    def entry(i: int) -> TokenLogprob:
        return TokenLogprob(i, logits[i] - log_total, 1 + sum(x > logits[i] for x in logits))

    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    return TokenLogprobs(entry(token_id), tuple(entry(i) for i in order[:num_top]))


def assert_same(ours: TokenLogprobs, theirs: TokenLogprobs) -> None:
    pairs = list(zip((ours.chosen, *ours.top), (theirs.chosen, *theirs.top), strict=True))
    assert [(a.token_id, a.rank) for a, _ in pairs] == [(b.token_id, b.rank) for _, b in pairs]
    assert [a.logprob for a, _ in pairs] == pytest.approx([b.logprob for _, b in pairs], abs=1e-5)


@given(
    logits=st.lists(LEVELS, min_size=1, max_size=10).filter(lambda x: max(x) > -math.inf),
    num_top=st.integers(0, 12),
    more=st.integers(0, 3),
    token=st.integers(0, 9),
)
def test_they_are_the_definition(*, logits: list[float], num_top: int, more: int, token: int) -> None:
    """Ties everywhere, at the border of the list too; a table may hold more than one row asks for."""
    token_id = token % len(logits)

    (told,) = tell(torch.tensor([logits]), [token_id], num_top, num_top + more)

    assert_same(told, expected(logits, token_id, num_top))


@pytest.mark.parametrize("vocab_size", [7, 256, 1021])
@pytest.mark.parametrize("num_top", [0, 1, 5, 64])
def test_they_are_torchs_log_softmax(vocab_size: int, num_top: int) -> None:
    logits = torch.randn(20, vocab_size, generator=torch.Generator().manual_seed(6)) * 4
    token_ids = [i % vocab_size for i in range(20)]
    theirs = torch.log_softmax(logits.double(), dim=-1)

    for told, row, token_id in zip(tell(logits, token_ids, num_top), theirs, token_ids, strict=True):
        assert told.chosen.token_id == token_id
        assert told.chosen.logprob == pytest.approx(row[token_id].item(), abs=1e-5)
        assert told.chosen.rank == 1 + int((row > row[token_id]).sum())
        values, ids = row.topk(min(num_top, vocab_size))
        assert [entry.token_id for entry in told.top] == ids.tolist()
        assert [entry.logprob for entry in told.top] == pytest.approx(values.tolist(), abs=1e-5)
        assert [entry.rank for entry in told.top] == list(range(1, len(ids) + 1))


def test_equal_tokens_share_the_better_rank_and_the_lowest_ids_are_told() -> None:
    logits = torch.tensor([[1.0, 4.0, 1.0, 4.0, 1.0, 9.0, 1.0]])

    (told,) = tell(logits, [6], 4)

    assert (told.chosen.token_id, told.chosen.rank) == (6, 4)
    assert [(entry.token_id, entry.rank) for entry in told.top] == [(5, 1), (1, 2), (3, 2), (0, 4)]


@pytest.mark.parametrize("vocab_size", [8, 700])
def test_a_row_is_told_the_same_alone_and_in_any_batch(vocab_size: int) -> None:
    """To the last bit; coarse logits, so that there are ties, and neighbours that ask for more."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(30, vocab_size, generator=generator).mul(3).bfloat16().float()
    logits[7] = math.nan
    token_ids = [i % vocab_size for i in range(30)]
    together = logprob_table(logits, torch.tensor(token_ids), 9).tolist()

    for i, row in enumerate(together):
        alone = logprob_table(logits[i : i + 1], torch.tensor(token_ids[i : i + 1]), 4).tolist()[0]
        assert read_logprobs(row, 4) == read_logprobs(alone, 4)
        assert (read_logprobs(row, 4) is None) == (i == 7)


@pytest.mark.parametrize("sick", [math.nan, math.inf])
def test_logits_that_are_not_finite_have_no_logprobs(sick: float) -> None:
    logits = torch.tensor([[1.0, sick, 0.0], [1.0, 2.0, -math.inf], [-math.inf] * 3])

    table = logprob_table(logits, torch.tensor([0, 2, 1]), 2).tolist()

    assert read_logprobs(table[0], 2) is None
    assert read_logprobs(table[2], 2) is None
    told = read_logprobs(table[1], 2)
    assert told is not None
    assert told.chosen == TokenLogprob(2, -math.inf, 3)


def test_logits_are_left_as_they_were() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0], [0.0, 0.0, 0.0]])
    before = logits.clone()

    tell(logits, [1, 2], 2)

    assert torch.equal(logits, before)
