"""The contract between the decoder and whatever computes attention over the paged cache.

Letters: T tokens of the step, B sequences (rows), H_q query heads, H_kv key/value heads, D head width,
L layers, N blocks, S block size, M width of the block table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can take, as data that any machine can check.

    Args:
        dtypes: types of query, key, value and cache, all the same.
        block_size_multiple: the block size must be a multiple of this.
        max_head_dim, head_dim_multiple: D is at most the one and a multiple of the other.
        supports_graphs: whether a captured graph can replay it.
        supports_soft_cap: whether it can bend scores; see `AttentionSpec`.
        min_compute_capability: of the CUDA device; None for a backend that runs on the CPU.
    """

    name: str
    dtypes: frozenset[torch.dtype]
    block_size_multiple: int = 1
    max_head_dim: int = 1024
    head_dim_multiple: int = 1
    supports_graphs: bool = False
    supports_soft_cap: bool = True
    min_compute_capability: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the step's tokens stand in the paged cache.

    A row of length 0 is padding, which a captured graph needs: it has one query token all the same, whose
    output means nothing and whose K and V go to the null block.

    Args:
        slot_mapping: (T,), int64: slot where each token's K and V go.
        block_table: (B, M), int32: block ids; padding entries are the null block 0.
        seq_lens: (B,), int32: KV length of each row, this step's tokens included.
        cu_seqlens_q: (B + 1,), int32: where each row's query tokens begin on the flat token axis.
        cu_seqlens_k: (B + 1,), int32: cumulated `seq_lens`.
        max_query_len, max_seq_len: the longest of each, host values.
    """

    slot_mapping: Tensor
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How one layer attends.

    Args:
        scale: factor on query . key.
        window: a token sees itself and the `window - 1` before it; None sees all.
        soft_cap: scores become ``cap * tanh(score / cap)``; None leaves them.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None


class AttentionStep(Protocol):
    """Attention of one step, made by `AttentionBackend.begin_step`; the decoder calls it layer by layer."""

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store K and V of this step's tokens.

        Args:
            key, value: (T, H_kv, D), cache dtype, last axis contiguous.
        """
        ...

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend from this step's tokens to everything written so far in their sequences.

        Causal, bottom-right aligned: the last query token of a row sees the row's whole KV length.
        Consecutive groups of H_q / H_kv query heads share one KV head.

        Args:
            query: (T, H_q, D), cache dtype, last axis contiguous.

        Returns:
            (T, H_q, D), dtype of `query`.
        """
        ...


class AttentionBackend(Protocol):
    """One way to compute attention over one paged cache, which it is given when it is built."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can take."""
        ...

    def begin_step(self, metadata: AttentionMetadata) -> AttentionStep:
        """Do once per step whatever all layers share."""
        ...
