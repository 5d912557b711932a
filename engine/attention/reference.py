"""Attention that is plainly right and not fast: what every other backend is compared with.

Letters as in `headrace.engine.attention.backend`; K is a row's KV length, Q its number of query tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.engine.attention.backend import AttentionMetadata, AttentionSpec, Capabilities
from headrace.engine.kv.storage import KVStorage

CAPABILITIES = Capabilities(
    name="reference",
    dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
)


class ReferenceBackend:
    """Row by row, head by head, on any device; scores, softmax and sums in fp32 (fp64 for fp64)."""

    def __init__(self, storage: KVStorage) -> None:
        self._storage = storage

    @property
    def capabilities(self) -> Capabilities:
        """See `AttentionBackend`."""
        return CAPABILITIES

    def begin_step(self, metadata: AttentionMetadata) -> ReferenceStep:
        """See `AttentionBackend`."""
        return ReferenceStep(self._storage, metadata)


class ReferenceStep:
    """See `AttentionStep`."""

    def __init__(self, storage: KVStorage, metadata: AttentionMetadata) -> None:
        self._storage = storage
        self._metadata = metadata

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See `AttentionStep`."""
        for cache, new in zip(self._storage.layer(layer), (key, value), strict=True):
            cache.flatten(0, 1)[self._metadata.slot_mapping] = new

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        """See `AttentionStep`."""
        keys, values = self._storage.layer(layer)
        out = torch.empty_like(query)
        borders = self._metadata.cu_seqlens_q.tolist()
        for row, seq_len in enumerate(self._metadata.seq_lens.tolist()):
            # (M * S, H_kv, D): more slots than the row uses, as a kernel would load them.
            block_ids = self._metadata.block_table[row].long()
            tokens = slice(borders[row], borders[row + 1])
            out[tokens] = _attend_row(
                query[tokens], keys[block_ids].flatten(0, 1), values[block_ids].flatten(0, 1), seq_len, spec
            )
        return out


def visible(num_queries: int, seq_len: int, num_slots: int, window: int | None) -> Tensor:
    """Which slots each query token sees: causal, aligned at the bottom right.

    Returns:
        (Q, K), bool; slots past `seq_len` are never seen.
    """
    positions = torch.arange(seq_len - num_queries, seq_len)[:, None]
    slots = torch.arange(num_slots)[None, :]
    mask = (slots <= positions) & (slots < seq_len)
    return mask if window is None else mask & (slots > positions - window)


def _attend_row(query: Tensor, keys: Tensor, values: Tensor, seq_len: int, spec: AttentionSpec) -> Tensor:
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    mask = visible(query.shape[0], seq_len, keys.shape[0], spec.window).to(query.device)
    # A product with zero does not remove a NaN: what nobody sees is taken out of V itself.
    values = values.to(wide).masked_fill(~mask.any(dim=0)[:, None, None], 0.0)
    group_size = query.shape[1] // keys.shape[1]
    out = torch.empty_like(query)
    for head in range(query.shape[1]):
        kv_head = head // group_size
        scores = query[:, head].to(wide) @ keys[:, kv_head].to(wide).T * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        probs = torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1)
        # A row without any visible slot has no softmax; the kernels give zero.
        probs = probs.masked_fill(~mask.any(dim=1, keepdim=True), 0.0)
        out[:, head] = (probs @ values[:, kv_head]).to(query.dtype)
    return out
