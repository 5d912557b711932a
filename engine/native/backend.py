"""Attention on the CPU by the compiled kernels, over the cache layout that flash-attn reads."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from headrace.engine.attention.backend import AttentionMetadata, AttentionSpec, Capabilities
from headrace.engine.errors import IntegrityError
from headrace.engine.kv.storage import KVShape, KVStorage
from headrace.engine.native.library import DTYPE_CODES, NativeLibrary

CAPABILITIES = Capabilities(
    name="native", dtypes=frozenset(DTYPE_CODES), max_head_dim=512, head_dim_multiple=8
)


class NativeCpuBackend:
    """Walks the block table in C++. What a row gives depends on that row alone, to the bit.

    One step at a time: the next `begin_step` ends the one before.
    """

    def __init__(self, storage: KVStorage, library: NativeLibrary) -> None:
        """Prepare for one cache.

        Args:
            storage: its type, head width and block size suit `capabilities`.
        """
        key, value, shape = storage.key, storage.value, storage.shape
        if not key.is_contiguous() or not value.is_contiguous() or key.is_cuda:
            raise ValueError(f"the cache must be contiguous and on the CPU, not on {key.device}")
        functions = library.functions
        self.storage = storage
        self.write = functions.headrace_attention_write
        self.attend = functions.headrace_attention_attend
        self.handle: int = functions.headrace_attention_new(
            library.kernels,
            DTYPE_CODES[shape.dtype],
            shape.num_kv_heads,
            shape.head_dim,
            storage.layout.block_size,
            key.data_ptr(),
            value.data_ptr(),
            key.stride(0) * shape.dtype.itemsize,
            torch.get_num_threads(),
        )
        self._begin = functions.headrace_attention_begin
        self._num_steps = 0
        weakref.finalize(self, functions.headrace_attention_free, self.handle)

    @property
    def capabilities(self) -> Capabilities:
        """See `AttentionBackend`."""
        return CAPABILITIES

    @property
    def step_id(self) -> int:
        """Which step is open."""
        return self._num_steps

    def begin_step(self, metadata: AttentionMetadata) -> NativeCpuStep:
        """See `AttentionBackend`."""
        block_table, slots = metadata.block_table, metadata.slot_mapping
        for name, tensor, dtype in (
            ("block_table", block_table, torch.int32),
            ("seq_lens", metadata.seq_lens, torch.int32),
            ("cu_seqlens_q", metadata.cu_seqlens_q, torch.int32),
            ("slot_mapping", slots, torch.int64),
        ):
            if tensor.dtype is not dtype or not tensor.is_contiguous() or tensor.is_cuda:
                raise IntegrityError(f"{name} must be contiguous {dtype} on the CPU, not {tensor.dtype}")
        self._begin(
            self.handle,
            metadata.seq_lens.shape[0],
            slots.shape[0],
            block_table.data_ptr(),
            block_table.shape[1],
            metadata.seq_lens.data_ptr(),
            metadata.cu_seqlens_q.data_ptr(),
            slots.data_ptr(),
        )
        self._num_steps += 1
        return NativeCpuStep(self, metadata)


class NativeCpuStep:
    """See `AttentionStep`."""

    def __init__(self, backend: NativeCpuBackend, metadata: AttentionMetadata) -> None:
        self._backend = backend
        # The library holds addresses, not references.
        self._metadata = metadata
        self._step_id = backend.step_id
        self._handle, self._write, self._attend = backend.handle, backend.write, backend.attend
        shape = backend.storage.shape
        self._dtype, self._num_layers, self._head_dim = shape.dtype, shape.num_layers, shape.head_dim
        self._new_kv_shape = (metadata.slot_mapping.shape[0], shape.num_kv_heads, shape.head_dim)

    @property
    def cache_shape(self) -> KVShape:
        """K and V of one token."""
        return self._backend.storage.shape

    def open_handle(self, num_tokens: int) -> int:
        """What the library calls this step, for a call that writes and attends in all layers.

        Args:
            num_tokens: of the step, T.

        Raises:
            IntegrityError: the step is over, or has another number of tokens.
        """
        if self._step_id != self._backend.step_id or num_tokens != self._new_kv_shape[0]:
            raise IntegrityError(f"{num_tokens} tokens don't belong to this step, or a newer one has begun")
        return self._handle

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See `AttentionStep`."""
        self._check(layer, key)
        self._check(layer, value)
        if not key.shape == value.shape == self._new_kv_shape:
            raise IntegrityError(
                f"K and V of this step are {self._new_kv_shape}, not {key.shape} and {value.shape}"
            )
        self._write(self._handle, layer, key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0))

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        """See `AttentionStep`."""
        self._check(layer, query)
        num_tokens, num_heads, head_dim = query.shape
        if (
            num_tokens != self._new_kv_shape[0]
            or num_heads % self._new_kv_shape[1]
            or head_dim != self._head_dim
        ):
            raise IntegrityError(
                f"queries of this step belong to K and V of {self._new_kv_shape}, not {query.shape}"
            )
        out = torch.empty((num_tokens, num_heads, head_dim), dtype=query.dtype)
        self._attend(
            self._handle,
            layer,
            num_heads,
            query.data_ptr(),
            query.stride(0),
            out.data_ptr(),
            spec.scale,
            spec.window or 0,
            spec.soft_cap or 0.0,
        )
        return out

    def _check(self, layer: int, heads: Tensor) -> None:
        if self._step_id != self._backend.step_id:
            raise IntegrityError("a newer step has begun: this one is over")
        if not 0 <= layer < self._num_layers:
            raise IntegrityError(f"layer {layer} is not one of {self._num_layers}")
        # The heads of a token lie side by side; tokens may lie apart.
        is_dense = heads.stride(2) == 1 and (heads.stride(1) == heads.shape[2] or heads.shape[1] == 1)
        if heads.dtype is not self._dtype or not is_dense:
            raise IntegrityError(
                f"heads must be {self._dtype}, side by side, not {heads.dtype} {heads.stride()}"
            )
