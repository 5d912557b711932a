"""Token-wise layers: linear, RMSNorm, gated MLP activation. None of them knows where a sequence begins.

Letters: T tokens, K inputs, N outputs of a layer.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.engine.native.kit import native_kit
from headrace.engine.native.quantised import KEPT_KINDS, WeightKind, quantise

_log = logging.getLogger(__name__)

# The operators that torch's own compiler packs weights with: undocumented, so `can_prepack` tries them.
_ONEDNN = torch.ops.mkldnn
# oneDNN lays weights out for about this many rows; any number of rows works.
_PACKING_ROWS_HINT = 16


class Linear(Protocol):
    """``x @ weight.T + bias`` with the weight laid out as the device likes it."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """Apply the layer.

        Args:
            inputs: (T, K).

        Returns:
            (T, N), dtype of the weight.
        """
        ...

    def add_to(self, residual: Tensor, inputs: Tensor) -> Tensor:
        """Apply the layer and add what came before it; `residual` is left alone.

        Args:
            residual: (T, N).
            inputs: (T, K).

        Returns:
            (T, N).
        """
        ...


class WideLinear(Linear, Protocol):
    """A linear layer whose sums can be had as they are."""

    def wide(self, inputs: Tensor) -> Tensor:
        """Apply the layer.

        Args:
            inputs: (T, K).

        Returns:
            (T, N), fp32; not rounded to the weight's type where the layer can do without.
        """
        ...


def make_linear(weight: Tensor, bias: Tensor | None = None, kind: WeightKind = WeightKind.SAME) -> WideLinear:
    """Lay a weight out for its device. A packed layer keeps a copy: the caller drops its own reference.

    Args:
        weight: (N, K), on the device and in the type that it is computed with.
        bias: (N,), the same.
        kind: how the weight is kept; what is quantised is computed by the compiled kernels alone. The kept
            kinds take for each weight the fewest bits that hold it exactly, if any do; where all are
            stored in bf16 no room is taken for more than that.
    """
    kit = native_kit()
    if kit is not None and kind in KEPT_KINDS and kit.linears.can_keep(weight):
        return kit.linears.make_kept(weight, bias, takes_more_room=kind is not WeightKind.KEPT_BF16)
    if kit is not None and kind in (WeightKind.INT8, WeightKind.INT4):
        return kit.linears.make_quantised(quantise(weight, kind), weight.dtype, bias)
    if kit is not None and kit.linears.suits(weight):
        return kit.linears.make(weight, bias)
    if weight.device.type == "cpu" and can_prepack(weight.dtype):
        return PrepackedLinear(weight, bias)
    return DenseLinear(weight, bias)


def is_packed(dtype: torch.dtype, device: torch.device, kind: WeightKind) -> bool:
    """Whether `make_linear` would lay such weights out anew: who needs them as they were has them twice."""
    kit = native_kit()
    if kit is not None and (
        kind in (WeightKind.INT8, WeightKind.INT4)
        or kit.linears.suits(torch.empty((1, 2), dtype=dtype, device=device))
    ):
        return True
    return device.type == "cpu" and can_prepack(dtype)


class DenseLinear:
    """The weight as it is stored."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, inputs: Tensor) -> Tensor:
        """See `Linear`."""
        return F.linear(inputs, self._weight, self._bias)

    def add_to(self, residual: Tensor, inputs: Tensor) -> Tensor:
        """See `Linear`."""
        return F.linear(inputs, self._weight, self._bias).add_(residual)

    def wide(self, inputs: Tensor) -> Tensor:
        """See `WideLinear`."""
        return self(inputs).float()


class PrepackedLinear:
    """The weight reordered once into oneDNN's blocked layout, which `F.linear` would redo at every call."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight: Tensor = _ONEDNN._reorder_linear_weight(  # noqa: SLF001
            weight.contiguous(), _PACKING_ROWS_HINT
        )
        self._bias = bias

    def __call__(self, inputs: Tensor) -> Tensor:
        """See `Linear`."""
        outputs: Tensor = _ONEDNN._linear_pointwise(inputs, self._weight, self._bias, "none", [], "")  # noqa: SLF001
        return outputs

    def add_to(self, residual: Tensor, inputs: Tensor) -> Tensor:
        """See `Linear`; the addition is part of the matrix product's last pass."""
        outputs: Tensor = _ONEDNN._linear_pointwise.binary(  # noqa: SLF001
            inputs, residual, self._weight, self._bias, "add"
        )
        return outputs

    def wide(self, inputs: Tensor) -> Tensor:
        """See `WideLinear`."""
        return self(inputs).float()


@cache
def can_prepack(dtype: torch.dtype) -> bool:
    """Whether this build and processor multiply with packed weights of `dtype`, tried on a small product."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    weight = (torch.arange(48 * 32, dtype=torch.float32).view(48, 32) % 7 - 3).to(dtype)
    inputs = (torch.arange(5 * 32, dtype=torch.float32).view(5, 32) % 5 - 2).to(dtype)
    bias = torch.arange(48, dtype=torch.float32).to(dtype)
    residual = torch.ones(5, 48, dtype=dtype)
    try:
        packed = PrepackedLinear(weight, bias)
        plain, added = packed(inputs), packed.add_to(residual, inputs)
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        _log.warning("weights are not prepacked, so linear layers run slower: %s", error)
        return False
    expected = F.linear(inputs, weight, bias)
    return bool(torch.allclose(plain, expected)) and bool(torch.allclose(added, expected + residual))


class Norm(Protocol):
    """Normalises vectors on the last axis, in fp32 whatever the model's type is."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Normalise each token, or each head of it.

        Args:
            hidden: (T, K), or (T, H, K) where every head is normalised by itself.

        Returns:
            The same shape and dtype.
        """
        ...


class RmsNorm:
    """Root-mean-square norm (arXiv 1910.07467)."""

    def __init__(self, weight: Tensor, eps: float, offset: float = 0.0) -> None:
        """Keep the gain.

        Args:
            weight: (K,), or (H, K) for heads with gains of their own.
            eps: added to the mean square.
            offset: the gain is `weight` and this.
        """
        self._weight = weight.float() + offset
        self._eps = eps
        self._mean_factor = 1.0 / weight.shape[-1]
        # What was stored in a narrow type is a gain in that type; a sum with the offset is not.
        self._has_narrow_gain = weight.dim() == 1 and offset == 0.0
        self._kit = native_kit() if weight.dim() == 1 and weight.device.type == "cpu" else None

    @property
    def gain(self) -> Tensor:
        """What a normalised vector is multiplied with, in fp32."""
        return self._weight

    @property
    def eps(self) -> float:
        """What is added to the mean square."""
        return self._eps

    def __call__(self, hidden: Tensor) -> Tensor:
        """See `Norm`."""
        if self._kit is not None and hidden.dim() == 2 and self._kit.token_ops.takes(hidden):
            return self._kit.token_ops.rms_norm(hidden, self._weight, self._eps)
        if hidden.is_cuda and self._has_narrow_gain:
            weight = self._weight.to(hidden.dtype)
            normed: Tensor = F.rms_norm(hidden, weight.shape, weight, self._eps)
            return normed
        # One pass for the norm, then products in place: much faster on a CPU than torch's own composite.
        wide = hidden.float()
        scale: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale.square_().mul_(self._mean_factor).add_(self._eps).rsqrt_()
        return (wide * scale).mul_(self._weight).to(hidden.dtype)


class LayerNorm:
    """Mean and variance norm (arXiv 1607.06450)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        """Keep gain and bias.

        Args:
            weight: (K,), or (H, K) for heads with gains of their own.
            bias: (K,) or None.
            eps: added to the variance.
        """
        self._weight = weight.float()
        self._bias = None if bias is None else bias.float()
        self._eps = eps

    def __call__(self, hidden: Tensor) -> Tensor:
        """See `Norm`."""
        normed = F.layer_norm(hidden.float(), self._weight.shape[-1:], eps=self._eps).mul_(self._weight)
        if self._bias is not None:
            normed.add_(self._bias)
        return normed.to(hidden.dtype)


def gated_silu(gate_up: Tensor) -> Tensor:
    """SwiGLU's product (arXiv 2002.05202).

    Args:
        gate_up: (T, 2 * N): the gate's half, then the other.

    Returns:
        (T, N): ``silu(gate) * up``.
    """
    kit = native_kit()
    if kit is not None and kit.token_ops.takes(gate_up):
        return kit.token_ops.gated_silu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gated_gelu(gate_up: Tensor, *, tanh: bool) -> Tensor:
    """GEGLU's product (arXiv 2002.05202).

    Args:
        gate_up: (T, 2 * N): the gate's half, then the other.
        tanh: whether GELU is taken by its approximation.

    Returns:
        (T, N): ``gelu(gate) * up``.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh" if tanh else "none").mul_(up)


def soft_capped(values: Tensor, cap: float) -> Tensor:
    """Bend values into (-cap, cap), in place: small ones hardly change (Gemma 2, arXiv 2408.00118)."""
    return values.div_(cap).tanh_().mul_(cap)
