"""Layers against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.engine.models import layers
from headrace.engine.models.layers import (
    DenseLinear,
    PrepackedLinear,
    RmsNorm,
    can_prepack,
    gated_silu,
    is_packed,
    make_linear,
)
from headrace.engine.native.kit import native_kit
from headrace.engine.native.quantised import KEPT_KINDS, WeightKind


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("num_tokens", [1, 3, 16, 70])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_and_plain_linears_agree(num_tokens: int, has_bias: bool, dtype: torch.dtype) -> None:
    if not can_prepack(dtype):
        pytest.skip("this torch has no packed linears")
    weight, inputs = random(40, 24, dtype=dtype), random(num_tokens, 24, dtype=dtype)
    bias, residual = random(40, dtype=dtype) if has_bias else None, random(num_tokens, 40, dtype=dtype)
    packed, plain = PrepackedLinear(weight, bias), DenseLinear(weight, bias)
    # One rounding separates the two in bfloat16 (0.125 at 16): the packed product adds before it rounds.
    tolerance = 1e-5 if dtype is torch.float32 else 0.13
    torch.testing.assert_close(packed(inputs), plain(inputs), atol=tolerance, rtol=0)
    torch.testing.assert_close(
        packed.add_to(residual, inputs), plain.add_to(residual, inputs), atol=tolerance, rtol=0
    )


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("kind", [WeightKind.SAME, *KEPT_KINDS, WeightKind.INT8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_said_to_be_packed_is_packed(
    monkeypatch: pytest.MonkeyPatch, kind: WeightKind, dtype: torch.dtype, has_kernels: bool
) -> None:
    if has_kernels and native_kit() is None:
        pytest.skip("the kernels are not built")
    if not has_kernels:
        monkeypatch.setattr(layers, "native_kit", lambda: None)
    weight = random(32, 64).to(torch.bfloat16).to(dtype)
    is_plain = isinstance(make_linear(weight, kind=kind), DenseLinear)
    assert is_packed(dtype, torch.device("cpu"), kind) is not is_plain


@pytest.mark.parametrize("kind", [PrepackedLinear, DenseLinear])
def test_adding_leaves_the_residual_alone(kind: type[PrepackedLinear | DenseLinear]) -> None:
    if not can_prepack(torch.float32):
        pytest.skip("this torch has no packed linears")
    residual = random(5, 40)
    before = residual.clone()
    kind(random(40, 24)).add_to(residual, random(5, 24))
    torch.testing.assert_close(residual, before, atol=0, rtol=0)


def test_types_without_a_packed_product_are_computed_plainly() -> None:
    assert not can_prepack(torch.float64)
    weight, inputs = random(8, 4, dtype=torch.float64), random(2, 4, dtype=torch.float64)
    torch.testing.assert_close(make_linear(weight)(inputs), F.linear(inputs, weight))


@pytest.mark.parametrize("num_tokens", [1, 33])
def test_rms_norm_equals_its_definition(num_tokens: int) -> None:
    hidden, weight = random(num_tokens, 48) * 30, random(48)
    expected = hidden / (hidden.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(RmsNorm(weight, 1e-5)(hidden), expected)


def test_rms_norm_of_bfloat16_is_computed_in_fp32() -> None:
    hidden, weight = random(9, 512, dtype=torch.bfloat16), random(512, dtype=torch.bfloat16)
    exact = RmsNorm(weight.float(), 1e-5)(hidden.float())
    torch.testing.assert_close(RmsNorm(weight, 1e-5)(hidden), exact.to(torch.bfloat16), atol=0, rtol=0)


def test_rms_norm_of_a_zero_row_is_zero() -> None:
    assert RmsNorm(torch.ones(16), 1e-5)(torch.zeros(2, 16)).abs().max() == 0


def test_gated_silu_takes_the_gate_first() -> None:
    gate, up = random(4, 6), random(4, 6) + 1
    torch.testing.assert_close(gated_silu(torch.cat((gate, up), dim=-1)), F.silu(gate) * up)
