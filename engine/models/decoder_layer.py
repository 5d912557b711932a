"""One layer of the decoder: attention and MLP, with the norms that its family has around them.

Letters: T tokens of the step, H_q and H_kv heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from headrace.engine.attention.backend import AttentionSpec, AttentionStep
from headrace.engine.models.layers import LayerNorm, Linear, Norm, RmsNorm, gated_silu, make_linear
from headrace.engine.models.mlp import (
    GATES,
    Experts,
    Gate,
    GatedMlp,
    GroupedExperts,
    MixtureOfExperts,
    Router,
    SeparateExperts,
)
from headrace.engine.models.rope import order_of_coordinates, rotate_given
from headrace.engine.models.spec import DecoderSpec, ExpertsSpec, HeadNorm, NormKind, NormSpec, layer_prefix
from headrace.engine.native.linear import NativeLinear
from headrace.engine.native.quantised import WeightKind
from headrace.engine.native.stack import PlainLayer

Rotary = Sequence[tuple[Tensor, Tensor]]
"""The factors for this step's tokens, one pair for every entry of `DecoderSpec.ropes`."""


class WeightSource(Protocol):
    """Where a decoder takes its tensors from."""

    def read(self, name: str) -> Tensor:
        """The tensor of that name, in the type and on the device that it is computed with."""
        ...


class DecoderLayer:
    """Attention and MLP, each added to the residual stream."""

    def __init__(self, spec: DecoderSpec, weights: WeightSource, index: int, weight_kind: WeightKind) -> None:
        """Take the layer's tensors and lay them out for their device."""
        self._index = index
        self._num_heads, self._num_kv_heads, self._head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self._residual_scale, self._is_parallel = spec.residual_scale, spec.is_parallel
        layer = spec.layers[index]
        self._rope = None if layer.rope is None else spec.ropes.index(layer.rope)
        self._attention = AttentionSpec(
            scale=spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale,
            window=layer.window,
            soft_cap=spec.attention_soft_cap,
        )
        reader = _LayerReader(spec, weights, index, weight_kind)
        names = spec.names
        self._before_attention = reader.norm(names.before_attention)
        self._after_attention = reader.norm(names.after_attention)
        self._before_mlp = reader.norm(names.before_mlp)
        self._after_mlp = reader.norm(names.after_mlp)
        self._qkv = reader.qkv()
        self._head_norms = reader.head_norms()
        self._attention_out = reader.linear((names.attention_out,), spec.attention_out_bias)
        self._mlp: Linear = reader.mlp() if layer.experts is None else reader.experts(layer.experts)

    def attend(self, hidden: Tensor, rotary: Rotary, attention: AttentionStep) -> Tensor:
        """Write K and V of the step's tokens and attend from them.

        Args:
            hidden: (T, hidden size).

        Returns:
            (T, H_q * D).
        """
        num_tokens = hidden.shape[0]
        num_compared = self._num_heads + self._num_kv_heads
        qkv = self._qkv(_normed(self._before_attention, hidden)).view(num_tokens, -1, self._head_dim)
        # Queries and keys side by side: what is done to both is done once.
        compared = qkv[:, :num_compared]
        if self._head_norms is not None:
            compared = self._head_norms(compared)
        if self._rope is not None:
            compared = rotate_given(compared, *rotary[self._rope])
        attention.write_kv(self._index, compared[:, self._num_heads :], qkv[:, num_compared:])
        attended = attention.attend(self._index, compared[:, : self._num_heads], self._attention)
        return attended.reshape(num_tokens, -1)

    def plain(self) -> PlainLayer | None:
        """This layer for a `NativeStack`; None if it has what a stack knows nothing of."""
        before, mlp_norm = self._before_attention, self._before_mlp
        if not isinstance(self._mlp, GatedMlp) or not isinstance(before, RmsNorm):
            return None
        gate_up, down, gate = self._mlp.parts
        has_more = self._is_parallel or self._residual_scale != 1.0 or self._head_norms is not None
        if has_more or self._after_attention or self._after_mlp or gate is not gated_silu:
            return None
        if not (
            isinstance(mlp_norm, RmsNorm)
            and isinstance(self._qkv, NativeLinear)
            and isinstance(self._attention_out, NativeLinear)
            and isinstance(gate_up, NativeLinear)
            and isinstance(down, NativeLinear)
        ):
            return None
        return PlainLayer(
            attention_gain=before.gain,
            attention_eps=before.eps,
            qkv=self._qkv,
            attention_out=self._attention_out,
            attention=self._attention,
            rotary=self._rope,
            mlp_gain=mlp_norm.gain,
            mlp_eps=mlp_norm.eps,
            gate_up=gate_up,
            down=down,
        )

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Bring what attention found back into the residual stream, then add the MLP."""
        if self._is_parallel:
            mlp_input = _normed(self._before_attention, hidden)
            hidden = self._added(hidden, self._attention_out, attended, self._after_attention)
        else:
            hidden = self._added(hidden, self._attention_out, attended, self._after_attention)
            mlp_input = _normed(self._before_mlp, hidden)
        return self._added(hidden, self._mlp, mlp_input, self._after_mlp)

    def _added(self, residual: Tensor, half: Linear, inputs: Tensor, norm: Norm | None) -> Tensor:
        if norm is None and self._residual_scale == 1.0:
            return half.add_to(residual, inputs)
        return torch.add(residual, _normed(norm, half(inputs)), alpha=self._residual_scale)


def make_norm(spec: NormSpec, weights: WeightSource, name: str) -> Norm:
    """Read a norm of the residual stream."""
    weight = weights.read(f"{name}.weight")
    bias = weights.read(f"{name}.bias") if spec.has_bias else None
    if spec.kind is NormKind.LAYER:
        return LayerNorm(weight + spec.offset if spec.offset else weight, bias, spec.eps)
    return RmsNorm(weight, spec.eps, spec.offset)


def _normed(norm: Norm | None, hidden: Tensor) -> Tensor:
    return hidden if norm is None else norm(hidden)


class _WholeNorms:
    """One norm over all query heads, another over all key heads."""

    def __init__(self, query: Norm, key: Norm, num_heads: int) -> None:
        self._query, self._key, self._num_heads = query, key, num_heads

    def __call__(self, hidden: Tensor) -> Tensor:
        """Normalise the queries and the keys of each token: (T, H_q + H_kv, D), and so the result."""
        query, key = hidden[:, : self._num_heads].flatten(1), hidden[:, self._num_heads :].flatten(1)
        return torch.cat((self._query(query), self._key(key)), dim=1).view(hidden.shape)


class _LayerReader:
    """Reads the parts of one layer as its family calls and keeps them."""

    def __init__(self, spec: DecoderSpec, weights: WeightSource, index: int, kind: WeightKind) -> None:
        self._spec, self._weights, self._kind = spec, weights, kind
        self._prefix = layer_prefix(index)
        rope = spec.layers[index].rope
        self._order = None if rope is None else order_of_coordinates(rope, spec.head_dim)

    def norm(self, name: str | None) -> Norm | None:
        return None if name is None else make_norm(self._spec.norm, self._weights, self._prefix + name)

    def linear(self, names: Sequence[str], has_bias: bool) -> Linear:
        """One linear for several projections of the same input, one after the other on the output axis."""
        bias = self._joined(names, "bias") if has_bias else None
        return make_linear(self._joined(names, "weight"), bias, self._kind)

    def qkv(self) -> Linear:
        names, has_bias = self._spec.names.qkv, self._spec.qkv_bias
        weight = self._in_order(self._joined(names, "weight"))
        bias = self._in_order(self._joined(names, "bias")) if has_bias else None
        return make_linear(weight, bias, self._kind)

    def head_norms(self) -> Norm | None:
        """What normalises (T, H_q + H_kv, D)."""
        spec = self._spec
        if spec.head_norm is HeadNorm.NONE:
            return None
        query, key = self._gains()
        if spec.head_norm is HeadNorm.WHOLE:
            return _WholeNorms(self._head_norm(query), self._head_norm(key), spec.num_heads)
        return self._head_norm(
            torch.cat((query.expand(spec.num_heads, -1), key.expand(spec.num_kv_heads, -1)))
        )

    def mlp(self) -> GatedMlp:
        names, has_bias = self._spec.names, self._spec.mlp_bias
        gate_up = self.linear(names.gate_up, has_bias)
        return GatedMlp(gate_up, self.linear((names.down,), has_bias), GATES[self._spec.activation])

    def experts(self, experts: ExpertsSpec) -> MixtureOfExperts:
        names, gate = self._spec.names, GATES[self._spec.activation]
        router = self._weights.read(f"{self._prefix}{names.router}.weight")

        def each() -> Iterator[tuple[Tensor, Tensor]]:
            for expert in range(experts.count):
                gate_up = self._joined([name.format(expert) for name in names.expert_gate_up], "weight")
                yield gate_up, self._joined((names.expert_down.format(expert),), "weight")

        mlps: Experts
        if router.is_cuda:
            mlps = self._grouped(experts, each(), router, gate)
        else:
            mlps = SeparateExperts(
                [
                    GatedMlp(make_linear(up, None, self._kind), make_linear(down, None, self._kind), gate)
                    for up, down in each()
                ]
            )
        return MixtureOfExperts(experts, Router(experts, router), mlps)

    def _grouped(
        self, experts: ExpertsSpec, each: Iterator[tuple[Tensor, Tensor]], like: Tensor, gate: Gate
    ) -> GroupedExperts:
        """All experts' weights in two tensors of the type and device of `like`, never twice in memory."""
        count, inner, hidden = experts.count, experts.intermediate_size, self._spec.hidden_size
        gate_ups, downs = like.new_empty(count, 2 * inner, hidden), like.new_empty(count, hidden, inner)
        for expert, (gate_up, down) in enumerate(each):
            gate_ups[expert], downs[expert] = gate_up, down
        return GroupedExperts(gate_ups, downs, gate)

    def _head_norm(self, gain: Tensor) -> Norm:
        norm = self._spec.norm
        if norm.kind is NormKind.LAYER:
            return LayerNorm(gain, None, norm.eps)
        return RmsNorm(gain, norm.eps, norm.offset)

    def _gains(self) -> list[Tensor]:
        """Of queries and of keys: (1, D), (heads, D) or, over all heads, (heads * D,)."""
        spec = self._spec
        gains = []
        for norm, num_heads in (
            (spec.names.query_norm, spec.num_heads),
            (spec.names.key_norm, spec.num_kv_heads),
        ):
            parts = [
                self._weights.read(self._prefix + name) for name in spec.head_gain_names(norm, num_heads)
            ]
            if spec.head_norm is HeadNorm.WHOLE:
                gains.append(self._in_order(parts[0]))
            else:
                gain = torch.stack(parts)
                gains.append(gain if self._order is None else gain[:, self._order.to(gain.device)])
        return gains

    def _joined(self, names: Sequence[str], suffix: str) -> Tensor:
        parts = [self._weights.read(f"{self._prefix}{name}.{suffix}") for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _in_order(self, rows: Tensor) -> Tensor:
        """Put each query and key head's rows where `rotate` wants them; values, if there are any, stay."""
        if self._order is None:
            return rows
        heads = rows.view(-1, self._spec.head_dim, *rows.shape[1:]).clone()
        compared = heads[: self._spec.num_heads + self._spec.num_kv_heads]
        compared.copy_(compared[:, self._order.to(rows.device)])
        return heads.view(rows.shape)
