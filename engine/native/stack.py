"""All layers of a plain decoder in one call: between two of them no Python runs.

Letters: T tokens of the step, R rows that are wanted, K width of the residual stream, D head width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from headrace.engine.attention.backend import AttentionSpec, AttentionStep
from headrace.engine.native.backend import NativeCpuStep
from headrace.engine.native.library import DTYPE_CODES, NativeLibrary
from headrace.engine.native.linear import NativeLinear


@dataclass(frozen=True, slots=True)
class PlainLayer:
    """Norm, attention, norm, MLP gated by SiLU, each half added to what came in.

    Args:
        attention_gain, mlp_gain: (K,), fp32: of the two norms.
        rotary: which of the step's factors turn its heads; None turns none.
    """

    attention_gain: Tensor
    attention_eps: float
    qkv: NativeLinear
    attention_out: NativeLinear
    attention: AttentionSpec
    rotary: int | None
    mlp_gain: Tensor
    mlp_eps: float
    gate_up: NativeLinear
    down: NativeLinear


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of every layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class NativeStack:
    """All layers of a model, from the embedding to the final norm, both excluded."""

    def __init__(self, library: NativeLibrary, layers: Sequence[PlainLayer], heads: HeadShape) -> None:
        """Lay the layers out for the library.

        Args:
            layers: at least one, of equal shapes and type.

        Raises:
            ValueError: the layers' shapes don't belong together.
        """
        # The library holds addresses, not references.
        self._layers = tuple(layers)
        self._heads = heads
        first = self._layers[0]
        self._dtype = first.qkv.dtype
        width, inner_width = first.qkv.shape[1], first.down.shape[1]
        query_width = heads.num_heads * heads.head_dim
        expected = (
            (query_width + 2 * heads.num_kv_heads * heads.head_dim, width),
            (width, query_width),
            (2 * inner_width, width),
            (width, inner_width),
        )
        for layer in self._layers:
            linears = (layer.qkv, layer.attention_out, layer.gate_up, layer.down)
            gains = (layer.attention_gain, layer.mlp_gain)
            if tuple(linear.shape for linear in linears) != expected or any(
                linear.dtype is not self._dtype for linear in linears
            ):
                raise ValueError(f"the layers of a stack must be {self._dtype}, of shapes {expected}")
            if any(
                gain.dtype is not torch.float32 or gain.shape != (width,) or not gain.is_contiguous()
                for gain in gains
            ):
                raise ValueError(f"the gains of a stack must be fp32 of width {width}")
        self._kernels = library.kernels
        self._run = library.functions.headrace_stack_run
        self._stack = _Stack(
            DTYPE_CODES[self._dtype],
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            width,
            inner_width,
            len(self._layers),
            torch.get_num_threads(),
        )
        self._native_layers = (_Layer * len(self._layers))(*map(_native_layer, self._layers))

    def takes(self, attention: AttentionStep) -> TypeGuard[NativeCpuStep]:
        """Whether the step's attention is the library's own, over a cache of this type and shape."""
        if not isinstance(attention, NativeCpuStep):
            return False
        shape = attention.cache_shape
        return (shape.num_kv_heads, shape.head_dim, shape.dtype) == (
            self._heads.num_kv_heads,
            self._heads.head_dim,
            self._dtype,
        )

    def run(
        self,
        hidden: Tensor,
        rotary: Sequence[tuple[Tensor, Tensor]],
        attention: NativeCpuStep,
        rows: Tensor,
    ) -> Tensor:
        """Send the step's tokens through all layers; past the last attention, the wanted rows alone.

        Args:
            hidden: (T, K), contiguous, type of the weights. Its content is lost.
            rotary: cosine and sine, (T, 1, 2, D / 2) each, as `NativeTokenOps.rotate_` takes them.
            attention: one that `takes` approves of.
            rows: (R,), int64, contiguous, each below T: tokens that are wanted.

        Returns:
            (R, K).
        """
        if (
            hidden.dtype is not self._dtype
            or not hidden.is_contiguous()
            or hidden.shape[1] != self._stack.width
        ):
            raise ValueError(
                f"hidden must be contiguous {self._dtype} of width {self._stack.width}, "
                f"not {hidden.dtype} {tuple(hidden.shape)}"
            )
        if rows.dtype is not torch.int64 or not rows.is_contiguous():
            raise ValueError(f"rows must be contiguous int64, not {rows.dtype}")
        out = torch.empty((rows.shape[0], hidden.shape[1]), dtype=hidden.dtype)
        factors = (_Rotary * len(rotary))(*(self._factors(hidden.shape[0], *pair) for pair in rotary))
        self._run(
            self._kernels,
            attention.open_handle(hidden.shape[0]),
            ctypes.addressof(self._stack),
            ctypes.addressof(self._native_layers),
            ctypes.addressof(factors),
            hidden.data_ptr(),
            hidden.shape[0],
            rows.data_ptr(),
            rows.shape[0],
            out.data_ptr(),
        )
        return out

    def _factors(self, num_tokens: int, cosine: Tensor, sine: Tensor) -> _Rotary:
        shape = (num_tokens, 1, 2, self._heads.head_dim // 2)
        if not cosine.shape == sine.shape == shape or not cosine.dtype == sine.dtype == self._dtype:
            raise ValueError(
                f"factors must be {self._dtype} {shape}, not {cosine.dtype} {tuple(cosine.shape)}"
            )
        if cosine.stride() != sine.stride() or cosine.stride(3) != 1:
            raise ValueError(f"factors must have contiguous rows, not strides {cosine.stride()}")
        second_half = sine.data_ptr() + sine.stride(2) * sine.dtype.itemsize
        return _Rotary(cosine.data_ptr(), second_half, cosine.stride(0))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("attention_gain", "qkv", "qkv_bias", "attention_out")),
        *((name, c_void_p) for name in ("attention_out_bias", "mlp_gain", "gate_up", "gate_up_bias")),
        *((name, c_void_p) for name in ("down", "down_bias")),
        *((name, c_float) for name in ("attention_eps", "mlp_eps", "scale", "soft_cap")),
        *((name, c_int32) for name in ("window", "rotary")),
        *((name, c_int32) for name in ("qkv_kind", "attention_out_kind", "gate_up_kind", "down_kind")),
    )


class _Stack(ctypes.Structure):
    width: int

    _fields_ = (
        *((name, c_int32) for name in ("dtype", "num_heads", "num_kv_heads", "head_dim")),
        *((name, c_int64) for name in ("width", "inner_width")),
        *((name, c_int32) for name in ("num_layers", "num_threads")),
    )


class _Rotary(ctypes.Structure):
    _fields_ = (("cosine", c_void_p), ("sine", c_void_p), ("stride", c_int64))


def _native_layer(layer: PlainLayer) -> _Layer:
    return _Layer(
        layer.attention_gain.data_ptr(),
        *layer.qkv.places,
        *layer.attention_out.places,
        layer.mlp_gain.data_ptr(),
        *layer.gate_up.places,
        *layer.down.places,
        layer.attention_eps,
        layer.mlp_eps,
        layer.attention.scale,
        layer.attention.soft_cap or 0.0,
        layer.attention.window or 0,
        -1 if layer.rotary is None else layer.rotary,
        *(linear.kind.value for linear in (layer.qkv, layer.attention_out, layer.gate_up, layer.down)),
    )
