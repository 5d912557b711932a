"""Paged attention by flash-attn 2 (Dao, arXiv 2307.08691), whose kernels read the block table themselves.

The only file that imports flash_attn. It needs no build of the package to be read, checked or tested: the two
functions are handed to the backend, and a test hands it others of the same signature.

Letters as in `headrace.engine.attention.backend`; Q query tokens of each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from headrace.engine.attention.backend import AttentionMetadata, AttentionSpec, Capabilities
from headrace.engine.attention.slots import SlotWriter
from headrace.engine.errors import ConfigError
from headrace.engine.kv.storage import KVStorage

CAPABILITIES = Capabilities(
    name="flash",
    dtypes=frozenset({torch.float16, torch.bfloat16}),
    block_size_multiple=256,
    max_head_dim=256,
    head_dim_multiple=8,
    supports_graphs=True,
    min_compute_capability=(8, 0),
)

_MAX_UNIFORM_QUERY = 64
"""The split-KV kernels take tiles of so many query tokens: longer rows suit the varlen kernel better."""
_TESTED_SERIES = (2, 8)


class VarlenKernel(Protocol):
    """The part of `flash_attn_varlen_func` that is used: rows of any length, one after the other."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        block_table: Tensor,
    ) -> Tensor:
        """Attend: (T, H_q, D)."""
        ...


class KVCacheKernel(Protocol):
    """The part of `flash_attn_with_kvcache` that is used: rows of equal length, with split KV."""

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        cache_seqlens: Tensor,
        block_table: Tensor,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        num_splits: int,
    ) -> Tensor:
        """Attend: (B, Q, H_q, D)."""
        ...


@dataclass(frozen=True, slots=True)
class FlashKernels:
    """The package's two functions that take a block table."""

    varlen: VarlenKernel
    with_kvcache: KVCacheKernel


def missing() -> str | None:
    """What this installation lacks for the backend, or what else keeps it from use; None when nothing."""
    spec = find_spec("flash_attn")
    installed = _version_of("flash-attn")
    # Without an `__init__` it is the folder of another package: flash-attn-4 is `flash_attn.cute` alone.
    if spec is None or (installed is None and spec.origin is None):
        return (
            "flash-attn is not installed (pip install --no-build-isolation 'headrace[cuda]', "
            "which compiles it with nvcc)"
        )
    if installed is None:
        return None
    if tuple(int(part) for part in installed.split(".")[:2] if part.isdigit()) != _TESTED_SERIES:
        wanted = ".".join(map(str, _TESTED_SERIES))
        return f"flash-attn {installed} is installed, this backend is written for {wanted}"
    newer = _version_of("flash-attn-4")
    if newer is not None:
        return (
            f"flash-attn-4 {newer} is installed beside flash-attn {installed}, into the same folder, which "
            "nobody has tried: uninstall one of them"
        )
    return None


def _version_of(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def load_kernels() -> FlashKernels:
    """Import the package.

    Raises:
        ConfigError: it can't be imported: mostly it was compiled for another torch or another CUDA.
    """
    try:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache  # noqa: PLC0415
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"flash-attn does not load ({error}): compile it again for torch {torch.__version__}, "
            "or take another attention backend (--attention-backend torch_varlen)"
        ) from error
    return FlashKernels(flash_attn_varlen_func, flash_attn_with_kvcache)


class FlashBackend:
    """One kernel call per layer and step.

    Args:
        storage: suits `CAPABILITIES`.
        kernels: what `load_kernels` gives.
        num_splits: into how many parts the KV of a row is split, for rows of equal length; 0 lets the kernel
            choose from the batch, so that bits depend on the batch; 1 makes them independent of it.
    """

    def __init__(self, storage: KVStorage, kernels: FlashKernels, *, num_splits: int = 0) -> None:
        self._storage = storage
        self._kernels = kernels
        self._writer = SlotWriter(storage)
        self._num_splits = num_splits

    @property
    def capabilities(self) -> Capabilities:
        """See `AttentionBackend`."""
        return CAPABILITIES

    def begin_step(self, metadata: AttentionMetadata) -> FlashStep:
        """See `AttentionBackend`. Reads nothing back from the device, so that a graph can be captured."""
        return FlashStep(self._storage, self._kernels, self._writer, metadata, self._num_splits)


class FlashStep:
    """See `AttentionStep`."""

    def __init__(
        self,
        storage: KVStorage,
        kernels: FlashKernels,
        writer: SlotWriter,
        metadata: AttentionMetadata,
        num_splits: int,
    ) -> None:
        self._storage, self._kernels, self._writer = storage, kernels, writer
        self._metadata, self._num_splits = metadata, num_splits
        num_rows, num_tokens = metadata.seq_lens.shape[0], metadata.slot_mapping.shape[0]
        query_len = metadata.max_query_len
        # No row is longer than the longest: the product is reached only if all rows are that long.
        self._is_uniform = num_rows * query_len == num_tokens and query_len <= _MAX_UNIFORM_QUERY

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See `AttentionStep`. The kernels could append by themselves; two ways would not mix."""
        self._writer.write(layer, self._metadata.slot_mapping, key, value)

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        """See `AttentionStep`."""
        metadata = self._metadata
        keys, values = self._storage.layer(layer)
        # Both kernels align the causal mask at the bottom right. A window counts the tokens before a token.
        window = (-1, 0) if spec.window is None else (spec.window - 1, 0)
        soft_cap = 0.0 if spec.soft_cap is None else spec.soft_cap
        if self._is_uniform:
            out = self._kernels.with_kvcache(
                query.view(-1, metadata.max_query_len, *query.shape[1:]),
                keys,
                values,
                # A tensor: of a number the wrapper would make one length per block of the cache.
                cache_seqlens=metadata.seq_lens,
                block_table=metadata.block_table,
                softmax_scale=spec.scale,
                causal=True,
                window_size=window,
                softcap=soft_cap,
                num_splits=self._num_splits,
            )
            return out.view(query.shape)
        return self._kernels.varlen(
            query,
            keys,
            values,
            cu_seqlens_q=metadata.cu_seqlens_q,
            cu_seqlens_k=metadata.cu_seqlens_k,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_seq_len,
            softmax_scale=spec.scale,
            causal=True,
            window_size=window,
            softcap=soft_cap,
            block_table=metadata.block_table,
        )
