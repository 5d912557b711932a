"""The fused token-wise operations against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from headrace.engine.native.library import NativeLibrary
from headrace.engine.native.token_ops import NativeTokenOps

DTYPES = [
    pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in (torch.float32, torch.bfloat16)
]
# One rounding to bf16 at the end, against one after each of torch's steps.
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 1.6e-2}
SIZES = [(1, 8), (1, 576), (3, 100), (17, 576), (200, 1536)]


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[ours.dtype]
    torch.testing.assert_close(ours.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "width"), SIZES)
def test_norm(any_library: NativeLibrary, num_tokens: int, width: int, dtype: torch.dtype) -> None:
    hidden, gain = numbers(num_tokens, width, dtype=dtype), 1 + 0.1 * numbers(width, seed=1)
    expected = F.rms_norm(hidden.float(), (width,), gain, 1e-5)
    assert_close(NativeTokenOps(any_library).rms_norm(hidden, gain, 1e-5), expected)


def test_norm_of_some_columns(library: NativeLibrary) -> None:
    hidden, gain = numbers(5, 64), numbers(48, seed=1)
    normed = NativeTokenOps(library).rms_norm(hidden[:, 16:], gain, 1e-6)
    assert_close(normed, F.rms_norm(hidden[:, 16:], (48,), gain, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "width"), SIZES)
def test_gate(any_library: NativeLibrary, num_tokens: int, width: int, dtype: torch.dtype) -> None:
    gate_up = 4 * numbers(num_tokens, 2 * width, dtype=dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    assert_close(NativeTokenOps(any_library).gated_silu(gate_up), F.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_far_from_zero(any_library: NativeLibrary, dtype: torch.dtype) -> None:
    gate = torch.tensor([[-1e4, -200.0, -90.0, 0.0, 90.0, 200.0, 1e4, float("nan")]]).to(dtype)
    gated = NativeTokenOps(any_library).gated_silu(torch.cat((gate, torch.ones_like(gate)), dim=-1))
    torch.testing.assert_close(gated, F.silu(gate), equal_nan=True, atol=1e-30, rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "head_dim"), [(1, 12, 64), (5, 3, 80), (64, 4, 16), (2, 1, 8)]
)
def test_rotation(
    any_library: NativeLibrary, num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    fused = numbers(num_tokens, num_heads + 2, head_dim, dtype=dtype)
    angles = 3 * numbers(num_tokens, 1, head_dim // 2, seed=1)
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    left, right = fused[:, :num_heads].float().chunk(2, dim=-1)
    wide_cosine, wide_sine = cosine.float(), sine.float()
    expected = torch.cat(
        (left * wide_cosine - right * wide_sine, right * wide_cosine + left * wide_sine), dim=-1
    )
    untouched = fused[:, num_heads:].clone()
    rotated = NativeTokenOps(any_library).rotate_(
        fused[:, :num_heads], torch.stack((cosine, cosine), dim=2), torch.stack((-sine, sine), dim=2)
    )
    assert rotated.data_ptr() == fused.data_ptr()
    assert_close(rotated, expected)
    assert torch.equal(fused[:, num_heads:], untouched)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (1, 7), (16, 49_152), (3, 1000)])
def test_greatest_logit(any_library: NativeLibrary, num_rows: int, width: int, dtype: torch.dtype) -> None:
    # Few distinct values, so that most rows have ties.
    logits = (numbers(num_rows, width) * 2).round().to(dtype)
    expected = torch.tensor([row.tolist().index(row.max().item()) for row in logits])
    ops = NativeTokenOps(any_library)
    assert torch.equal(ops.argmax(logits), expected)
    assert ops.greedy(logits).tolist() == [[index, 1, 1] for index in expected.tolist()]


@pytest.mark.parametrize("dtype", DTYPES)
def test_greatest_logit_at_every_place(any_library: NativeLibrary, dtype: torch.dtype) -> None:
    logits = torch.full((37, 37), -3.0).fill_diagonal_(-2.0).to(dtype)
    assert NativeTokenOps(any_library).argmax(logits).tolist() == list(range(37))


@pytest.mark.parametrize("dtype", DTYPES)
def test_greatest_logit_among_infinities_and_nans(any_library: NativeLibrary, dtype: torch.dtype) -> None:
    inf, nan = float("inf"), float("nan")
    rows = [[0.0, -inf, 3.0], [-inf, -inf, -inf], [1.0, inf, inf], [5.0, nan, inf], [-inf, 2.0, -inf]]
    logits = torch.tensor([row * 20 for row in rows]).to(dtype)
    ops = NativeTokenOps(any_library)
    assert ops.argmax(logits).tolist() == [2, 0, 1, 1, 1]
    assert ops.greedy(logits).tolist() == [[2, 1, 1], [0, 0, 0], [1, 0, 0], [1, 0, 0], [1, 1, 1]]


def test_what_the_kernels_cannot_take_is_refused(library: NativeLibrary) -> None:
    ops = NativeTokenOps(library)
    with pytest.raises(ValueError, match="fp32 or bf16"):
        ops.gated_silu(numbers(2, 8).half())
    with pytest.raises(ValueError, match="contiguous"):
        ops.argmax(numbers(8, 2).T)
    with pytest.raises(ValueError, match="gain"):
        ops.rms_norm(numbers(2, 8), numbers(9), 1e-5)
    with pytest.raises(ValueError, match="side by side"):
        ops.rotate_(numbers(2, 4, 8)[:, ::2], numbers(2, 1, 2, 4), numbers(2, 1, 2, 4))
    with pytest.raises(ValueError, match="factors"):
        ops.rotate_(numbers(2, 4, 8), numbers(3, 1, 2, 4), numbers(3, 1, 2, 4))
    assert not ops.takes(numbers(2, 8).half())
    assert not ops.takes(numbers(8, 2).T)
    assert ops.takes(numbers(2, 8)[:, 4:])
