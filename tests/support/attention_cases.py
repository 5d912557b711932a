"""Random paged caches with rows in them, for comparing attention backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.engine.attention.backend import AttentionBackend, AttentionMetadata, AttentionSpec
from headrace.engine.config import CacheLayout
from headrace.engine.kv.storage import KVShape, KVStorage

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Row:
    """`num_past` tokens in the cache, `num_queries` that this step computes."""

    num_past: int
    num_queries: int

    @property
    def seq_len(self) -> int:
        return self.num_past + self.num_queries


@dataclass(frozen=True)
class AttentionCase:
    """A cache that holds each row's past, and the step that goes on from there.

    Args:
        query: (T, H_q, D).
        key, value: (T, H_kv, D), of this step's tokens.
        whole_keys, whole_values: per row (K, H_kv, D), past and step, contiguous.
    """

    storage: KVStorage
    metadata: AttentionMetadata
    rows: tuple[Row, ...]
    query: Tensor
    key: Tensor
    value: Tensor
    whole_keys: tuple[Tensor, ...]
    whole_values: tuple[Tensor, ...]

    def run(self, backend: AttentionBackend, spec: AttentionSpec) -> Tensor:
        """Write this step's KV to layer 0 and attend: (T, H_q, D)."""
        step = backend.begin_step(self.metadata)
        step.write_kv(0, self.key, self.value)
        return step.attend(0, self.query, spec)

    def tokens_of(self, row: int) -> slice:
        """The row's tokens on the flat axis."""
        begin = sum(r.num_queries for r in self.rows[:row])
        return slice(begin, begin + self.rows[row].num_queries)


def make_case(
    rows: Sequence[tuple[int, int]],
    *,
    block_size: int = 16,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    filler: float = 0.0,
    table_padding: int = 0,
    device: torch.device = _CPU,
) -> AttentionCase:
    """Build a case.

    Args:
        rows: (num_past, num_queries) of each.
        seed: each row's content depends on it, on the row's number and on nothing else.
        filler: what every slot holds that no row uses.
        table_padding: null blocks behind the widest row's table.
        device: where cache, step and operands lie; the numbers are the same everywhere.
    """
    cases = tuple(Row(*row) for row in rows)
    num_blocks = [-(-row.seq_len // block_size) for row in cases]
    shuffled = torch.randperm(sum(num_blocks), generator=torch.Generator().manual_seed(seed)) + 1
    block_table = torch.zeros(len(cases), max(num_blocks) + table_padding, dtype=torch.int32)
    layout = CacheLayout(num_blocks=sum(num_blocks) + 2, block_size=block_size)
    storage = KVStorage(layout, KVShape(1, num_kv_heads, head_dim, dtype), device)
    for cache in (storage.key, storage.value):
        cache[:, 1:].fill_(filler)
    queries, keys, values, slots = [], [], [], []
    for i, row in enumerate(cases):
        generator = torch.Generator().manual_seed(1000 * seed + i)
        block_ids = shuffled[sum(num_blocks[:i]) : sum(num_blocks[: i + 1])]
        block_table[i, : len(block_ids)] = block_ids
        positions = torch.arange(row.seq_len)
        row_slots = block_ids[positions // block_size] * block_size + positions % block_size
        shape = (row.seq_len, num_kv_heads, head_dim)
        keys.append(torch.randn(shape, generator=generator).to(dtype))
        values.append(torch.randn(shape, generator=generator).to(dtype))
        queries.append(torch.randn((row.num_queries, num_heads, head_dim), generator=generator).to(dtype))
        for cache, new in ((storage.key, keys[-1]), (storage.value, values[-1])):
            cache[0].flatten(0, 1)[row_slots[: row.num_past].to(device)] = new[: row.num_past].to(device)
        slots.append(row_slots[row.num_past :])
    seq_lens = [row.seq_len for row in cases]
    query_lens = [row.num_queries for row in cases]
    return AttentionCase(
        storage=storage,
        metadata=AttentionMetadata(
            slot_mapping=torch.cat(slots).to(device),
            block_table=block_table.to(device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32).to(device),
            cu_seqlens_q=_cumulated(query_lens).to(device),
            cu_seqlens_k=_cumulated(seq_lens).to(device),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
        ),
        rows=cases,
        query=torch.cat(queries).to(device),
        key=torch.cat([k[row.num_past :] for k, row in zip(keys, cases, strict=True)]).to(device),
        value=torch.cat([v[row.num_past :] for v, row in zip(values, cases, strict=True)]).to(device),
        whole_keys=tuple(keys),
        whole_values=tuple(values),
    )


def _cumulated(lens: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
