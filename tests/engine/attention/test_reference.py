"""The reference backend against torch's own attention over contiguous KV, and at the kernels' edges."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from headrace.engine.attention.backend import AttentionMetadata, AttentionSpec
from headrace.engine.attention.reference import ReferenceBackend
from tests.support.attention_cases import AttentionCase, make_case

MIXED_ROWS = [(0, 7), (12, 1), (5, 4), (30, 1), (0, 1)]


def contiguous_attention(case: AttentionCase, row: int, scale: float) -> torch.Tensor:
    """Bottom-right causal attention of one row by torch, on KV that was never paged."""
    shape = case.rows[row]
    keys, values = case.whole_keys[row].transpose(0, 1), case.whole_values[row].transpose(0, 1)
    group_size = case.query.shape[1] // keys.shape[0]
    mask = torch.ones(shape.num_queries, shape.seq_len, dtype=torch.bool).tril(shape.num_past)
    out = F.scaled_dot_product_attention(
        case.query[case.tokens_of(row)].transpose(0, 1),
        keys.repeat_interleave(group_size, dim=0),
        values.repeat_interleave(group_size, dim=0),
        attn_mask=mask,
        scale=scale,
    )
    return out.transpose(0, 1)


@pytest.mark.parametrize("block_size", [1, 4, 16, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (6, 2), (9, 3), (4, 1)])
def test_paged_rows_equal_contiguous_attention(block_size: int, num_heads: int, num_kv_heads: int) -> None:
    case = make_case(MIXED_ROWS, block_size=block_size, num_heads=num_heads, num_kv_heads=num_kv_heads)

    out = case.run(ReferenceBackend(case.storage), AttentionSpec(scale=0.25))

    for row in range(len(case.rows)):
        torch.testing.assert_close(
            out[case.tokens_of(row)], contiguous_attention(case, row, 0.25), rtol=1e-5, atol=1e-6
        )


def test_the_window_counts_the_token_itself() -> None:
    case = make_case([(9, 1)], num_heads=2, num_kv_heads=2)

    out = case.run(ReferenceBackend(case.storage), AttentionSpec(scale=0.25, window=1))

    torch.testing.assert_close(out[0], case.value[0])


def test_a_window_hides_what_is_further_back() -> None:
    case = make_case([(20, 3)], num_heads=2, num_kv_heads=2)

    out = case.run(ReferenceBackend(case.storage), AttentionSpec(scale=0.25, window=5))

    for i in range(3):
        seen = slice(20 + i - 4, 20 + i + 1)
        weights = torch.softmax(
            torch.einsum("hd,khd->hk", case.query[i], case.whole_keys[0][seen]) * 0.25, dim=-1
        )
        expected = torch.einsum("hk,khd->hd", weights, case.whole_values[0][seen])
        torch.testing.assert_close(out[i], expected, rtol=1e-5, atol=1e-6)


def test_the_soft_cap_bounds_scores_before_the_softmax() -> None:
    case = make_case([(3, 1)], num_heads=1, num_kv_heads=1)
    scores = torch.einsum("hd,khd->hk", case.query[0], case.whole_keys[0]) * 10.0

    out = case.run(ReferenceBackend(case.storage), AttentionSpec(scale=10.0, soft_cap=2.0))

    weights = torch.softmax(2.0 * torch.tanh(scores / 2.0), dim=-1)
    torch.testing.assert_close(out[0], torch.einsum("hk,khd->hd", weights, case.whole_values[0]))


def test_a_query_that_sees_nothing_gives_zero() -> None:
    case = make_case([(4, 3)])
    metadata = AttentionMetadata(
        slot_mapping=case.metadata.slot_mapping,
        block_table=case.metadata.block_table,
        seq_lens=torch.tensor([1], dtype=torch.int32),
        cu_seqlens_q=case.metadata.cu_seqlens_q,
        cu_seqlens_k=torch.tensor([0, 1], dtype=torch.int32),
        max_query_len=3,
        max_seq_len=1,
    )

    out = ReferenceBackend(case.storage).begin_step(metadata).attend(0, case.query, AttentionSpec(scale=1.0))

    assert torch.equal(out[:2], torch.zeros_like(out[:2]))
    assert bool(out[2].abs().sum() > 0)


@pytest.mark.parametrize("filler", [math.nan, math.inf])
def test_what_unused_slots_hold_never_matters(filler: float) -> None:
    clean = make_case(MIXED_ROWS, table_padding=2)
    dirty = make_case(MIXED_ROWS, table_padding=2, filler=filler)

    out = dirty.run(ReferenceBackend(dirty.storage), AttentionSpec(scale=0.25))

    assert torch.equal(out, clean.run(ReferenceBackend(clean.storage), AttentionSpec(scale=0.25)))


def test_writing_touches_the_mapped_slots_alone() -> None:
    case = make_case([(3, 2)], block_size=4, filler=7.0)
    before = case.storage.key.clone()

    case.run(ReferenceBackend(case.storage), AttentionSpec(scale=1.0))

    changed = (case.storage.key[0].flatten(0, 1) != before[0].flatten(0, 1)).flatten(1).any(dim=1)
    assert torch.nonzero(changed).flatten().tolist() == sorted(case.metadata.slot_mapping.tolist())
