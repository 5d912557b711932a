"""Attention without a paged cache: one sequence, K and V in a row. The simplest thing that can be right."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.engine.attention.backend import AttentionSpec


class ContiguousAttention:
    """An `AttentionStep` for one sequence; use the same object for step after step of it."""

    def __init__(self) -> None:
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Append K and V.

        Args:
            key, value: (T, H_kv, D).
        """
        past = (self._keys[layer], self._values[layer]) if layer in self._keys else (key[:0], value[:0])
        self._keys[layer], self._values[layer] = torch.cat((past[0], key)), torch.cat((past[1], value))

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        """Causal attention, the last query token seeing everything.

        Args:
            query: (T, H_q, D).
        """
        group = query.shape[1] // self._keys[layer].shape[1]
        keys = self._keys[layer].repeat_interleave(group, dim=1)
        values = self._values[layer].repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * spec.scale
        num_queries, num_keys = scores.shape[1:]
        is_future = torch.ones(num_queries, num_keys, dtype=torch.bool).triu(num_keys - num_queries + 1)
        probs = scores.masked_fill(is_future, float("-inf")).float().softmax(-1).to(query.dtype)
        return torch.einsum("hqk,khd->qhd", probs, values)
