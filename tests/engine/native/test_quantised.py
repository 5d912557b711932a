"""Quantised weights: near to what they stand for, and products as exact as whole numbers make them."""

from __future__ import annotations

import platform

import pytest
import torch

from headrace.engine.native.library import NativeLibrary
from headrace.engine.native.linear import NativeLinear, NativeLinears
from headrace.engine.native.quantised import GROUP_SIZE, QuantisedWeight, WeightKind, quantise

KINDS = [pytest.param(kind, id=kind.name) for kind in (WeightKind.INT8, WeightKind.INT4)]
DTYPES = [pytest.param(torch.float32, id="float32"), pytest.param(torch.bfloat16, id="bfloat16")]
SIGNS = ["plus", "minus", "alternating", "mixed"]
# (outputs, inputs): whole panels and groups, rests of them, less than one.
SHAPES = [(96, 64), (100, 30), (1, 2), (33, 576), (70, 130)]


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rounded_in_groups(inputs: torch.Tensor) -> torch.Tensor:
    """What the kernels make of a layer's inputs: eight bits, a scale for every group."""
    padding = -inputs.shape[1] % GROUP_SIZE
    groups = torch.nn.functional.pad(inputs.float(), (0, padding)).unflatten(1, (-1, GROUP_SIZE))
    greatest = groups.abs().amax(dim=-1, keepdim=True)
    # A number divided by a tensor is taken as the reciprocal times the number, which rounds otherwise.
    inverse = torch.full_like(greatest, 127.0) / greatest
    whole = torch.where(greatest > 0, groups * inverse, 0.0).round()
    return (whole * (greatest / 127)).flatten(1)[:, : inputs.shape[1]]


def added_by_groups(weight: QuantisedWeight, inputs: torch.Tensor, *, is_fused: bool) -> torch.Tensor:
    """What the kernels compute, (M, N), to the bit: sums of whole numbers, groups added in order.

    Args:
        inputs: (M, K).
        is_fused: whether a sum and its product are rounded once.
    """

    def add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return (a.double() * b.double() + c.double()).float() if is_fused else a * b + c

    groups = torch.nn.functional.pad(inputs.float(), (0, -inputs.shape[1] % GROUP_SIZE))
    groups = groups.unflatten(1, (-1, GROUP_SIZE))
    greatest = groups.abs().amax(dim=-1)
    whole = (groups * (torch.full_like(greatest, 127.0) / greatest)[..., None]).round().double()
    row_scales, totals = greatest / torch.full_like(greatest, 127.0), whole.sum(-1).float()
    meant = weight.numbers.double() - (128 if weight.kind is WeightKind.INT8 else 0)
    sums = torch.zeros(inputs.shape[0], weight.numbers.shape[0])
    for group in range(groups.shape[1]):
        part = (whole[:, group] @ meant[:, group].T).float() * weight.scales[:, group].float()
        if weight.kind is WeightKind.INT4:
            part = add(weight.least[:, group].float().expand_as(part), totals[:, group, None], part)
        sums = add(part, row_scales[:, group, None], sums)
    return sums


def is_fused(library: NativeLibrary) -> bool:
    """Whether a variant rounds a sum and its product once."""
    return library.variant != "generic" or platform.machine() in ("aarch64", "arm64")


def signs_of(pattern: str, shape: tuple[int, int], *, seed: int) -> torch.Tensor:
    """Ones with the signs of one of `SIGNS`."""
    up = torch.ones(shape)
    if pattern == "mixed":
        return up.copysign(numbers(*shape, seed=seed))
    up[:, 1::2] *= -1 if pattern == "alternating" else 1
    return -up if pattern == "minus" else up


def make(
    library: NativeLibrary, weight: QuantisedWeight, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> NativeLinear:
    return NativeLinears(library).make_quantised(weight, dtype, bias)


@pytest.mark.parametrize(("kind", "share"), [(WeightKind.INT8, 0.5 / 127), (WeightKind.INT4, 0.5 / 15)])
def test_a_weight_is_within_half_a_step(kind: WeightKind, share: float) -> None:
    weight = numbers(40, 96)
    groups = weight.unflatten(1, (-1, GROUP_SIZE))
    reach = groups.abs().amax(-1) if kind is WeightKind.INT8 else groups.amax(-1) - groups.amin(-1)
    # Scales are of half precision, so the ends of a group may lie a little outside its numbers.
    allowed = reach * share * 1.01 + reach * 2e-3
    off = (quantise(weight, kind).restored() - weight).unflatten(1, (-1, GROUP_SIZE)).abs().amax(-1)
    assert bool((off <= allowed).all())


def test_what_has_four_bits_already_keeps_them() -> None:
    generator = torch.Generator().manual_seed(3)
    given = torch.randint(0, 16, (64, 2, GROUP_SIZE), generator=generator)
    given[..., 0], given[..., 1] = 0, 15
    scales = (torch.rand(64, 2, 1, generator=generator) + 0.5).half().float()
    least = torch.randn(64, 2, 1, generator=generator).half().float()
    weight = (given * scales + least).flatten(1)
    quantised = quantise(weight, WeightKind.INT4)
    assert torch.equal(quantised.numbers, given.to(torch.uint8))
    torch.testing.assert_close(quantised.restored(), weight, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_zeros_of_equals_and_of_tiny_weights(kind: WeightKind) -> None:
    weight = torch.zeros(3, GROUP_SIZE)
    weight[1], weight[2] = 0.25, 1e-12
    restored = quantise(weight, kind).restored()
    torch.testing.assert_close(restored, weight, rtol=4e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 5, 6, 7, 16, 25, 80])
def test_product(
    library: NativeLibrary, num_rows: int, shape: tuple[int, int], kind: WeightKind, dtype: torch.dtype
) -> None:
    weight = quantise(numbers(*shape) / shape[1] ** 0.5, kind)
    inputs = numbers(num_rows, shape[1], dtype=dtype, seed=1)
    layer = make(library, weight, dtype)
    expected = rounded_in_groups(inputs) @ weight.restored().T
    torch.testing.assert_close(layer.wide(inputs), expected, atol=1e-4, rtol=1e-4)
    assert layer(inputs).dtype is dtype
    torch.testing.assert_close(layer(inputs).float(), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_bias_and_residual_in_every_variant(
    any_library: NativeLibrary, kind: WeightKind, dtype: torch.dtype
) -> None:
    weight = quantise(numbers(45, 100) / 10, kind)
    bias, inputs = numbers(45, dtype=dtype, seed=1), numbers(7, 100, dtype=dtype, seed=2)
    residual = numbers(7, 45, dtype=dtype, seed=3)
    layer = make(any_library, weight, dtype, bias)
    expected = rounded_in_groups(inputs) @ weight.restored().T + bias.float()
    torch.testing.assert_close(layer.wide(inputs), expected, atol=1e-4, rtol=1e-4)
    added = layer.add_to(residual, inputs).float()
    torch.testing.assert_close(added, expected + residual.float(), atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 11])
def test_every_bit_is_that_of_whole_numbers_added_group_by_group(
    any_library: NativeLibrary, num_rows: int, kind: WeightKind, dtype: torch.dtype
) -> None:
    weight = quantise(numbers(70, 290), kind)
    inputs = numbers(num_rows, 290, dtype=dtype, seed=1)
    expected = added_by_groups(weight, inputs, is_fused=is_fused(any_library))
    assert torch.equal(make(any_library, weight, dtype).wide(inputs), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weight_signs", SIGNS)
@pytest.mark.parametrize("input_signs", SIGNS)
def test_no_sum_of_extremes_is_cut_off(
    any_library: NativeLibrary, kind: WeightKind, weight_signs: str, input_signs: str
) -> None:
    shape, num_groups = (37, 96), 3
    least, most = (1, 255) if kind is WeightKind.INT8 else (0, 15)
    is_up = signs_of(weight_signs, shape, seed=1) > 0
    weight = QuantisedWeight(
        kind,
        shape[1],
        torch.where(is_up, most, least).to(torch.uint8).unflatten(1, (num_groups, GROUP_SIZE)),
        numbers(shape[0], num_groups, seed=2).abs().half(),
        torch.zeros(shape[0], num_groups).half()
        if kind is WeightKind.INT8
        else numbers(shape[0], num_groups, seed=3).half(),
    )
    inputs = 2.5 * signs_of(input_signs, (5, shape[1]), seed=4)
    expected = added_by_groups(weight, inputs, is_fused=is_fused(any_library))
    assert torch.equal(make(any_library, weight, torch.float32)(inputs), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_sums_do_not_overflow(any_library: NativeLibrary, kind: WeightKind) -> None:
    width = 4096
    weight = quantise(torch.ones(32, width) * torch.linspace(0.5, 1.0, width), kind)
    layer = make(any_library, weight, torch.float32)
    inputs = torch.full((1, width), -3.0)
    expected = rounded_in_groups(inputs) @ weight.restored().T
    torch.testing.assert_close(layer(inputs), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_other_rows_and_threads_change_no_bit(
    any_library: NativeLibrary, kind: WeightKind, dtype: torch.dtype
) -> None:
    weight, inputs = quantise(numbers(300, 256), kind), numbers(200, 256, dtype=dtype, seed=1)
    before = torch.get_num_threads()
    results = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        layer = make(any_library, weight, dtype)
        results.append(layer(inputs))
        for first, last in ((0, 1), (3, 5), (6, 9), (40, 44), (100, 112), (17, 33), (199, 200)):
            assert torch.equal(layer(inputs[first:last]), results[0][first:last])
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_in_its_row(
    any_library: NativeLibrary, kind: WeightKind, bad: float
) -> None:
    inputs = numbers(20, 64, seed=1)
    inputs[7, 3] = bad
    out = make(any_library, quantise(numbers(64, 64), kind), torch.float32)(inputs)
    assert not bool(out[7].isfinite().any())
    assert bool(out[:7].isfinite().all())
    assert bool(out[8:].isfinite().all())


def test_inputs_too_small_to_scale_count_as_nothing(any_library: NativeLibrary) -> None:
    layer = make(any_library, quantise(numbers(8, 32), WeightKind.INT8), torch.float32)
    assert torch.equal(layer(torch.full((1, 32), 1e-40)), torch.zeros(1, 8))


def test_what_does_not_fit_is_refused(library: NativeLibrary) -> None:
    weight = quantise(numbers(4, 6), WeightKind.INT8)
    with pytest.raises(ValueError, match="float16"):
        make(library, weight, torch.float16)
    with pytest.raises(ValueError, match="bias"):
        make(library, weight, torch.float32, numbers(5))
    with pytest.raises(ValueError, match="inputs must be"):
        make(library, weight, torch.float32)(numbers(2, 32))


def test_only_where_it_is_faster(any_library: NativeLibrary) -> None:
    assert NativeLinears(any_library).suits_quantised() == (any_library.variant != "generic")
