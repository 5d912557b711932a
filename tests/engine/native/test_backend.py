"""Compiled attention against the plain one: same numbers, nothing foreign read, neighbours without effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from headrace.engine.errors import IntegrityError
from headrace.engine.native.backend import NativeCpuBackend
from headrace.engine.native.library import NativeLibrary
from tests.support.native_attention import (
    NUM_LAYERS,
    TOLERANCES,
    Shape,
    assert_close,
    attend,
    lay_out,
    make_step,
    new_tokens,
    spec_of,
)

DTYPES = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in TOLERANCES]
MIXED = ((1, 1), (300, 1), (129, 129), (700, 37), (257, 5), (64, 1), (128, 2))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 4, 16, 256])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("heads", [(3, 3), (9, 3), (8, 1)], ids=str)
def test_mixed_rows_equal_plain_attention(
    library: NativeLibrary, heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    shape = Shape(*heads, head_dim, block_size, dtype)
    assert_close(library, make_step(shape, MIXED), spec_of(shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 256])
def test_every_variant_equals_plain_attention(
    any_library: NativeLibrary, head_dim: int, dtype: torch.dtype
) -> None:
    shape = Shape(head_dim=head_dim, dtype=dtype)
    assert_close(
        any_library, make_step(shape, ((5, 5), (150, 3), (40, 1))), spec_of(shape, window=33, soft_cap=15.0)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 37, 128, 5000])
def test_a_window_hides_what_lies_before_it(library: NativeLibrary, window: int, dtype: torch.dtype) -> None:
    shape = Shape(dtype=dtype)
    assert_close(library, make_step(shape, MIXED), spec_of(shape, window=window))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("soft_cap", [0.5, 50.0])
def test_scores_are_capped(library: NativeLibrary, soft_cap: float, dtype: torch.dtype) -> None:
    shape = Shape(dtype=dtype)
    assert_close(library, make_step(shape, MIXED), spec_of(shape, soft_cap=soft_cap))


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_contexts(library: NativeLibrary, dtype: torch.dtype) -> None:
    shape = Shape(dtype=dtype)
    assert_close(library, make_step(shape, ((3000, 1), (2049, 4), (1500, 200), (1, 1))), spec_of(shape))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    rows=st.lists(
        st.integers(1, 400).flatmap(lambda length: st.tuples(st.just(length), st.integers(1, length))),
        min_size=1,
        max_size=6,
    ),
    shape=st.builds(
        lambda num_kv_heads, group_size, width, block_size, dtype: Shape(
            num_kv_heads * group_size, num_kv_heads, 8 * width, block_size, dtype
        ),
        st.integers(1, 3),
        st.integers(1, 9),
        st.integers(1, 12),
        st.integers(1, 40),
        st.sampled_from(list(TOLERANCES)),
    ),
    window=st.none() | st.integers(1, 300),
    seed=st.integers(0, 2**31),
)
def test_any_layout_equals_plain_attention(
    library: NativeLibrary, rows: list[tuple[int, int]], shape: Shape, window: int | None, seed: int
) -> None:
    assert_close(library, make_step(shape, tuple(rows), seed), spec_of(shape, window))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_that_sees_nothing_gives_zero(any_library: NativeLibrary, dtype: torch.dtype) -> None:
    shape = Shape(dtype=dtype)
    # Two of five queries come before the sequence's first position; the last row has no position at all.
    empty, _, nothing = attend(any_library, make_step(shape, ((3, 5), (20, 1), (0, 2))), spec_of(shape))
    assert torch.equal(empty[:2], torch.zeros_like(empty[:2]))
    assert bool((empty[2:] != 0).any())
    assert torch.equal(nothing, torch.zeros_like(nothing))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("window", [None, 20])
def test_no_foreign_slot_has_an_effect(
    any_library: NativeLibrary, window: int | None, poison: float, dtype: torch.dtype
) -> None:
    shape = Shape(block_size=32, dtype=dtype)
    step, spec = make_step(shape, ((1, 1), (140, 1), (70, 6), (33, 33))), spec_of(shape, window)
    for poisoned, clean in zip(
        attend(any_library, step, spec, poison=poison),
        attend(any_library, step, spec, poison=0.0),
        strict=True,
    ):
        assert torch.equal(poisoned, clean)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_stays_in_its_row(any_library: NativeLibrary, dtype: torch.dtype) -> None:
    shape = Shape(dtype=dtype)
    step = make_step(shape, ((50, 1), (50, 1), (200, 1)))
    step.value[1][7] = float("nan")
    before, broken, after = attend(any_library, step, spec_of(shape))
    assert bool(broken.isnan().all())
    assert bool(before.isfinite().all())
    assert bool(after.isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_query_gives_nan(any_library: NativeLibrary, dtype: torch.dtype) -> None:
    shape = Shape(dtype=dtype)
    step = make_step(shape, ((300, 1), (200, 3)))
    step.query[0][0, 4, 3] = float("nan")
    broken, other = attend(any_library, step, spec_of(shape))
    assert bool(broken[0, 4].isnan().all())
    assert bool(broken[0, 5].isfinite().all())
    assert bool(other.isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("two_threads")
def test_neighbours_and_block_ids_change_no_bit(any_library: NativeLibrary, dtype: torch.dtype) -> None:
    shape = Shape(dtype=dtype)
    rows = ((1000, 1), (129, 1), (640, 5), (257, 1), (300, 120))
    step, spec = make_step(shape, rows), spec_of(shape)
    together = attend(any_library, step, spec)
    for row in range(len(rows)):
        alone = replace(
            step,
            rows=(rows[row],),
            key=(step.key[row],),
            value=(step.value[row],),
            query=(step.query[row],),
        )
        assert torch.equal(attend(any_library, alone, spec, seed=row + 1)[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_no_bit(any_library: NativeLibrary, dtype: torch.dtype) -> None:
    shape = Shape(dtype=dtype)
    step, spec = make_step(shape, ((2000, 1), (5, 1), (300, 5))), spec_of(shape)
    before = torch.get_num_threads()
    results = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        results.append(torch.cat(attend(any_library, step, spec)))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 5, 128, 200])
def test_cutting_a_prompt_changes_no_bit(any_library: NativeLibrary, chunk: int, dtype: torch.dtype) -> None:
    shape = Shape(dtype=dtype)
    spec, length = spec_of(shape), 300
    whole = make_step(shape, ((length, length),))
    expected = attend(any_library, whole, spec)[0]
    for end in (min(chunk, length), min(2 * chunk, length), length):
        begin = max(0, end - chunk)
        part = replace(
            whole,
            rows=((end, end - begin),),
            key=(whole.key[0][:end],),
            value=(whole.value[0][:end],),
            query=(whole.query[0][begin:end],),
        )
        assert torch.equal(attend(any_library, part, spec)[0], expected[begin:end])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80])
@pytest.mark.parametrize("group_size", range(1, 10))
def test_the_size_of_blocks_changes_no_bit(
    library: NativeLibrary, group_size: int, head_dim: int, dtype: torch.dtype
) -> None:
    # Keys of few rows are read from blocks of whole quads, all others are packed first.
    rows = ((300, 1), (130, 2), (17, 1), (1, 1), (200, 40))
    results = []
    for block_size in (3, 4, 16):
        shape = Shape(2 * group_size, 2, head_dim, block_size, dtype)
        spec = spec_of(shape, window=150, soft_cap=20.0)
        results.append(torch.cat(attend(library, make_step(shape, rows), spec)))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_writing_touches_its_slots_alone(library: NativeLibrary, dtype: torch.dtype) -> None:
    shape = Shape(dtype=dtype)
    step = make_step(shape, ((40, 7), (18, 1)))
    storage, metadata = lay_out(step, poison=3.0)
    key_before, value_before = storage.key.clone(), storage.value.clone()
    key, value = new_tokens(step, step.key), new_tokens(step, step.value)
    NativeCpuBackend(storage, library).begin_step(metadata).write_kv(1, key, value)
    key_before[1].flatten(0, 1)[metadata.slot_mapping] = key
    value_before[1].flatten(0, 1)[metadata.slot_mapping] = value
    assert torch.equal(storage.key, key_before)
    assert torch.equal(storage.value, value_before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_may_be_a_part_of_one_fused_tensor(library: NativeLibrary, dtype: torch.dtype) -> None:
    shape = Shape(dtype=dtype)
    step, spec = make_step(shape, ((40, 7), (18, 1))), spec_of(shape)
    storage, metadata = lay_out(step)
    fused = torch.cat(
        (torch.cat(step.query), new_tokens(step, step.key), new_tokens(step, step.value)), dim=1
    )
    opened = NativeCpuBackend(storage, library).begin_step(metadata)
    opened.write_kv(1, fused[:, 9:12], fused[:, 12:])
    assert torch.equal(opened.attend(1, fused[:, :9], spec), torch.cat(attend(library, step, spec)))


def test_a_step_ends_when_the_next_begins(library: NativeLibrary) -> None:
    step = make_step(Shape(), ((10, 1),))
    storage, metadata = lay_out(step)
    backend = NativeCpuBackend(storage, library)
    first = backend.begin_step(metadata)
    backend.begin_step(metadata)
    with pytest.raises(IntegrityError, match="newer step"):
        first.attend(0, step.query[0], spec_of(step.shape))


def test_what_does_not_fit_the_cache_is_refused(library: NativeLibrary) -> None:
    step = make_step(Shape(), ((10, 2),))
    storage, metadata = lay_out(step)
    opened = NativeCpuBackend(storage, library).begin_step(metadata)
    query, spec = step.query[0], spec_of(step.shape)
    for wrong in (query.bfloat16(), query[:1], query[:, :8], query[:, :, :32], query.flip(1)[:, ::2]):
        with pytest.raises(IntegrityError):
            opened.attend(0, wrong, spec)
    for layer in (-1, NUM_LAYERS):
        with pytest.raises(IntegrityError, match="layer"):
            opened.attend(layer, query, spec)
    with pytest.raises(IntegrityError, match="K and V"):
        opened.write_kv(0, step.key[0], step.value[0])


def test_metadata_of_another_type_is_refused(library: NativeLibrary) -> None:
    storage, metadata = lay_out(make_step(Shape(), ((10, 2),)))
    backend = NativeCpuBackend(storage, library)
    with pytest.raises(IntegrityError, match="block_table"):
        backend.begin_step(replace(metadata, block_table=metadata.block_table.long()))


def test_capabilities_say_what_it_takes(library: NativeLibrary) -> None:
    storage, _ = lay_out(make_step(Shape(), ((10, 2),)))
    capabilities = NativeCpuBackend(storage, library).capabilities
    assert capabilities.name == "native"
    assert capabilities.dtypes == frozenset(TOLERANCES)
    assert (capabilities.block_size_multiple, capabilities.head_dim_multiple) == (1, 8)
