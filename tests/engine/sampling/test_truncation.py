"""What temperature, top-k, top-p, typical-p and min-p leave: equal to definition and transformers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.row import SampledRow
from headrace.engine.sampling.truncation import token_weights
from tests.support.far_device import as_if_far
from tests.support.slow_sampling import probabilities, typicality_gap


@pytest.fixture(scope="module", autouse=True, params=["here", "far"])
def where(request: pytest.FixtureRequest) -> Iterator[None]:
    """On a CPU, and as on a device whose numbers take waiting to look at: results are the same."""
    with as_if_far() if request.param == "far" else nullcontext():
        yield


def weights_of(logits: Tensor, *params: SamplingParams) -> Tensor:
    return token_weights(logits, logits.amax(dim=1), params)


def assert_kept(logits: Sequence[float], token_ids: list[int], **controls: Any) -> None:
    weights = weights_of(torch.tensor([logits]), SamplingParams(**controls))
    assert torch.nonzero(weights[0]).flatten().tolist() == token_ids


def test_the_order_is_temperature_then_top_k_then_top_p() -> None:
    """Top-p after top-k counts its mass among the k that are left, and temperature changes both."""
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]

    assert_kept(logits, [0, 1, 2], temperature=1.0, top_p=0.8)
    assert_kept(logits, [0, 1], temperature=1.0, top_k=2, top_p=0.8)
    assert_kept(logits, [0], temperature=1.0, top_k=2, top_p=0.57)
    assert_kept(logits, [0, 1, 2, 3], temperature=100.0, top_p=0.8)


def test_typical_p_may_remove_the_likeliest_and_min_p_then_measures_by_what_is_left() -> None:
    """The expected surprise lies near that of the many, far from that of the one."""
    logits = [math.log(p) for p in (0.3, *[0.1] * 5, *[0.05] * 4)]

    assert_kept(logits, [1, 2, 3, 4], typical_p=0.35)
    assert_kept(logits, [1, 2, 3, 4, 5, 6], typical_p=0.53)
    assert_kept(logits, [1, 2, 3, 4, 5], typical_p=0.53, min_p=0.6)
    assert_kept(logits, [0], min_p=0.6)


def test_typical_p_works_on_what_top_k_and_top_p_left() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.1, 0.1, 0.1)]

    assert_kept(logits, [1], typical_p=0.2)
    assert_kept(logits, [0], typical_p=0.5, top_k=2)
    assert_kept(logits, [0, 1], typical_p=0.999, top_k=2)


@pytest.mark.parametrize("controls", [{"top_k": 4}, {"top_p": 0.4}, {"typical_p": 0.4}], ids=str)
def test_ties_at_the_border_keep_the_lowest_ids(controls: dict[str, Any]) -> None:
    assert_kept([1.0] * 10, [0, 1, 2, 3], **controls)
    assert_kept([0.0, 1.0, 1.0, 5.0, 1.0], [1, 2, 3], top_k=3)


@pytest.mark.parametrize("num_kept", [1, 63, 64, 65, 511, 512, 513, 600])
@pytest.mark.parametrize("vocab_size", [600, 9000])
def test_ties_at_the_border_keep_the_lowest_ids_however_many_are_looked_at(
    num_kept: int, vocab_size: int
) -> None:
    logits = [0.5] * vocab_size

    if num_kept > 1:  # else it is greedy
        assert_kept(logits, list(range(num_kept)), top_k=num_kept)
    assert_kept(logits, list(range(num_kept)), top_p=(num_kept - 0.5) / vocab_size)
    assert_kept(logits, list(range(num_kept)), typical_p=(num_kept - 0.5) / vocab_size)


def test_impossible_tokens_fill_no_place() -> None:
    logits = [-math.inf, 1.0, -math.inf, 2.0, *[-math.inf] * 100]

    for controls in ({"top_k": 50}, {"top_p": 0.999999}, {"typical_p": 0.999999}, {"min_p": 1e-9}, {}):
        assert_kept(logits, [1, 3], **controls)


@given(
    logits=st.lists(st.sampled_from([0.0, 1.0, 2.0, 5.0, -3.0, 0.5, -math.inf]), min_size=1, max_size=12),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, 14).filter(lambda k: k != 1),
    top_p=st.sampled_from([0.01, 0.37, 0.83, 0.999, 1.0]),
    typical_p=st.sampled_from([0.01, 0.36, 0.82, 0.998, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.61, 1.0]),
)
def test_weights_are_the_exact_probabilities(
    *, logits: list[float], temperature: float, top_k: int, top_p: float, typical_p: float, min_p: float
) -> None:
    assume(max(logits) > -math.inf)
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, typical_p=typical_p, min_p=min_p
    )
    before_typical = SampledRow(replace(params, typical_p=1.0, min_p=0.0), 0, 0)
    assume(typicality_gap(probabilities(logits, before_typical)) > 1e-6)

    weights = weights_of(torch.tensor([logits]), params).double()[0]

    expected = torch.tensor(probabilities(logits, SampledRow(params, 0, 0)), dtype=torch.float64)
    torch.testing.assert_close(weights / weights.sum(), expected, rtol=1e-5, atol=1e-7)


WARPERS: list[tuple[dict[str, Any], list[LogitsProcessor]]] = [
    ({"top_k": 40}, [TopKLogitsWarper(40)]),
    ({"top_k": 700}, [TopKLogitsWarper(700)]),
    ({"top_p": 0.9}, [TopPLogitsWarper(0.9)]),
    ({"top_p": 0.05}, [TopPLogitsWarper(0.05)]),
    ({"typical_p": 0.9}, [TypicalLogitsWarper(0.9)]),
    ({"typical_p": 0.2}, [TypicalLogitsWarper(0.2)]),
    ({"min_p": 0.05}, [MinPLogitsWarper(0.05)]),
    ({"temperature": 0.6, "top_k": 40}, [TemperatureLogitsWarper(0.6), TopKLogitsWarper(40)]),
    ({"temperature": 1.7, "top_p": 0.8}, [TemperatureLogitsWarper(1.7), TopPLogitsWarper(0.8)]),
    ({"top_k": 100, "top_p": 0.8}, [TopKLogitsWarper(100), TopPLogitsWarper(0.8)]),
    ({"top_p": 0.8, "typical_p": 0.7}, [TopPLogitsWarper(0.8), TypicalLogitsWarper(0.7)]),
    ({"top_k": 90, "typical_p": 0.7}, [TopKLogitsWarper(90), TypicalLogitsWarper(0.7)]),
    ({"top_p": 0.9, "min_p": 0.1}, [TopPLogitsWarper(0.9), MinPLogitsWarper(0.1)]),
    ({"typical_p": 0.9, "min_p": 0.1}, [TypicalLogitsWarper(0.9), MinPLogitsWarper(0.1)]),
]


@pytest.mark.parametrize("spread", [0.3, 1.5, 4.0])
@pytest.mark.parametrize(("controls", "warpers"), WARPERS, ids=[str(controls) for controls, _ in WARPERS])
def test_what_is_kept_is_what_transformers_keeps(
    controls: dict[str, Any], warpers: list[LogitsProcessor], spread: float
) -> None:
    logits = torch.randn(6, 1500, generator=torch.Generator().manual_seed(2)) * spread
    theirs = logits.double()  # in single precision they would keep another one on some processors
    for warper in warpers:
        theirs = warper(torch.empty(6, 0, dtype=torch.int64), theirs)

    weights = weights_of(logits, *[SamplingParams(**controls)] * 6)

    ours = weights.double() / weights.sum(dim=1, keepdim=True, dtype=torch.float64)
    torch.testing.assert_close(ours, torch.softmax(theirs.double(), dim=1), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("vocab_size", [2, 17, 255, 1021])
@pytest.mark.parametrize(
    "controls",
    [{}, {"temperature": 0.02}, {"top_k": 5}, {"top_p": 0.9}, {"typical_p": 0.8}, {"min_p": 0.1}],
    ids=str,
)
def test_weights_are_the_same_alone_and_in_any_batch(controls: dict[str, Any], vocab_size: int) -> None:
    """To the last bit, wherever a row lies in memory."""
    logits = torch.randn(23, vocab_size, generator=torch.Generator().manual_seed(2)) * 9
    logits[:, ::7] = -math.inf
    logits[5, 1] = math.nan
    rows = [SamplingParams(**controls) if i % 2 else SamplingParams(top_p=0.7) for i in range(23)]

    together = weights_of(logits, *rows)

    for i, params in enumerate(rows):
        alone = weights_of(logits[i : i + 1].clone(), params)
        torch.testing.assert_close(together[i : i + 1], alone, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.9999])
@pytest.mark.parametrize("top_k", [0, 700, 5000])
@pytest.mark.parametrize("typical_p", [0.5, 1.0])
def test_a_flat_vocabulary_is_sorted_as_far_as_it_must_be(top_p: float, top_k: int, typical_p: float) -> None:
    """No control is satisfied by the few tokens that are looked at first."""
    vocab_size = 20_003
    logits = torch.linspace(0.0, 0.1, vocab_size)
    params = SamplingParams(top_k=top_k, top_p=top_p, typical_p=typical_p)

    kept = int(weights_of(logits[None], params).count_nonzero())

    ordered = torch.softmax(logits.double(), 0).flip(0)[: top_k or vocab_size]
    nucleus = ordered[: int((ordered.cumsum(0) < top_p * ordered.sum()).sum()) + 1]
    surprise = -torch.log(nucleus / nucleus.sum())
    order = (surprise - (surprise * nucleus / nucleus.sum()).sum()).abs().argsort()
    mass = (nucleus / nucleus.sum())[order].cumsum(0)
    expected = int((mass < typical_p).sum()) + 1 if typical_p < 1 else len(nucleus)
    assert abs(kept - expected) <= 1
