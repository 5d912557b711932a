"""What each control keeps, how often each token is drawn, and that rows never touch each other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.row import SampledRow
from headrace.engine.sampling.sampler import sample
from tests.support.far_device import as_if_far
from tests.support.slow_sampling import probabilities

LOGITS = (1.0, 3.0, -2.0, 2.5, 0.0, 3.0, -math.inf, 1.5)
"""Two likeliest tokens at a tie, one impossible token."""


def sample_one(logits: Sequence[float] | Tensor, position: int = 0, **controls: Any) -> int:
    return int(sample(torch.as_tensor(logits).float()[None], [row_at(position, **controls)]).token_ids[0])


def row_at(position: int, **controls: Any) -> SampledRow:
    """A row whose prompt is 1, 3 and whose output so far is 3, 5, 5, 0."""
    suppressed = controls.pop("suppressed", frozenset())
    return SampledRow(SamplingParams(**controls), 0, position, 2, (1, 3, 3, 5, 5, 0), suppressed)


def assert_drawn_as(
    controls: dict[str, Any], logits: Sequence[float] = LOGITS, num_draws: int = 4_000
) -> None:
    """Chi-square of many draws, at one position each, against the exact probabilities."""
    rows = [row_at(position, **controls) for position in range(num_draws)]
    drawn = sample(torch.tensor(LOGITS).expand(num_draws, -1), rows)
    assert bool(drawn.is_healthy.all())
    assert bool(drawn.has_choice.all())
    counts = Counter(drawn.token_ids.tolist())
    exact = probabilities(LOGITS, rows[0])
    possible = {i for i, p in enumerate(exact) if p > 0.0}
    assert set(counts) <= possible
    chi_square = sum((counts[i] - num_draws * exact[i]) ** 2 / (num_draws * exact[i]) for i in possible)
    freedom = max(len(possible) - 1, 1)
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


CONTROLS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.6},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.85},
    "typical_p": {"typical_p": 0.7},
    "min_p": {"min_p": 0.3},
    "frequency_penalty": {"frequency_penalty": 0.7},
    "presence_penalty": {"presence_penalty": 1.2},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "logit_bias": {"logit_bias": ((0, 1.5), (2, 4.0), (6, 50.0))},
    "allowed": {"allowed_token_ids": frozenset({0, 2, 3, 5, 7})},
    "banned": {"banned_token_ids": frozenset({5})},
    "bad_words": {"bad_words": ((5, 0, 1), (7,), (3, 3))},
    "suppressed": {"suppressed": frozenset({3, 4})},
}
PAIRS = {f"{a}+{b}": {**CONTROLS[a], **CONTROLS[b]} for a, b in combinations(CONTROLS, 2)}
MORE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "cold": {"temperature": 0.7},
    "hot": {"temperature": 30.0},
    "rewards": {"frequency_penalty": -1.0, "presence_penalty": -0.5, "repetition_penalty": 0.8},
    "all": {name: value for control in CONTROLS.values() for name, value in control.items()},
}


@pytest.mark.parametrize("controls", [*CONTROLS.values(), *MORE.values()], ids=[*CONTROLS, *MORE])
def test_tokens_are_drawn_as_often_as_they_are_likely(controls: dict[str, Any]) -> None:
    assert_drawn_as({"seed": 11, **controls}, num_draws=8_000)


@pytest.mark.parametrize("controls", PAIRS.values(), ids=PAIRS)
def test_tokens_are_drawn_as_often_as_two_controls_together_say(controls: dict[str, Any]) -> None:
    assert_drawn_as({"seed": 12, **controls})


@pytest.mark.parametrize("controls", [*CONTROLS.values(), *MORE.values()], ids=[*CONTROLS, *MORE])
def test_greedy_takes_the_likeliest_after_masks_penalties_and_bias(controls: dict[str, Any]) -> None:
    row = row_at(6, **{**controls, "temperature": 0.0})

    chosen = sample(torch.tensor([LOGITS]), [row]).token_ids.tolist()

    assert chosen == [probabilities(LOGITS, row).index(1.0)]


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
    {"typical_p": 1.0},
    {"typical_p": 1e-12},
    {"temperature": 1e-5, "typical_p": 0.5, "top_p": 0.5, "min_p": 0.5},
    {"repetition_penalty": 1e-30},
    {"repetition_penalty": 10.0, "frequency_penalty": 2.0, "presence_penalty": 2.0},
    {"logit_bias": tuple((i, 100.0) for i in range(len(LOGITS)))},
    {"logit_bias": tuple((i, -100.0) for i in range(len(LOGITS)))},
    {"allowed_token_ids": frozenset({4})},
    {"banned_token_ids": frozenset({1, 5})},
]


@pytest.mark.parametrize("controls", EDGES, ids=str)
def test_edge_values_draw_possible_tokens_alone_and_all_in_one_batch(controls: dict[str, Any]) -> None:
    alone = [sample_one(LOGITS, position, **controls) for position in range(50)]

    assert all(LOGITS[token_id] > -math.inf for token_id in alone)
    for position in (0, 49):
        rows = [row_at(position, **edge) for edge in (*EDGES, controls)]
        together = sample(torch.tensor(LOGITS).expand(len(rows), -1), rows)
        assert bool(together.has_choice.all())
        assert together.token_ids[-1] == alone[position]


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
    controls: list[dict[str, Any]] = [
        *EDGES,
        *CONTROLS.values(),
        *PAIRS.values(),
        *MORE.values(),
        {"top_p": 0.99, "temperature": 50.0},
        {"typical_p": 0.99, "temperature": 50.0},
    ]
    logits = torch.randn(len(controls), vocab_size, generator=generator) * 3
    rows = [row_at(100 + i, **control) for i, control in enumerate(controls)]
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


@pytest.mark.parametrize("vocab_size", [8, 257, 9000])
@pytest.mark.parametrize("step", [0.0, 0.5], ids=["apart", "ties"])
def test_a_device_that_takes_waiting_to_look_at_draws_the_same(vocab_size: int, step: float) -> None:
    controls: list[dict[str, Any]] = [
        *EDGES,
        *CONTROLS.values(),
        *PAIRS.values(),
        *MORE.values(),
        {"top_p": 0.99, "temperature": 50.0},
        {"typical_p": 0.99, "temperature": 50.0},
    ]
    logits = torch.randn(len(controls), vocab_size, generator=torch.Generator().manual_seed(4)) * 3
    logits = logits if step == 0.0 else (logits / step).round() * step
    logits[3, 1] = math.nan
    rows = [row_at(100 + i, **control) for i, control in enumerate(controls)]
    here = sample(logits, rows)

    with as_if_far():
        far = sample(logits, rows)

    assert torch.equal(far.token_ids, here.token_ids)
    assert torch.equal(far.is_healthy, here.is_healthy)
    assert torch.equal(far.has_choice, here.has_choice)


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


@pytest.mark.parametrize("others", [{}, {"temperature": 0.0}, {"top_p": 0.5, "typical_p": 0.5}])
@pytest.mark.parametrize(
    "forbidding",
    [
        {"allowed_token_ids": frozenset({3}), "bad_words": ((3,),)},
        {"allowed_token_ids": frozenset({3}), "suppressed": frozenset({3})},
        {"allowed_token_ids": frozenset({3, 5}), "bad_words": ((0, 3), (5, 0, 5))},
        {"allowed_token_ids": frozenset({6})},
        {"banned_token_ids": frozenset(range(7)), "suppressed": frozenset({7})},
    ],
    ids=str,
)
def test_a_row_whose_own_masks_leave_nothing_is_told_from_a_sick_one(
    forbidding: dict[str, Any], others: dict[str, Any]
) -> None:
    """Token 6 is one that the model itself makes impossible."""
    rows = [row_at(0, **others), row_at(1, **others, **forbidding), row_at(2, **others), row_at(3, **others)]
    sick = [math.nan, *LOGITS[1:]]

    result = sample(torch.tensor([LOGITS, LOGITS, sick, LOGITS]), rows)

    assert result.is_healthy.tolist() == [True, True, False, True]
    assert result.has_choice.tolist() == [True, False, False, True]
    assert result.token_ids[0] == sample_one(LOGITS, 0, **others)
    assert result.token_ids[3] == sample_one(LOGITS, 3, **others)
    assert bool((result.token_ids < len(LOGITS)).all())


@pytest.mark.parametrize("controls", [*CONTROLS.values(), *MORE.values()], ids=[*CONTROLS, *MORE])
def test_logits_are_left_as_they_were(controls: dict[str, Any]) -> None:
    logits = torch.tensor([LOGITS, LOGITS])
    before = logits.clone()

    for neighbour in ({}, controls):
        sample(logits, [row_at(0, **controls), row_at(1, **neighbour)])
        assert torch.equal(logits, before)
