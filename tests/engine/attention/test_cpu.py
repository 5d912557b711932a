"""The CPU backend against the reference, over everything that a step may hold."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.attention.backend import AttentionMetadata, AttentionSpec
from headrace.engine.attention.cpu import CpuBackend
from headrace.engine.attention.reference import ReferenceBackend
from tests.support.attention_cases import AttentionCase, make_case

DECODE = [(15, 1), (16, 1), (63, 1), (64, 1), (200, 1), (0, 1)]
PROMPTS = [(0, 5), (0, 33), (0, 64)]
LONG_PROMPT = [(0, 300)]
CHUNKS_WITH_PAST = [(17, 90), (130, 7), (3, 129)]
VERIFY = [(20, 5), (77, 5), (64, 5)]
MIXED = [(40, 1), (0, 150), (10, 6), (128, 1), (6, 65), (0, 1), (99, 2)]
ALL = {
    "decode": DECODE,
    "prompts": PROMPTS,
    "long prompt": LONG_PROMPT,
    "chunks": CHUNKS_WITH_PAST,
    "verify": VERIFY,
    "mixed": MIXED,
}
TOLERANCES = {torch.float32: (1e-5, 2e-6), torch.bfloat16: (2e-2, 2e-2)}


def assert_equals_reference(case: AttentionCase, spec: AttentionSpec) -> None:
    rtol, atol = TOLERANCES[case.query.dtype]
    expected = case.run(ReferenceBackend(case.storage), spec)
    torch.testing.assert_close(case.run(CpuBackend(case.storage), spec), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("block_size", [4, 16, 256])
@pytest.mark.parametrize("rows", ALL.values(), ids=ALL)
def test_equals_the_reference(rows: list[tuple[int, int]], block_size: int, dtype: torch.dtype) -> None:
    assert_equals_reference(make_case(rows, block_size=block_size, dtype=dtype), AttentionSpec(scale=0.25))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(2, 2, 16), (9, 3, 64), (4, 1, 64)])
@pytest.mark.parametrize("rows", ALL.values(), ids=ALL)
def test_equals_the_reference_for_other_heads(
    rows: list[tuple[int, int]], num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    case = make_case(rows, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    assert_equals_reference(case, AttentionSpec(scale=head_dim**-0.5))


@pytest.mark.parametrize("window", [1, 5, 64, 1000])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("rows", ALL.values(), ids=ALL)
def test_equals_the_reference_with_window_and_soft_cap(
    rows: list[tuple[int, int]], window: int, soft_cap: float | None
) -> None:
    assert_equals_reference(make_case(rows), AttentionSpec(scale=0.7, window=window, soft_cap=soft_cap))


@given(
    rows=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 140)), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 3, 4, 16]),
    window=st.none() | st.integers(1, 80),
)
def test_equals_the_reference_for_any_rows(
    rows: list[tuple[int, int]], block_size: int, window: int | None
) -> None:
    assert_equals_reference(make_case(rows, block_size=block_size), AttentionSpec(scale=0.25, window=window))


@pytest.mark.parametrize("rows", ALL.values(), ids=ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_row_does_not_depend_on_its_neighbours(rows: list[tuple[int, int]], dtype: torch.dtype) -> None:
    """Bit for bit: a row's shapes follow from its own length."""
    together = make_case(rows, dtype=dtype)
    out = together.run(CpuBackend(together.storage), AttentionSpec(scale=0.25))
    for i in range(len(rows)):
        # Its content depends on its number, so the others stay, as short as can be.
        others = [(0, 1)] * len(rows)
        alone = make_case([*others[:i], rows[i], *others[i + 1 :]], dtype=dtype)
        got = alone.run(CpuBackend(alone.storage), AttentionSpec(scale=0.25))[alone.tokens_of(i)]
        assert torch.equal(got, out[together.tokens_of(i)])


@pytest.mark.parametrize("rows", ALL.values(), ids=ALL)
@pytest.mark.parametrize("filler", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("window", [None, 9])
def test_what_unused_slots_hold_never_matters(
    rows: list[tuple[int, int]], filler: float, window: int | None
) -> None:
    spec = AttentionSpec(scale=0.25, window=window)
    clean = make_case(rows, table_padding=3)
    dirty = make_case(rows, table_padding=3, filler=filler)

    out = dirty.run(CpuBackend(dirty.storage), spec)

    assert torch.equal(out, clean.run(CpuBackend(clean.storage), spec))


@pytest.mark.parametrize("poisoned", range(len(MIXED)))
def test_a_row_of_nan_leaves_its_neighbours_alone(poisoned: int) -> None:
    """Within the step, and in the steps that reuse the backend's buffers and the row's blocks."""
    spec = AttentionSpec(scale=0.25)
    clean = make_case(MIXED)
    expected = clean.run(CpuBackend(clean.storage), spec)
    case = make_case(MIXED)
    backend = CpuBackend(case.storage)
    tokens = case.tokens_of(poisoned)
    for tensor in (case.query, case.key, case.value):
        tensor[tokens] = math.nan

    out = case.run(backend, spec)

    assert bool(out[tokens].isnan().all())
    is_neighbour = torch.ones(len(out), dtype=torch.bool)
    is_neighbour[tokens] = False
    assert torch.equal(out[is_neighbour], expected[is_neighbour])
    healthy = make_case(MIXED)
    for tensor, good in ((case.query, healthy.query), (case.key, healthy.key), (case.value, healthy.value)):
        tensor.copy_(good)
    assert torch.equal(case.run(backend, spec), expected)


def test_a_later_owner_of_a_poisoned_block_is_healthy() -> None:
    """A request left NaN in a whole block; the next one has written only its first slot."""
    spec = AttentionSpec(scale=0.25)
    case = make_case([(0, 1), (70, 1)])
    expected = case.run(CpuBackend(case.storage), spec)
    block_id = int(case.metadata.block_table[0, 0])
    for cache in (case.storage.key, case.storage.value):
        cache[:, block_id] = math.nan

    assert torch.equal(case.run(CpuBackend(case.storage), spec), expected)


def test_takes_views_of_a_fused_projection() -> None:
    case = make_case(MIXED)
    expected = case.run(CpuBackend(case.storage), AttentionSpec(scale=0.25))
    fused = torch.cat([case.query, case.key, case.value], dim=1)

    step = CpuBackend(case.storage).begin_step(case.metadata)
    step.write_kv(0, fused[:, 6:8], fused[:, 8:])

    assert torch.equal(step.attend(0, fused[:, :6], AttentionSpec(scale=0.25)), expected)


def test_a_query_that_sees_nothing_gives_zero() -> None:
    case = make_case([(4, 3), (70, 1)])
    metadata = AttentionMetadata(
        slot_mapping=case.metadata.slot_mapping,
        block_table=case.metadata.block_table,
        seq_lens=torch.tensor([1, 71], dtype=torch.int32),
        cu_seqlens_q=case.metadata.cu_seqlens_q,
        cu_seqlens_k=torch.tensor([0, 1, 72], dtype=torch.int32),
        max_query_len=3,
        max_seq_len=71,
    )
    spec = AttentionSpec(scale=1.0)

    out = CpuBackend(case.storage).begin_step(metadata).attend(0, case.query, spec)

    expected = ReferenceBackend(case.storage).begin_step(metadata).attend(0, case.query, spec)
    assert torch.equal(out[:2], torch.zeros_like(out[:2]))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-6)


def test_layers_are_apart() -> None:
    case = make_case([(5, 2)])
    step = CpuBackend(case.storage).begin_step(case.metadata)
    before = case.storage.value.clone()

    step.write_kv(0, case.key, case.value)

    assert not torch.equal(case.storage.value[0], before[0])
    assert case.storage.value.shape[0] == 1
