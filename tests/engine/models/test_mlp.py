"""Mixtures of experts: who shares the step decides nothing, and both ways to compute them agree."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.engine.models.layers import gated_silu, make_linear
from headrace.engine.models.mlp import (
    GatedMlp,
    GroupedExperts,
    MixtureOfExperts,
    Router,
    SeparateExperts,
)
from headrace.engine.models.spec import ExpertsSpec

HIDDEN, INNER, COUNT, SELECTED = 64, 48, 8, 2
SPEC = ExpertsSpec(COUNT, SELECTED, INNER, is_normalised=True)
DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near_ties(width: int, dtype: torch.dtype) -> Tensor:
    """Router weights of pairs of experts that differ by next to nothing."""
    half = random(COUNT // 2, width, seed=1)
    other = half * (1 + 1e-7 * random(COUNT // 2, width, seed=2))
    return torch.cat((half, other)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 2048])
def test_a_token_has_the_same_experts_whoever_shares_the_step(dtype: torch.dtype, width: int) -> None:
    router = Router(SPEC, near_ties(width, dtype))
    tokens = random(200, width, seed=3, dtype=dtype)
    alone = [router(token[None]) for token in tokens]
    weights, chosen = torch.cat([one[0] for one in alone]), torch.cat([one[1] for one in alone])
    for first, last in ((0, 2), (0, 7), (5, 22), (1, 65), (0, 200)):
        together = router(tokens[first:last])
        assert torch.equal(together[0], weights[first:last])
        assert torch.equal(together[1], chosen[first:last])


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_in_one_product_give_what_they_give_one_by_one(dtype: torch.dtype, num_tokens: int) -> None:
    gate_up = random(COUNT, 2 * INNER, HIDDEN, seed=4, dtype=dtype) / 8
    down = random(COUNT, HIDDEN, INNER, seed=5, dtype=dtype) / 8
    router = Router(SPEC, random(COUNT, HIDDEN, seed=6, dtype=dtype))
    separate = SeparateExperts(
        [
            GatedMlp(make_linear(up), make_linear(back), gated_silu)
            for up, back in zip(gate_up, down, strict=True)
        ]
    )
    grouped = GroupedExperts(gate_up, down, gated_silu)
    tokens = random(num_tokens, HIDDEN, seed=7, dtype=dtype)
    one_by_one = MixtureOfExperts(SPEC, router, separate)(tokens)
    at_once = MixtureOfExperts(SPEC, router, grouped)(tokens)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(at_once, one_by_one, atol=tolerance, rtol=tolerance)


def test_each_token_is_the_weighted_sum_of_its_own_experts() -> None:
    gate_up = random(COUNT, 2 * INNER, HIDDEN, seed=4)
    down = random(COUNT, HIDDEN, INNER, seed=5)
    router = Router(SPEC, random(COUNT, HIDDEN, seed=6))
    tokens = random(9, HIDDEN, seed=7)
    found = MixtureOfExperts(SPEC, router, GroupedExperts(gate_up, down, gated_silu))(tokens)
    weights, chosen = router(tokens)
    for token, ours, its_weights, its_experts in zip(tokens, found, weights, chosen, strict=True):
        expected = torch.zeros(HIDDEN)
        for weight, expert in zip(its_weights, its_experts, strict=True):
            gate, up = (gate_up[expert] @ token).chunk(2)
            expected += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
        torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-4)
