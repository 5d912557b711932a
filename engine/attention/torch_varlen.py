"""Paged attention by torch's own build of flash-attn 2: needs a GPU and nothing but torch.

Letters as in `headrace.engine.attention.backend`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor

from headrace.engine.attention.backend import AttentionMetadata, AttentionSpec, Capabilities
from headrace.engine.attention.slots import SlotWriter
from headrace.engine.errors import ConfigError
from headrace.engine.kv.storage import KVStorage

CAPABILITIES = Capabilities(
    name="torch_varlen",
    dtypes=frozenset({torch.float16, torch.bfloat16}),
    block_size_multiple=256,
    max_head_dim=256,
    head_dim_multiple=8,
    supports_graphs=True,
    supports_soft_cap=False,
    min_compute_capability=(8, 0),
)

_NEEDED = ("enable_gqa", "seqused_k", "block_table", "num_splits")
"""What the function had not in its first releases."""


class VarlenKernel(Protocol):
    """The part of `torch.nn.attention.varlen.varlen_attn` that is used."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool,
        seqused_k: Tensor,
        block_table: Tensor,
        num_splits: int | None,
    ) -> Tensor:
        """Attend: (T, H_q, D)."""
        ...


def missing() -> str | None:
    """What this installation lacks for the backend; None when nothing does."""
    kernel = _varlen_attn()
    absent = (
        _NEEDED if kernel is None else [n for n in _NEEDED if n not in inspect.signature(kernel).parameters]
    )
    if absent:
        return (
            f"torch {torch.__version__} has no varlen_attn with {', '.join(absent)}: use torch 2.13 or newer"
        )
    if not torch.backends.cuda.is_flash_attention_available():
        return f"torch {torch.__version__} was built without flash attention: use a CUDA build"
    return None


def load_kernel() -> VarlenKernel:
    """Find the function.

    Raises:
        ConfigError: this torch has none.
    """
    kernel = _varlen_attn()
    if kernel is None:
        raise ConfigError(f"torch {torch.__version__} has no varlen_attn: use torch 2.13 or newer")
    return kernel


def _varlen_attn() -> Callable[..., Tensor] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415
    except ImportError:
        return None
    # It gives a pair only where auxiliary results are asked for.
    return cast(Callable[..., Tensor], varlen_attn)


class TorchVarlenBackend:
    """One kernel call per layer and step, whatever the rows are.

    Args:
        storage: suits `CAPABILITIES`.
        kernel: what `load_kernel` gives.
        num_splits: 1 keeps the kernel from splitting a row's KV, so that bits do not depend on the batch;
            None lets it choose.
    """

    def __init__(self, storage: KVStorage, kernel: VarlenKernel, *, num_splits: int | None = None) -> None:
        self._storage = storage
        self._kernel = kernel
        self._writer = SlotWriter(storage)
        self._num_splits = num_splits

    @property
    def capabilities(self) -> Capabilities:
        """See `AttentionBackend`."""
        return CAPABILITIES

    def begin_step(self, metadata: AttentionMetadata) -> TorchVarlenStep:
        """See `AttentionBackend`. Reads nothing back from the device, so that a graph can be captured."""
        return TorchVarlenStep(self._storage, self._kernel, self._writer, metadata, self._num_splits)


class TorchVarlenStep:
    """See `AttentionStep`."""

    def __init__(
        self,
        storage: KVStorage,
        kernel: VarlenKernel,
        writer: SlotWriter,
        metadata: AttentionMetadata,
        num_splits: int | None,
    ) -> None:
        self._storage, self._kernel, self._writer = storage, kernel, writer
        self._metadata, self._num_splits = metadata, num_splits

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See `AttentionStep`."""
        self._writer.write(layer, self._metadata.slot_mapping, key, value)

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        """See `AttentionStep`.

        Raises:
            ConfigError: the layer caps its scores, which this kernel can't; `select_backend` refuses such a
                model before.
        """
        if spec.soft_cap is not None:
            raise ConfigError("attention backend 'torch_varlen' does not cap scores: use 'flash'")
        metadata = self._metadata
        keys, values = self._storage.layer(layer)
        return self._kernel(
            query,
            keys,
            values,
            cu_seq_q=metadata.cu_seqlens_q,
            cu_seq_k=metadata.cu_seqlens_k,
            max_q=metadata.max_query_len,
            max_k=metadata.max_seq_len,
            scale=spec.scale,
            # Causal is a window here, and it counts the tokens before a token.
            window_size=(-1, 0) if spec.window is None else (spec.window - 1, 0),
            enable_gqa=query.shape[1] != keys.shape[2],
            seqused_k=metadata.seq_lens,
            block_table=metadata.block_table,
            num_splits=self._num_splits,
        )
