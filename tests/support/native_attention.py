"""Steps of compiled attention, laid out in a paged cache, and what plain attention gives for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from headrace.engine.attention.backend import AttentionMetadata, AttentionSpec
from headrace.engine.attention.reference import ReferenceBackend
from headrace.engine.config import CacheLayout
from headrace.engine.kv.storage import KVShape, KVStorage
from headrace.engine.native.backend import NativeCpuBackend
from headrace.engine.native.library import NativeLibrary

CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
NUM_LAYERS = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of a model and blocks of its cache."""

    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Step:
    """Rows of (KV length, query tokens), with the keys, values and queries that belong to them.

    Args:
        key, value: per row, (KV length, H_kv, D).
        query: per row, (query tokens, H_q, D).
    """

    shape: Shape
    rows: tuple[tuple[int, int], ...]
    key: tuple[Tensor, ...]
    value: tuple[Tensor, ...]
    query: tuple[Tensor, ...]


def make_step(shape: Shape, rows: tuple[tuple[int, int], ...], seed: int = 0) -> Step:
    generator = torch.Generator().manual_seed(seed)

    def numbers(count: int, num_heads: int) -> Tensor:
        return torch.randn(count, num_heads, shape.head_dim, generator=generator).to(shape.dtype)

    return Step(
        shape,
        rows,
        tuple(numbers(seq_len, shape.num_kv_heads) for seq_len, _ in rows),
        tuple(numbers(seq_len, shape.num_kv_heads) for seq_len, _ in rows),
        tuple(numbers(query_len, shape.num_heads) for _, query_len in rows),
    )


def lay_out(
    step: Step, *, poison: float = float("nan"), seed: int = 0
) -> tuple[KVStorage, AttentionMetadata]:
    """A cache that holds every row's past in blocks of any order, and poison in all other slots."""
    shape = step.shape
    block_size = shape.block_size
    num_blocks = [-(-seq_len // block_size) for seq_len, _ in step.rows]
    storage = KVStorage(
        CacheLayout(sum(num_blocks) + 3, block_size),
        KVShape(NUM_LAYERS, shape.num_kv_heads, shape.head_dim, shape.dtype),
        CPU,
    )
    storage.key.fill_(poison)
    storage.value.fill_(poison)
    ids = torch.randperm(sum(num_blocks) + 2, generator=torch.Generator().manual_seed(seed)) + 1
    table = torch.zeros(len(step.rows), max(1, *num_blocks), dtype=torch.int32)
    new_slots = []
    for row, ((seq_len, query_len), blocks) in enumerate(
        zip(step.rows, ids[: sum(num_blocks)].split(num_blocks), strict=True)
    ):
        table[row, : len(blocks)] = blocks
        slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()[:seq_len]
        num_past = max(0, seq_len - query_len)
        for cache, numbers in ((storage.key, step.key[row]), (storage.value, step.value[row])):
            cache.flatten(1, 2)[:, slots[:num_past]] = numbers[:num_past]
        # A token that no position is left for goes into the null block.
        new_slots.append(
            torch.cat((torch.zeros(query_len - (seq_len - num_past), dtype=torch.int64), slots[num_past:]))
        )
    seq_lens, query_lens = zip(*step.rows, strict=True)
    return storage, AttentionMetadata(
        slot_mapping=torch.cat(new_slots),
        block_table=table,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32),
        cu_seqlens_k=torch.tensor([0, *accumulate(seq_lens)], dtype=torch.int32),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )


def new_tokens(step: Step, per_row: tuple[Tensor, ...]) -> Tensor:
    """K or V of the tokens that this step writes."""
    return torch.cat(
        [
            torch.cat(
                (numbers.new_zeros(max(0, query_len - seq_len), *numbers.shape[1:]), numbers[-query_len:])
            )
            for numbers, (seq_len, query_len) in zip(per_row, step.rows, strict=True)
        ]
    )


def attend(
    library: NativeLibrary, step: Step, spec: AttentionSpec, *, poison: float = float("nan"), seed: int = 0
) -> tuple[Tensor, ...]:
    """What each row gives, over a cache laid out by `seed`."""
    storage, metadata = lay_out(step, poison=poison, seed=seed)
    opened = NativeCpuBackend(storage, library).begin_step(metadata)
    opened.write_kv(1, new_tokens(step, step.key), new_tokens(step, step.value))
    out = opened.attend(1, torch.cat(step.query), spec)
    return out.split([query_len for _, query_len in step.rows])


def expect(step: Step, spec: AttentionSpec) -> tuple[Tensor, ...]:
    """What the plain backend gives in fp32, over the same numbers."""
    wide = replace(
        step,
        shape=replace(step.shape, dtype=torch.float32),
        key=tuple(numbers.float() for numbers in step.key),
        value=tuple(numbers.float() for numbers in step.value),
        query=tuple(numbers.float() for numbers in step.query),
    )
    storage, metadata = lay_out(wide, poison=0.0)
    opened = ReferenceBackend(storage).begin_step(metadata)
    opened.write_kv(1, new_tokens(wide, wide.key), new_tokens(wide, wide.value))
    return opened.attend(1, torch.cat(wide.query), spec).split([query_len for _, query_len in step.rows])


def assert_close(library: NativeLibrary, step: Step, spec: AttentionSpec) -> None:
    tolerance = TOLERANCES[step.shape.dtype]
    for ours, plain in zip(attend(library, step, spec), expect(step, spec), strict=True):
        torch.testing.assert_close(ours.float(), plain, atol=tolerance, rtol=tolerance)


def spec_of(shape: Shape, window: int | None = None, soft_cap: float | None = None) -> AttentionSpec:
    return AttentionSpec(shape.head_dim**-0.5, window, soft_cap)
