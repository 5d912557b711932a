"""Weights read in fewer bits than is computed in: nothing is lost, and no bit of a product changes."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from gguf.quants import quantize as quantise_as_gguf

from headrace.engine.native.library import NativeLibrary
from headrace.engine.native.linear import NativeLinear, NativeLinears
from headrace.engine.native.quantised import QuantisedWeight, WeightKind

FORMATS = {
    "Q4_0": (GGMLQuantizationType.Q4_0, WeightKind.INT4, WeightKind.WITH_INT4),
    "Q4_1": (GGMLQuantizationType.Q4_1, WeightKind.INT4, WeightKind.WITH_INT4),
    "Q5_0": (GGMLQuantizationType.Q5_0, WeightKind.INT8, WeightKind.WITH_INT8),
    "Q8_0": (GGMLQuantizationType.Q8_0, WeightKind.INT8, WeightKind.WITH_INT8),
}
# (outputs, inputs): whole panels and pairs of groups, rests of both, more rows than are looked at at once.
SHAPES = [(96, 64), (100, 96), (1, 32), (33, 576), (300, 160)]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored(name: str, shape: tuple[int, int]) -> torch.Tensor:
    """A weight as a GGUF file of that type gives it, fp32."""
    kind = FORMATS[name][0]
    # Scales of a wide range; of the last groups some are all zero.
    weight = numbers(*shape) * torch.logspace(-4, 1, shape[1])
    weight[-1, 32:64] = 0
    return torch.from_numpy(dequantize(quantise_as_gguf(weight.numpy(), kind), kind).copy())


@pytest.fixture
def linears(library: NativeLibrary) -> NativeLinears:
    linears = NativeLinears(library)
    if not linears.suits_kept():
        pytest.skip(f"the kernels for {library.variant} keep no weights in fewer bits")
    return linears


def held(library: NativeLibrary, weight: torch.Tensor) -> QuantisedWeight:
    found = NativeLinears(library).hold_exactly(weight)
    assert found is not None
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_what_a_file_holds_in_few_bits_is_found(
    library: NativeLibrary, name: str, shape: tuple[int, int]
) -> None:
    weight = stored(name, shape)
    found = held(library, weight)
    assert found.kind is FORMATS[name][1]
    assert torch.equal(found.restored(), weight)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("place", [(0, 0), (299, 159)])
def test_one_number_that_would_change_is_enough(
    library: NativeLibrary, name: str, place: tuple[int, int]
) -> None:
    weight = stored(name, (300, 160))
    weight[place] = torch.nextafter(weight[place] + 0.01, torch.tensor(9.0))
    assert NativeLinears(library).hold_exactly(weight) is None


def test_what_four_bits_do_not_hold_eight_may(library: NativeLibrary) -> None:
    weight = stored("Q8_0", (40, 64))
    weight[:39] = stored("Q4_0", (39, 64))
    assert held(library, weight).kind is WeightKind.INT8


def test_other_numbers_are_not_held(library: NativeLibrary) -> None:
    hold_exactly = NativeLinears(library).hold_exactly
    assert hold_exactly(numbers(64, 64)) is None
    assert hold_exactly(numbers(64, 64).bfloat16().float()) is None
    assert hold_exactly(torch.zeros(4, 30)) is None, "no whole groups"
    # Too large for a scale of sixteen bits, and too small for one.
    assert hold_exactly(torch.full((4, 32), 1e6)) is None
    assert hold_exactly(torch.full((4, 32), 1e-9)) is None


def check_same(kept: NativeLinear, whole: NativeLinear, num_rows: int) -> None:
    num_outputs, width = whole.shape
    inputs, residual = numbers(num_rows, width, seed=1), numbers(num_rows, num_outputs, seed=2)
    assert torch.equal(kept(inputs), whole(inputs))
    assert torch.equal(kept.wide(inputs), whole.wide(inputs))
    assert torch.equal(kept.add_to(residual, inputs), whole.add_to(residual, inputs))
    # Rows that lie apart in memory.
    apart = numbers(num_rows, width + 40, seed=3)[:, 8 : 8 + width]
    assert torch.equal(kept(apart), whole(apart))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_no_bit_of_a_product_changes(linears: NativeLinears, name: str, shape: tuple[int, int]) -> None:
    weight, bias = stored(name, shape), numbers(shape[0], seed=4)
    kept, whole = linears.make_kept(weight, bias), linears.make(weight, bias)
    assert (kept.kind, kept.dtype, kept.shape) == (FORMATS[name][2], torch.float32, shape)
    for num_rows in (*range(1, 27), 48, 49, 200):
        check_same(kept, whole, num_rows)


@pytest.mark.parametrize("shape", [(96, 64), (100, 30), (1, 2), (33, 576), (576, 130)], ids=str)
def test_no_bit_changes_with_weights_that_bf16_holds(linears: NativeLinears, shape: tuple[int, int]) -> None:
    weight, bias = numbers(*shape).bfloat16().float(), numbers(shape[0], seed=4)
    kept, whole = linears.make_kept(weight, bias), linears.make(weight, bias)
    assert (kept.kind, kept.dtype) == (WeightKind.KEPT_BF16, torch.float32)
    for num_rows in (1, 2, 3, 5, 8, 9, 13, 49, 200):
        check_same(kept, whole, num_rows)


def test_where_no_more_room_may_be_taken_bf16_is_all(linears: NativeLinears) -> None:
    # As of a model of three values, which eight bits hold, too.
    weight = (numbers(40, 64).sign() * 0.0123).bfloat16().float()
    assert linears.make_kept(weight).kind is WeightKind.WITH_INT8
    kept = linears.make_kept(weight, takes_more_room=False)
    assert kept.kind is WeightKind.KEPT_BF16
    check_same(kept, linears.make(weight), 5)


def test_what_fewer_bits_would_round_stays_whole(linears: NativeLinears) -> None:
    weight = numbers(40, 64)
    kept = linears.make_kept(weight)
    assert kept.kind is WeightKind.SAME
    check_same(kept, linears.make(weight), 5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_none_stays_in_its_row(linears: NativeLinears, bad: float) -> None:
    weight = stored("Q4_1", (96, 64))
    kept, whole = linears.make_kept(weight), linears.make(weight)
    inputs = numbers(8, 64)
    inputs[6, 40] = bad
    torch.testing.assert_close(kept(inputs), whole(inputs), rtol=0, atol=0, equal_nan=True)
    assert torch.isfinite(kept(inputs)[torch.arange(8) != 6]).all()


@pytest.mark.parametrize("num_rows", [2, 7, 17])
def test_more_threads_change_no_bit(linears: NativeLinears, num_rows: int) -> None:
    weight = stored("Q4_0", (300, 160))
    inputs, before = numbers(num_rows, 160), torch.get_num_threads()
    outputs = []
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            outputs.append(linears.make_kept(weight)(inputs))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


def test_what_does_not_fit_is_refused(library: NativeLibrary) -> None:
    linears = NativeLinears(library)
    if not linears.suits_kept():
        with pytest.raises(ValueError, match="keep no"):
            linears.make_kept(stored("Q4_0", (32, 32)))
        return
    with pytest.raises(ValueError, match="bfloat16"):
        linears.make_kept(numbers(32, 32).bfloat16())
    with pytest.raises(ValueError, match="bias"):
        linears.make_kept(stored("Q4_0", (32, 32)), numbers(31))
    with pytest.raises(ValueError, match="width 3"):
        linears.make_kept(numbers(4, 3))
