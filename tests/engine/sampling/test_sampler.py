"""What each control keeps, how often each token is drawn, and that rows never touch each other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.row import SampledRow
from headrace.engine.sampling.sampler import sample
from headrace.engine.sampling.truncation import token_weights

LOGITS = (1.0, 3.0, -2.0, 2.5, 0.0, 3.0, -math.inf, 1.5)
"""Two likeliest tokens at a tie, one impossible token."""


def sample_one(logits: Sequence[float] | Tensor, position: int = 0, **controls: Any) -> int:
    rows = [SampledRow(SamplingParams(**controls), 0, position)]
    return int(sample(torch.as_tensor(logits).float()[None], rows).token_ids[0])


def exact_probabilities(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """The definition, in plain floats."""
    scaled = [x / params.temperature for x in logits]
    weights = [math.exp(x - max(scaled)) for x in scaled]
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1.0:
        total, mass, kept = sum(weights[i] for i in order), 0.0, []
        for i in order:
            kept.append(i)
            mass += weights[i]
            if mass >= params.top_p * total:
                break
        order = kept
    order = [i for i in order if weights[i] >= params.min_p * max(weights)]
    total = sum(weights[i] for i in order)
    return [weights[i] / total if i in order else 0.0 for i in range(len(weights))]


def assert_drawn_as(logits: Sequence[float], params: SamplingParams, num_draws: int = 8_000) -> None:
    """Chi-square of many draws, at one position each, against the exact probabilities."""
    rows = [SampledRow(params, 0, position) for position in range(num_draws)]
    drawn = sample(torch.tensor(logits).expand(num_draws, -1), rows)
    assert bool(drawn.is_healthy.all())
    counts = Counter(drawn.token_ids.tolist())
    probabilities = exact_probabilities(logits, params)
    possible = {i for i, p in enumerate(probabilities) if p > 0.0}
    assert set(counts) <= possible
    chi_square = sum(
        (counts[i] - num_draws * probabilities[i]) ** 2 / (num_draws * probabilities[i]) for i in possible
    )
    freedom = max(len(possible) - 1, 1)
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


CONTROLS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.75},
    "min_p": {"min_p": 0.3},
    "temperature+top_k": {"temperature": 1.6, "top_k": 4},
    "temperature+top_p": {"temperature": 1.6, "top_p": 0.6},
    "temperature+min_p": {"temperature": 1.6, "min_p": 0.4},
    "top_k+top_p": {"top_k": 4, "top_p": 0.8},
    "top_k+min_p": {"top_k": 4, "min_p": 0.5},
    "top_p+min_p": {"top_p": 0.9, "min_p": 0.5},
    "all": {"temperature": 1.3, "top_k": 5, "top_p": 0.93, "min_p": 0.15},
}


@pytest.mark.parametrize("controls", CONTROLS.values(), ids=CONTROLS)
def test_tokens_are_drawn_as_often_as_they_are_likely(controls: dict[str, Any]) -> None:
    assert_drawn_as(LOGITS, SamplingParams(seed=11, **controls))


def test_without_controls_the_model_s_own_probabilities_are_drawn() -> None:
    assert_drawn_as(LOGITS, SamplingParams(seed=12))


def test_the_order_is_temperature_then_top_k_then_top_p() -> None:
    """Top-p after top-k counts its mass among the k that are left, and temperature changes both."""
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]

    assert_kept(logits, [0, 1, 2], temperature=1.0, top_p=0.8)
    assert_kept(logits, [0, 1], temperature=1.0, top_k=2, top_p=0.8)
    assert_kept(logits, [0], temperature=1.0, top_k=2, top_p=0.57)
    assert_kept(logits, [0, 1, 2, 3], temperature=100.0, top_p=0.8)


def assert_kept(logits: Sequence[float], token_ids: list[int], **controls: Any) -> None:
    x = torch.tensor([logits])
    weights = token_weights(x, x.amax(dim=1), [SamplingParams(**controls)])
    assert torch.nonzero(weights[0]).flatten().tolist() == token_ids


@given(
    logits=st.lists(st.sampled_from([0.0, 1.0, 2.0, 5.0, -3.0, 0.5]), min_size=1, max_size=12),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(2, 14),
    top_p=st.sampled_from([0.01, 0.37, 0.83, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.61, 1.0]),
)
def test_weights_are_the_exact_probabilities(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    x = torch.tensor([logits])

    weights = token_weights(x, x.amax(dim=1), [params]).double()[0]

    expected = torch.tensor(exact_probabilities(logits, params), dtype=torch.float64)
    torch.testing.assert_close(weights / weights.sum(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "controls",
    [
        {"temperature": 0.0},
        {"temperature": 1e-12},
        {"top_k": 1},
        {"temperature": 0.0, "top_p": 0.5, "seed": 9},
    ],
)
def test_greedy_takes_the_lowest_id_of_the_likeliest(controls: dict[str, Any]) -> None:
    assert sample_one(LOGITS, **controls) == 1


@pytest.mark.parametrize("vocab_size", [2, 17, 511, 4099])
def test_greedy_takes_the_lowest_id_wherever_the_tie_is(vocab_size: int) -> None:
    logits = torch.zeros(vocab_size)
    logits[vocab_size // 2 :] = 1.0

    assert sample_one(logits, temperature=0.0) == vocab_size // 2


def test_ties_at_the_border_keep_the_lowest_ids() -> None:
    flat = [1.0] * 10

    assert_kept(flat, [0, 1, 2, 3], top_k=4)
    assert_kept(flat, [0, 1, 2, 3, 4], top_p=0.5)
    assert_kept([0.0, 1.0, 1.0, 5.0, 1.0], [1, 2, 3], top_k=3)


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.9999])
@pytest.mark.parametrize("top_k", [0, 700, 5000])
def test_a_flat_vocabulary_is_sorted_as_far_as_it_must_be(top_p: float, top_k: int) -> None:
    """Neither control is satisfied by the few likeliest tokens that are looked at first."""
    vocab_size = 5003
    logits = torch.linspace(0.0, 0.1, vocab_size)

    x = logits[None]
    kept = int(
        token_weights(x, x.amax(dim=1), [SamplingParams(top_k=top_k, top_p=top_p)]).count_nonzero().item()
    )

    ordered = torch.softmax(logits.double(), 0).flip(0)[: top_k or vocab_size]
    expected = int((ordered.cumsum(0) < top_p * ordered.sum()).sum()) + 1
    assert abs(kept - expected) <= 1


EDGES: list[dict[str, Any]] = [
    {"top_k": 0},
    {"top_k": 2**31},
    {"top_k": len(LOGITS)},
    {"top_p": 1.0},
    {"top_p": 1e-12},
    {"min_p": 0.0},
    {"min_p": 1.0},
    {"temperature": 0.0},
    {"temperature": 1e-12},
    {"temperature": 1e-5},
    {"temperature": 100.0},
    {"temperature": 100.0, "top_k": 2, "top_p": 1e-12, "min_p": 1.0},
    {"seed": 0},
    {"seed": 2**64 - 1},
]


@pytest.mark.parametrize("controls", EDGES, ids=str)
def test_edge_values_draw_possible_tokens(controls: dict[str, Any]) -> None:
    for position in range(50):
        assert LOGITS[sample_one(LOGITS, position, **controls)] > -math.inf


@pytest.mark.parametrize("controls", [{"top_p": 1e-12}, {"temperature": 1e-5}, {"min_p": 1.0}], ids=str)
def test_the_tightest_controls_leave_the_likeliest(controls: dict[str, Any]) -> None:
    assert {sample_one(LOGITS, position, **controls) for position in range(50)} <= {1, 5}


def test_the_loosest_controls_change_nothing() -> None:
    loose: list[dict[str, Any]] = [{"top_k": 0}, {"top_k": 10**9}, {"top_p": 1.0}, {"min_p": 0.0}]

    for position in range(50):
        assert len({sample_one(LOGITS, position, seed=3, **controls) for controls in loose}) == 1


@pytest.mark.parametrize("vocab_size", [8, 257, 1021])
def test_a_row_is_the_same_alone_and_in_any_batch(vocab_size: int) -> None:
    """Tokens and health, whatever its place and its neighbours, a neighbour of NaN among them."""
    generator = torch.Generator().manual_seed(4)
    controls: list[dict[str, Any]] = [*EDGES, *CONTROLS.values(), {"top_p": 0.99, "temperature": 50.0}]
    logits = torch.randn(len(controls), vocab_size, generator=generator) * 3
    rows = [SampledRow(SamplingParams(**c), i % 3, 100 + i) for i, c in enumerate(controls)]
    alone = [int(sample(logits[i : i + 1], rows[i : i + 1]).token_ids[0]) for i in range(len(rows))]

    assert sample(logits, rows).token_ids.tolist() == alone
    assert sample(logits.flip(0), rows[::-1]).token_ids.tolist() == alone[::-1]
    for sick in (0, 5, len(rows) - 1):
        spoiled = logits.clone()
        spoiled[sick] = math.nan
        result = sample(spoiled, rows)
        assert result.is_healthy.tolist() == [i != sick for i in range(len(rows))]
        healthy = [t for i, t in enumerate(result.token_ids.tolist()) if i != sick]
        assert healthy == [t for i, t in enumerate(alone) if i != sick]


@pytest.mark.parametrize("controls", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}])
@pytest.mark.parametrize(
    "sick",
    [
        [math.nan] * 8,
        [*LOGITS[:7], math.nan],
        [math.nan, *LOGITS[1:]],
        [*LOGITS[:7], math.inf],
        [-math.inf] * 8,
    ],
    ids=["all NaN", "last NaN", "first NaN", "infinity", "nothing possible"],
)
def test_a_sick_row_is_reported_and_its_neighbours_are_not(
    sick: list[float], controls: dict[str, Any]
) -> None:
    params = SamplingParams(seed=5, **controls)
    rows = [SampledRow(params, 0, position) for position in range(3)]

    result = sample(torch.tensor([LOGITS, sick, LOGITS]), rows)

    assert result.is_healthy.tolist() == [True, False, True]
    assert result.token_ids[0] == sample_one(LOGITS, 0, seed=5, **controls)
    assert result.token_ids[2] == sample_one(LOGITS, 2, seed=5, **controls)


def test_draws_differ_by_seed_index_and_position() -> None:
    flat = torch.zeros(1, 10_000)

    def draw(seed: int, index: int, position: int) -> int:
        return int(sample(flat, [SampledRow(SamplingParams(seed=seed), index, position)]).token_ids[0])

    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**63 - 1, 0, 0), (2**64 - 1, 0, 0)]
    assert len({draw(*key) for key in keys}) == len(keys)
    assert [draw(*key) for key in keys] == [draw(*key) for key in keys]


def test_logits_are_left_as_they_were() -> None:
    logits = torch.tensor([LOGITS, LOGITS])
    before = logits.clone()

    sample(logits, [SampledRow(SamplingParams(top_k=2, top_p=0.4, min_p=0.1), 0, i) for i in range(2)])

    assert torch.equal(logits, before)
