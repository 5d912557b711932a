"""The decoder over one flat token axis: only attention sees sequence borders (Orca, OSDI '22).

Letters: T tokens of the step, R rows whose logits are wanted, V vocabulary, H_q and H_kv heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.engine.attention.backend import AttentionSpec, AttentionStep
from headrace.engine.models.layers import Linear, RmsNorm, gated_silu, make_linear
from headrace.engine.models.rope import RotaryTable, rotate
from headrace.engine.models.spec import EMBEDDING, FINAL_NORM, HEAD, DecoderSpec


class WeightSource(Protocol):
    """Where a decoder takes its tensors from."""

    def read(self, name: str) -> Tensor:
        """The tensor of that name, in the type and on the device that it is computed with."""
        ...


class Decoder:
    """A decoder-only transformer that is ready to compute; weights are never changed."""

    def __init__(self, spec: DecoderSpec, weights: WeightSource, *, max_len: int) -> None:
        """Take every tensor of `spec.tensors()` from `weights` and lay it out for its device.

        Args:
            max_len: longest sequence, tokens; positions stay below it.
        """
        self._spec = spec
        self._embedding = weights.read(EMBEDDING)
        self._layers = [_DecoderLayer(spec, weights, layer) for layer in range(spec.num_layers)]
        self._final_norm = RmsNorm(weights.read(FINAL_NORM), spec.norm_eps)
        # A packed head keeps its own copy: the lookup below needs the embedding row by row.
        self._head = make_linear(self._embedding if spec.tied_head else weights.read(HEAD))
        self._rotary = RotaryTable(
            spec.rope, spec.head_dim, max_len, dtype=self._embedding.dtype, device=self._embedding.device
        )

    @property
    def spec(self) -> DecoderSpec:
        """What this decoder is."""
        return self._spec

    @property
    def dtype(self) -> torch.dtype:
        """Type of activations, and of K and V."""
        return self._embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._embedding.device

    @torch.inference_mode()
    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionStep, logits_rows: Tensor
    ) -> Tensor:
        """Compute one step: writes the K and V of all its tokens, gives logits for some.

        Args:
            input_ids: (T,), int64.
            positions: (T,), int64: each token's place in its own sequence.
            attention: this step's attention over the paged cache.
            logits_rows: (R,), int64: indices into the token axis.

        Returns:
            (R, V), fp32.
        """
        return self.logits(self.hidden(input_ids, positions, attention, logits_rows))

    @torch.inference_mode()
    def hidden(self, input_ids: Tensor, positions: Tensor, attention: AttentionStep, rows: Tensor) -> Tensor:
        """Compute one step as far as the head: whoever wants many rows' logits takes them in slices.

        Args:
            input_ids, positions, attention: see `forward`.
            rows: (R,), int64: indices into the token axis.

        Returns:
            (R, hidden size): what `logits` takes.
        """
        hidden = F.embedding(input_ids, self._embedding)
        rotary = self._rotary.rows(positions)
        for layer in self._layers[:-1]:
            hidden = layer.finish(hidden, layer.attend(hidden, rotary, attention))
        last = self._layers[-1]
        attended = last.attend(hidden, rotary, attention)
        # Past the last attention no token needs another: go on with the wanted rows alone.
        if rows.shape[0] == 0:
            return hidden[:0]
        hidden = last.finish(hidden.index_select(0, rows), attended.index_select(0, rows))
        return self._final_norm(hidden)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Go from `hidden`'s rows, all or some, to logits.

        Args:
            hidden: (R, hidden size).

        Returns:
            (R, V), fp32.
        """
        if hidden.shape[0] == 0:
            return torch.empty((0, self._spec.vocab_size), dtype=torch.float32, device=self.device)
        return self._head(hidden).float()


class _DecoderLayer:
    """Attention and MLP, each with a norm before it and a residual around it."""

    def __init__(self, spec: DecoderSpec, weights: WeightSource, index: int) -> None:
        prefix = f"model.layers.{index}"
        self._index = index
        self._num_heads, self._num_kv_heads, self._head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self._attention = AttentionSpec(scale=spec.head_dim**-0.5)
        self._attention_norm = RmsNorm(weights.read(f"{prefix}.input_layernorm.weight"), spec.norm_eps)
        self._mlp_norm = RmsNorm(weights.read(f"{prefix}.post_attention_layernorm.weight"), spec.norm_eps)
        attention = [f"{prefix}.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")]
        self._qkv = _fused_linear(weights, attention, spec.attention_bias)
        self._attention_out = _fused_linear(weights, [f"{prefix}.self_attn.o_proj"], spec.attention_bias)
        gate_up = [f"{prefix}.mlp.{name}" for name in ("gate_proj", "up_proj")]
        self._gate_up = _fused_linear(weights, gate_up, spec.mlp_bias)
        self._down = _fused_linear(weights, [f"{prefix}.mlp.down_proj"], spec.mlp_bias)

    def attend(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], attention: AttentionStep) -> Tensor:
        """Write K and V of the step's tokens and attend from them.

        Args:
            hidden: (T, hidden size).

        Returns:
            (T, H_q * D).
        """
        num_tokens = hidden.shape[0]
        num_rotated = self._num_heads + self._num_kv_heads
        qkv = self._qkv(self._attention_norm(hidden)).view(num_tokens, -1, self._head_dim)
        rotated = rotate(qkv[:, :num_rotated], *rotary)
        attention.write_kv(self._index, rotated[:, self._num_heads :], qkv[:, num_rotated:])
        attended = attention.attend(self._index, rotated[:, : self._num_heads], self._attention)
        return attended.reshape(num_tokens, -1)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Bring what attention found back into the residual stream, then add the MLP."""
        hidden = self._attention_out.add_to(hidden, attended)
        return self._down.add_to(hidden, gated_silu(self._gate_up(self._mlp_norm(hidden))))


def _fused_linear(weights: WeightSource, names: Sequence[str], has_bias: bool) -> Linear:
    """One linear for several projections of the same input, one after the other on the output axis."""
    weight = torch.cat([weights.read(f"{name}.weight") for name in names])
    bias = torch.cat([weights.read(f"{name}.bias") for name in names]) if has_bias else None
    return make_linear(weight, bias)
