"""Products with packed weights: right, and the same to the bit whatever else is computed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from headrace.engine.native.library import NativeLibrary
from headrace.engine.native.linear import NativeLinear, NativeLinears

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in TOLERANCES]
# (outputs, inputs): whole panels, rests of panels, less than one.
SHAPES = [(96, 64), (100, 30), (1, 2), (33, 576), (576, 130)]


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(library: NativeLibrary, weight: torch.Tensor, bias: torch.Tensor | None = None) -> NativeLinear:
    """The layer; skips the test where the variant doesn't multiply in that type."""
    try:
        return NativeLinears(library).make(weight, bias)
    except ValueError:
        if library.variant in ("avx512bf16", "avx2") or weight.dtype is torch.float32:
            raise
        pytest.skip(f"{library.variant} multiplies in fp32 only")


def assert_close(ours: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(ours.float(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 5, 12, 13, 16, 25, 49, 200])
def test_product(library: NativeLibrary, num_rows: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = numbers(*shape, dtype=dtype) / shape[1] ** 0.5
    inputs = numbers(num_rows, shape[1], dtype=dtype, seed=1)
    layer = make(library, weight)
    assert_close(layer(inputs), F.linear(inputs.float(), weight.float()), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias_and_residual_in_every_variant(
    any_library: NativeLibrary, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = numbers(*shape, dtype=dtype) / shape[1] ** 0.5
    bias, inputs = numbers(shape[0], dtype=dtype, seed=1), numbers(7, shape[1], dtype=dtype, seed=2)
    residual = numbers(7, shape[0], dtype=dtype, seed=3)
    before = residual.clone()
    layer = make(any_library, weight, bias)
    expected = F.linear(inputs.float(), weight.float(), bias.float())
    assert_close(layer(inputs), expected, dtype)
    assert_close(layer.add_to(residual, inputs), expected + residual.float(), dtype)
    assert torch.equal(residual, before)
    assert layer.wide(inputs).dtype is torch.float32
    torch.testing.assert_close(layer.wide(inputs), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_rows_change_no_bit(library: NativeLibrary, dtype: torch.dtype) -> None:
    weight, inputs = numbers(300, 256, dtype=dtype), numbers(500, 256, dtype=dtype, seed=1)
    layer = make(library, weight)
    together = layer(inputs)
    for first, last in ((0, 1), (3, 5), (100, 112), (17, 33), (200, 300), (499, 500)):
        assert torch.equal(layer(inputs[first:last]), together[first:last])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [256, 90, 700])
def test_no_number_of_rows_changes_a_bit(any_library: NativeLibrary, width: int, dtype: torch.dtype) -> None:
    weight, inputs = numbers(72, width, dtype=dtype), numbers(230, width, dtype=dtype, seed=1)
    bias, residual = numbers(72, dtype=dtype, seed=2), numbers(230, 72, dtype=dtype, seed=3)
    layer = make(any_library, weight, bias)
    together = layer.add_to(residual, inputs)
    for num_rows in (*range(1, 28), 49, 96, 97, 150):
        assert torch.equal(layer.add_to(residual[:num_rows], inputs[:num_rows]), together[:num_rows]), (
            num_rows
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_no_bit(library: NativeLibrary, dtype: torch.dtype) -> None:
    weight, inputs = numbers(300, 256, dtype=dtype), numbers(70, 256, dtype=dtype, seed=1)
    before = torch.get_num_threads()
    results = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        results.append(make(library, weight)(inputs))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_stays_in_its_row(library: NativeLibrary, dtype: torch.dtype) -> None:
    weight, inputs = numbers(64, 32, dtype=dtype), numbers(20, 32, dtype=dtype, seed=1)
    inputs[7, 3] = float("nan")
    out = make(library, weight)(inputs)
    assert bool(out[7].isnan().all())
    assert bool(out[:7].isfinite().all())
    assert bool(out[8:].isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_apart(library: NativeLibrary, dtype: torch.dtype) -> None:
    weight, wide = numbers(40, 32, dtype=dtype), numbers(6, 100, dtype=dtype, seed=1)
    layer = make(library, weight)
    assert torch.equal(layer(wide[:, 8:40]), layer(wide[:, 8:40].contiguous()))


def test_layers_share_pages(library: NativeLibrary) -> None:
    linears = NativeLinears(library)
    weights = [numbers(70, 34, dtype=torch.float32, seed=seed) for seed in range(5)]
    layers = [linears.make(weight) for weight in weights]
    inputs = numbers(3, 34, dtype=torch.float32, seed=9)
    for layer, weight in zip(layers, weights, strict=True):
        assert_close(layer(inputs), inputs @ weight.T, torch.float32)


def test_what_does_not_fit_is_refused(library: NativeLibrary) -> None:
    linears = NativeLinears(library)
    with pytest.raises(ValueError, match="width 3"):
        linears.make(numbers(4, 3, dtype=torch.float32))
    with pytest.raises(ValueError, match="float16"):
        linears.make(numbers(4, 4, dtype=torch.float16))
    with pytest.raises(ValueError, match="bias"):
        linears.make(numbers(4, 4, dtype=torch.float32), numbers(5, dtype=torch.float32))
    layer = linears.make(numbers(4, 6, dtype=torch.float32))
    for wrong in (numbers(2, 4, dtype=torch.float32), numbers(2, 6, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="inputs must be"):
            layer(wrong)
    with pytest.raises(ValueError, match="inputs must be"):
        layer(numbers(6, 2, dtype=torch.float32).T)
    with pytest.raises(ValueError, match="residual must be"):
        layer.add_to(numbers(3, 4, dtype=torch.float32), numbers(2, 6, dtype=torch.float32))


def test_only_what_is_faster_suits(library: NativeLibrary) -> None:
    linears = NativeLinears(library)
    assert not linears.suits(numbers(4, 3, dtype=torch.float32))
    assert not linears.suits(numbers(4, 4, dtype=torch.float16))
    assert not NativeLinears(NativeLibrary(library.path, "generic")).suits(numbers(4, 4, dtype=torch.float32))
