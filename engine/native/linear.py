"""Linear layers whose weights are packed for the compiled kernels.

A row's outputs are the same to the bit whatever rows it is computed with, unlike those of the usual
libraries, which sum in another order for another number of rows.

Letters: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import logging
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.engine.native.library import DTYPE_CODES, NativeLibrary
from headrace.engine.native.quantised import (
    GROUP_SIZE,
    WITH_NUMBERS,
    QuantisedWeight,
    WeightKind,
    likely_scales,
)

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 64 * 2**20
_LINE_BYTES = 64


class NativeLinears:
    """Makes linear layers over one library; their weights lie in few large pages, which read faster."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def suits(self, weight: Tensor) -> bool:
        """Whether the kernels take such a weight, and this processor has what makes them worth it.

        Args:
            weight: (N, K).
        """
        code = DTYPE_CODES.get(weight.dtype)
        variant = self._library.variant
        is_fast = variant in ("avx512bf16", "avx2") or (variant == "avx512" and weight.dtype is torch.float32)
        return code is not None and is_fast and weight.shape[1] % 2 == 0 and weight.device.type == "cpu"

    def suits_kept(self) -> bool:
        """Whether the kernels compute in fp32 with weights that are read in fewer bits."""
        return self._library.variant == "avx2"

    def can_keep(self, weight: Tensor) -> bool:
        """Whether `make_kept` takes such a weight.

        Args:
            weight: (N, K).
        """
        return self.suits_kept() and weight.dtype is torch.float32 and self.suits(weight)

    def suits_quantised(self) -> bool:
        """Whether this processor multiplies whole numbers fast enough to make quantised weights worth it."""
        return self._library.variant != "generic"

    def make_quantised(
        self, weight: QuantisedWeight, dtype: torch.dtype, bias: Tensor | None = None
    ) -> NativeLinear:
        """Pack a quantised weight. Inputs are quantised at each call, to eight bits in groups of 32.

        Args:
            weight: (N, K).
            dtype: type of inputs and outputs: fp32 or bf16.
            bias: (N,), the same type.

        Raises:
            ValueError: the kernels don't take such a type.
        """
        if dtype not in DTYPE_CODES:
            raise ValueError(f"the kernels take fp32 or bf16 inputs, not {dtype}")
        shape = (weight.scales.shape[0], weight.width)
        _check_bias(bias, dtype, shape[0])
        packed = self._take(self._num_bytes(weight))
        self._pack_numbers(weight, packed)
        return NativeLinear(self._library, PackedWeight(packed, shape, dtype, weight.kind), bias)

    def make_kept(
        self, weight: Tensor, bias: Tensor | None = None, *, takes_more_room: bool = True
    ) -> NativeLinear:
        """Pack a weight that fewer bits may hold exactly: in bf16 alone, or with the whole numbers that it
        was restored from beside it; as `make` does where neither holds it. What comes out is what `make`
        gives, to the bit.

        Args:
            weight: (N, K), fp32 on the CPU; K even.
            bias: (N,), fp32.
            takes_more_room: whether whole numbers may lie beside the weight.

        Raises:
            ValueError: the kernels don't take such a weight.
        """
        if not self.can_keep(weight):
            raise ValueError(
                f"the kernels for {self._library.variant} keep no {weight.dtype} weights of width "
                f"{weight.shape[1]} in fewer bits"
            )
        _check_bias(bias, weight.dtype, weight.shape[0])
        held = self.hold_exactly(weight) if takes_more_room else None
        if held is not None:
            packed = self._pack(weight, held)
            kept = PackedWeight(packed.memory, packed.shape, torch.float32, WITH_NUMBERS[held.kind])
        elif _is_exact_in_bf16(weight):
            packed = self._pack(weight.bfloat16())
            kept = PackedWeight(packed.memory, packed.shape, torch.float32, WeightKind.KEPT_BF16)
        else:
            kept = self._pack(weight)
        return NativeLinear(self._library, kept, bias)

    def hold_exactly(self, weight: Tensor) -> QuantisedWeight | None:
        """Find the whole numbers that a weight was restored from, as those of many GGUF files are.

        Args:
            weight: (N, K), fp32 on the CPU, finite.

        Returns:
            Of four bits or, if they don't do, eight; None where neither gives each number of `weight` back.
        """
        if weight.shape[1] % GROUP_SIZE:
            return None
        groups = weight.contiguous().view(weight.shape[0], -1, GROUP_SIZE)
        numbers = torch.empty(groups.shape, dtype=torch.uint8)
        chosen = torch.empty(groups.shape[:2], dtype=torch.uint8)
        for kind in WITH_NUMBERS:
            scales, least = likely_scales(groups, kind)
            is_found = self._library.functions.headrace_find_numbers(
                kind.value,
                groups.data_ptr(),
                scales.data_ptr(),
                least.data_ptr(),
                scales.shape[0],
                chosen.numel(),
                numbers.data_ptr(),
                chosen.data_ptr(),
                torch.get_num_threads(),
            )
            if is_found:
                index = chosen.long()[None]
                parts = (choices.gather(0, index)[0].half() for choices in (scales, least))
                return QuantisedWeight(kind, weight.shape[1], numbers, *parts)
        return None

    def _num_bytes(self, numbers: QuantisedWeight) -> int:
        num_outputs = numbers.scales.shape[0]
        bytes_of = self._library.functions.headrace_packed_quantised_bytes
        num_bytes: int = bytes_of(numbers.kind.value, num_outputs, numbers.width)
        return num_bytes

    def _pack_numbers(self, weight: QuantisedWeight, packed: Tensor) -> None:
        num_outputs, num_groups = weight.scales.shape
        numbers, scales, least = (part.contiguous() for part in (weight.numbers, weight.scales, weight.least))
        self._library.functions.headrace_pack_quantised(
            weight.kind.value,
            numbers.data_ptr(),
            scales.data_ptr(),
            least.data_ptr(),
            num_outputs,
            num_groups,
            packed.data_ptr(),
            torch.get_num_threads(),
        )

    def make(self, weight: Tensor, bias: Tensor | None = None) -> NativeLinear:
        """Pack a copy of a weight: the caller drops his own.

        Args:
            weight: (N, K), fp32 or bf16 on the CPU; K even.
            bias: (N,), the same type.

        Raises:
            ValueError: the kernels don't take such a weight.
        """
        _check_bias(bias, weight.dtype, weight.shape[0])
        return NativeLinear(self._library, self._pack(weight), bias)

    def _pack(self, weight: Tensor, numbers: QuantisedWeight | None = None) -> PackedWeight:
        """`numbers` are packed behind the weight."""
        functions, kernels = self._library.functions, self._library.kernels
        num_outputs, width = weight.shape
        code = DTYPE_CODES.get(weight.dtype)
        can_multiply = code is not None and functions.headrace_can_multiply(kernels, code)
        if not can_multiply or weight.is_cuda or width % 2:
            raise ValueError(
                f"the kernels for {self._library.variant} take no {weight.dtype} weights of width {width}"
            )
        num_bytes = functions.headrace_packed_bytes(code, num_outputs, width)
        packed = self._take(num_bytes + (0 if numbers is None else self._num_bytes(numbers)))
        if numbers is not None:
            self._pack_numbers(numbers, packed[num_bytes:])
        source = weight.contiguous()
        functions.headrace_pack(
            code, source.data_ptr(), num_outputs, width, packed.data_ptr(), torch.get_num_threads()
        )
        return PackedWeight(packed, (num_outputs, width), weight.dtype)

    def _take(self, num_bytes: int) -> Tensor:
        """Memory that begins with a cache line, so that no vector of the weights lies in two."""
        padded = -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        if self._chunk.shape[0] < padded:
            self._chunk = _large_pages(max(padded, _CHUNK_BYTES))
        taken, self._chunk = self._chunk[:num_bytes], self._chunk[padded:]
        return taken


def _check_bias(bias: Tensor | None, dtype: torch.dtype, num_outputs: int) -> None:
    if bias is not None and (bias.dtype is not dtype or bias.shape != (num_outputs,)):
        raise ValueError(f"the bias must be {dtype} of {num_outputs}, not {bias.dtype} {bias.shape}")


def _is_exact_in_bf16(weight: Tensor) -> bool:
    # Most weights that it doesn't hold show it in their first rows.
    return not any(
        bool((rows.view(torch.int32) & 0xFFFF).any()) for rows in torch.split(weight.contiguous(), 256)
    )


def _large_pages(num_bytes: int) -> Tensor:
    # Private: shared memory has large pages only where an administrator allows them.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            _log.debug("this kernel gives no large pages: %s", error)
    return torch.frombuffer(memory, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight as the kernels read it.

    Args:
        memory: the bytes.
        shape: (N, K).
        dtype: type of inputs and outputs.
        kind: how the numbers are kept.
    """

    memory: Tensor
    shape: tuple[int, int]
    dtype: torch.dtype
    kind: WeightKind = WeightKind.SAME


class NativeLinear:
    """``x @ weight.T + bias``; made by `NativeLinears`."""

    def __init__(self, library: NativeLibrary, weight: PackedWeight, bias: Tensor | None) -> None:
        self._kernels, self._code, self._dtype = library.kernels, DTYPE_CODES[weight.dtype], weight.dtype
        self._shape, self._kind = weight.shape, weight.kind
        self._num_outputs, self._width = weight.shape
        self._num_threads = torch.get_num_threads()
        self._multiply = library.functions.headrace_multiply
        self._packed, self._packed_place = weight.memory, weight.memory.data_ptr()
        self._bias = None if bias is None else bias.contiguous()
        self._bias_place = None if self._bias is None else self._bias.data_ptr()

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        """Type of inputs and outputs; that of the weight too, unless it is quantised."""
        return self._dtype

    @property
    def kind(self) -> WeightKind:
        """How the weight is kept."""
        return self._kind

    @property
    def places(self) -> tuple[int, int | None]:
        """Addresses of the packed weight and of the bias; good as long as the layer lives."""
        return self._packed_place, self._bias_place

    def __call__(self, inputs: Tensor) -> Tensor:
        """Apply the layer.

        Args:
            inputs: (M, K), `dtype`, last axis contiguous.

        Returns:
            (M, N), `dtype`.
        """
        out = torch.empty((inputs.shape[0], self._num_outputs), dtype=self._dtype)
        self._run(inputs, None, out)
        return out

    def add_to(self, residual: Tensor, inputs: Tensor) -> Tensor:
        """Apply the layer and add what came before it; `residual` is left alone.

        Args:
            residual: (M, N), `dtype`, last axis contiguous.
            inputs: (M, K).

        Returns:
            (M, N).
        """
        if residual.dtype is not self._dtype or residual.stride(1) != 1:
            raise ValueError(f"the residual must be {self._dtype}, rows contiguous, not {residual.dtype}")
        out = torch.empty((inputs.shape[0], self._num_outputs), dtype=self._dtype)
        if residual.shape != out.shape:
            raise ValueError(f"the residual must be {tuple(out.shape)}, not {tuple(residual.shape)}")
        self._run(inputs, residual, out)
        return out

    def wide(self, inputs: Tensor) -> Tensor:
        """Apply the layer without rounding its sums.

        Returns:
            (M, N), fp32.
        """
        out = torch.empty((inputs.shape[0], self._num_outputs), dtype=torch.float32)
        self._run(inputs, None, out)
        return out

    def _run(self, inputs: Tensor, residual: Tensor | None, out: Tensor) -> None:
        if inputs.dtype is not self._dtype or inputs.shape[1] != self._width or inputs.stride(1) != 1:
            raise ValueError(
                f"inputs must be {self._dtype} of width {self._width}, rows contiguous, "
                f"not {inputs.dtype} {tuple(inputs.shape)} strides {inputs.stride()}"
            )
        self._multiply(
            self._kernels,
            self._code,
            self._kind.value,
            out.dtype is torch.float32,
            inputs.data_ptr(),
            inputs.stride(0),
            self._packed_place,
            self._bias_place,
            None if residual is None else residual.data_ptr(),
            0 if residual is None else residual.stride(0),
            out.data_ptr(),
            inputs.shape[0],
            self._width,
            self._num_outputs,
            self._num_threads,
        )
