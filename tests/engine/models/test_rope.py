"""Rotary positions as geometry; that every variant equals the reference's is shown in test_decoder.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.engine.models.rope import (
    RopeKind,
    RopeSpec,
    RotaryTable,
    rope_frequencies,
    rotate,
    rotate_given,
)


def table_of(spec: RopeSpec, head_dim: int, max_positions: int) -> RotaryTable:
    return RotaryTable(spec, head_dim, max_positions, dtype=torch.float32, device=torch.device("cpu"))


def turned(heads: Tensor, positions: list[int], theta: float = 100.0) -> Tensor:
    table = table_of(RopeSpec(theta=theta), heads.shape[-1], max(positions) + 1)
    return rotate(heads, *table.rows(torch.tensor(positions)))


def random_heads(num_tokens: int, num_heads: int, head_dim: int) -> Tensor:
    return torch.randn(num_tokens, num_heads, head_dim, generator=torch.Generator().manual_seed(0))


def test_position_zero_changes_nothing() -> None:
    heads = random_heads(2, 3, 8)
    torch.testing.assert_close(turned(heads, [0, 0]), heads)


def test_each_pair_of_coordinates_is_turned_by_its_own_angle() -> None:
    heads = random_heads(1, 1, 4)
    first, second = (
        torch.complex(heads[0, 0, 0], heads[0, 0, 2]),
        torch.complex(heads[0, 0, 1], heads[0, 0, 3]),
    )
    # Theta 100 and four coordinates: 1 and 1/10 radian per position.
    expected = [first * torch.exp(torch.tensor(7j)), second * torch.exp(torch.tensor(0.7j))]
    found = turned(heads, [7])[0, 0]
    torch.testing.assert_close(torch.complex(found[:2], found[2:]), torch.stack(expected))


def test_the_product_of_two_heads_depends_on_their_distance_alone() -> None:
    query, key = random_heads(2, 1, 16)
    near = turned(query[None], [12]).flatten() @ turned(key[None], [5]).flatten()
    far = turned(query[None], [112]).flatten() @ turned(key[None], [105]).flatten()
    torch.testing.assert_close(near, far, atol=1e-4, rtol=0)


def test_a_strided_view_of_the_heads_is_turned_like_a_copy() -> None:
    wide = random_heads(5, 9, 8)
    torch.testing.assert_close(
        turned(wide[:, 2:6], [0, 1, 2, 3, 4]), turned(wide[:, 2:6].clone(), [0, 1, 2, 3, 4])
    )


@pytest.mark.parametrize("kind", list(RopeKind))
def test_a_factor_of_one_is_the_default_variant(kind: RopeKind) -> None:
    spec = RopeSpec(kind=kind, factor=1.0, original_max_positions=64, short_factors=(1.0,) * 16)
    frequencies, attention_factor = rope_frequencies(spec, 32, 64)
    expected, _ = rope_frequencies(RopeSpec(), 32, 64)
    torch.testing.assert_close(frequencies, expected)
    assert attention_factor == 1.0


def test_llama3_leaves_short_wavelengths_and_stretches_long_ones() -> None:
    spec = RopeSpec(kind=RopeKind.LLAMA3, factor=8.0, original_max_positions=256)
    frequencies, _ = rope_frequencies(spec, 64, 64)
    plain, _ = rope_frequencies(RopeSpec(), 64, 64)
    assert frequencies[0] == plain[0]
    torch.testing.assert_close(frequencies[-1], plain[-1] / 8)
    assert torch.all(frequencies <= plain)


def test_yarn_with_an_empty_ramp_stays_finite() -> None:
    spec = RopeSpec(kind=RopeKind.YARN, factor=4.0, original_max_positions=6)
    frequencies, _ = rope_frequencies(spec, 4, 64)
    assert torch.isfinite(frequencies).all()


@pytest.mark.parametrize(
    ("spec", "longest"),
    [
        (RopeSpec(), 1000),
        (RopeSpec(kind=RopeKind.DYNAMIC, factor=4.0), 1000),
        (RopeSpec(kind=RopeKind.LLAMA3, factor=4.0, original_max_positions=500), 1000),
        (RopeSpec(kind=RopeKind.LONGROPE, factor=2.0, original_max_positions=500), 1000),
        (RopeSpec(kind=RopeKind.LINEAR, factor=2.5), 2500),
        (RopeSpec(kind=RopeKind.YARN, factor=4.0, original_max_positions=500), 2000),
        (RopeSpec(kind=RopeKind.YARN, factor=4.0, original_max_positions=200), 1000),
    ],
)
def test_the_longest_context_follows_from_the_scaling(spec: RopeSpec, longest: int) -> None:
    assert spec.longest_positions(1000) == longest


def test_longrope_turns_by_the_long_factors_once_more_than_the_original_length_is_served() -> None:
    spec = RopeSpec(
        kind=RopeKind.LONGROPE, original_max_positions=64, short_factors=(1.0, 2.0), long_factors=(4.0, 8.0)
    )
    plain, _ = rope_frequencies(RopeSpec(), 4, 64)
    torch.testing.assert_close(rope_frequencies(spec, 4, 64)[0], plain / torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(rope_frequencies(spec, 4, 65)[0], plain / torch.tensor([4.0, 8.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_that_are_given_away_are_turned_alike(dtype: torch.dtype) -> None:
    table = RotaryTable(RopeSpec(), 16, 40, dtype=dtype, device=torch.device("cpu"))
    heads = torch.randn(5, 6, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    factors = table.rows(torch.tensor([0, 3, 39, 7, 7]))
    expected = rotate(heads, *factors)
    # In bfloat16 one of the two rounds after each step, the other at the end.
    tolerance = 1e-6 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(rotate_given(heads, *factors), expected, atol=tolerance, rtol=tolerance)


def test_positions_far_apart_are_turned_as_those_of_a_short_table() -> None:
    """The table is computed in parts: none may be left out, or begin anew."""
    long = table_of(RopeSpec(), 8, 140_000)
    positions = torch.tensor([0, 65_535, 65_536, 131_072, 139_999])
    cosine, _ = long.rows(positions)
    angles = positions.float()[:, None] * rope_frequencies(RopeSpec(), 8, 140_000)[0]
    torch.testing.assert_close(cosine[:, 0, 0], angles.cos())
