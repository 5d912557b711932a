"""Token-wise operations in one pass each: norm, rotation, gate, choice of the greatest logit.

Letters: T tokens, K width, H heads, D head width, R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headrace.engine.native.library import DTYPE_CODES, NativeLibrary


class NativeTokenOps:
    """The operations over one library, on the CPU, for fp32 and bf16. Threads are torch's own."""

    def __init__(self, library: NativeLibrary) -> None:
        functions = library.functions
        self._kernels = library.kernels
        self._rms_norm = functions.headrace_rms_norm
        self._gated_silu = functions.headrace_gated_silu
        self._rotate = functions.headrace_rotate
        self._argmax = functions.headrace_argmax
        self._greedy = functions.headrace_greedy

    def rms_norm(self, hidden: Tensor, gain: Tensor, eps: float) -> Tensor:
        """Normalise each token (arXiv 1910.07467).

        Args:
            hidden: (T, K), last axis contiguous.
            gain: (K,), fp32, contiguous.

        Returns:
            (T, K), dtype of `hidden`.
        """
        num_tokens, width = hidden.shape
        if gain.dtype is not torch.float32 or gain.shape[0] != width or not gain.is_contiguous():
            raise ValueError(f"gain must be contiguous fp32 of width {width}, not {_say(gain)}")
        out = torch.empty((num_tokens, width), dtype=hidden.dtype)
        self._rms_norm(
            self._kernels,
            _code(hidden),
            hidden.data_ptr(),
            hidden.stride(0),
            gain.data_ptr(),
            eps,
            out.data_ptr(),
            num_tokens,
            width,
            torch.get_num_threads(),
        )
        return out

    def gated_silu(self, gate_up: Tensor) -> Tensor:
        """SwiGLU's product (arXiv 2002.05202).

        Args:
            gate_up: (T, 2 * K): the gate's half, then the other; last axis contiguous.

        Returns:
            (T, K): ``silu(gate) * up``.
        """
        num_tokens, double_width = gate_up.shape
        width = double_width // 2
        out = torch.empty((num_tokens, width), dtype=gate_up.dtype)
        self._gated_silu(
            self._kernels,
            _code(gate_up),
            gate_up.data_ptr(),
            gate_up.stride(0),
            out.data_ptr(),
            num_tokens,
            width,
            torch.get_num_threads(),
        )
        return out

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor is of a type, in a place and in a layout that the kernels know."""
        return tensor.dtype in DTYPE_CODES and tensor.device.type == "cpu" and tensor.stride(-1) == 1

    def rotate_(self, heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Turn each head by its token's position, in place; the two halves of the head are the coordinates.

        Args:
            heads: (T, H, D), the heads of a token side by side.
            cosine, sine: (T, 1, 2, D / 2), dtype of `heads`, last axis contiguous: what the two halves are
                multiplied with, themselves and swapped. Of the sine's, the second half is read.

        Returns:
            `heads`.
        """
        num_tokens, num_heads, head_dim = heads.shape
        if (heads.stride(1) != head_dim and num_heads != 1) or not heads.dtype == cosine.dtype == sine.dtype:
            raise ValueError(
                "heads of a token must lie side by side, in the type of the factors: "
                f"{_say(heads)}, {_say(cosine)}"
            )
        if not (num_tokens, 1, 2, head_dim // 2) == cosine.shape == sine.shape:
            raise ValueError(f"factors must be (T, 1, 2, D / 2), not {_say(cosine)} and {_say(sine)}")
        if cosine.stride(3) * sine.stride(3) != 1:
            raise ValueError(f"factors must have contiguous rows, not {_say(cosine)} and {_say(sine)}")
        self._rotate(
            self._kernels,
            _code(heads),
            heads.data_ptr(),
            heads.stride(0),
            cosine.data_ptr(),
            cosine.stride(0),
            sine.data_ptr() + sine.stride(2) * sine.dtype.itemsize,
            sine.stride(0),
            num_tokens,
            num_heads,
            head_dim,
            torch.get_num_threads(),
        )
        return heads

    def argmax(self, logits: Tensor) -> Tensor:
        """Greatest of each row, the lowest index where several are. A NaN counts as the greatest.

        Args:
            logits: (R, V), V at least 1, last axis contiguous.

        Returns:
            (R,), int64.
        """
        return self._told(self._argmax, logits, torch.empty((logits.shape[0],), dtype=torch.int64))

    def greedy(self, logits: Tensor) -> Tensor:
        """Greatest of each row as numbers for the host: `argmax`, and whether what stands there is finite.

        Args:
            logits: (R, V), V at least 1, last axis contiguous.

        Returns:
            (R, 3), fp64: the index, then twice 1 or 0.
        """
        return self._told(self._greedy, logits, torch.empty((logits.shape[0], 3), dtype=torch.float64))

    def _told(self, kernel: Callable[..., None], logits: Tensor, out: Tensor) -> Tensor:
        """`out`, with what a kernel tells of each row."""
        num_rows, width = logits.shape
        kernel(
            self._kernels,
            _code(logits),
            logits.data_ptr(),
            logits.stride(0),
            num_rows,
            width,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


def _code(tensor: Tensor) -> int:
    """The kernels' name of a tensor's type, its place and layout checked."""
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None or tensor.is_cuda or tensor.stride(-1) != 1:
        raise ValueError(
            f"the kernels take fp32 or bf16 on the CPU, last axis contiguous, not {_say(tensor)}"
        )
    return code


def _say(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {tuple(tensor.shape)} strides {tensor.stride()} on {tensor.device}"
