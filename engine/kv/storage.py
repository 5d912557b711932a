"""The memory behind the block ids, and how much of it there is to be.

Letters: L layers, N blocks (the null block included), S block size, H_kv key/value heads, D head width.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import numpy as np
import psutil
import torch
from torch import Tensor

from headrace.engine.config import CacheConfig, CacheLayout
from headrace.engine.control_group import ControlGroup
from headrace.engine.errors import ConfigError

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")

DEFAULT_MEMORY_FRACTION = 0.4
"""Of what is free once the weights are read: the rest is for activations and for everybody else."""
_ADVISED_FRACTION = 0.9
"""Of what is free, in what is advised: by the next start other processes may have taken some of it."""
_LEAST_USEFUL_TOKENS = 256
_BLOCK_SIZES = {"cpu": 4, "cuda": 256}
"""Small blocks waste little; the paged kernels of GPUs take multiples of 256 alone."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """K and V of one token, over all layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """K and V together."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVStorage:
    """K and V of all blocks, zero-filled: what a kernel loads beside the valid slots must be finite.

    Args:
        layout: number and size of blocks.
        shape: what one token takes.
        device: where the memory is.

    Raises:
        ConfigError: the device has not so much memory.
    """

    def __init__(self, layout: CacheLayout, shape: KVShape, device: torch.device) -> None:
        size = (shape.num_layers, layout.num_blocks, layout.block_size, shape.num_kv_heads, shape.head_dim)
        self.layout = layout
        self.shape = shape
        try:
            self.key = _zeros(size, shape.dtype, device)
            self.value = _zeros(size, shape.dtype, device)
        except (RuntimeError, MemoryError) as error:
            wanted = gib(layout.num_blocks * layout.block_size * shape.bytes_per_token)
            raise ConfigError(
                f"the KV pool of {layout.num_blocks} blocks takes {wanted}, which {device} does not give: "
                "lower the KV memory (--kv-memory), the number of blocks (--num-blocks) or, on a GPU, "
                "--gpu-memory-utilization"
            ) from error

    @property
    def device(self) -> torch.device:
        """Where the memory is."""
        return self.key.device

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer.

        Returns:
            Two views, (N, S, H_kv, D).
        """
        return self.key[index], self.value[index]


def block_size_for(cache: CacheConfig, device: torch.device) -> int:
    """Tokens per block: as configured, else what suits the device."""
    return _BLOCK_SIZES[device.type] if cache.block_size is None else cache.block_size


def resolve_layout(
    cache: CacheConfig,
    shape: KVShape,
    *,
    max_num_seqs: int,
    max_model_len: int,
    available_bytes: int,
    device: torch.device = _CPU,
    draft_shape: KVShape | None = None,
) -> CacheLayout:
    """Do what `plan_layout` does, and log what came of it."""
    layout = plan_layout(
        cache,
        shape,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        available_bytes=available_bytes,
        device=device,
        draft_shape=draft_shape,
    )
    token_bytes = shape.bytes_per_token + (0 if draft_shape is None else draft_shape.bytes_per_token)
    logger.info(
        "KV pool: %d blocks of %d tokens, %s, %d tokens in all; the longest sequence served is %d tokens",
        layout.num_usable_blocks,
        layout.block_size,
        gib(layout.num_blocks * layout.block_size * token_bytes),
        layout.num_tokens,
        layout.longest(max_model_len),
    )
    return layout


def plan_layout(
    cache: CacheConfig,
    shape: KVShape,
    *,
    max_num_seqs: int,
    max_model_len: int,
    available_bytes: int,
    device: torch.device = _CPU,
    draft_shape: KVShape | None = None,
    unsure_bytes: int = 0,
) -> CacheLayout:
    """Decide how many blocks there are.

    `cache.num_blocks` if it is given; else what `cache.memory_bytes` holds; else, on a GPU, all that may be
    taken, and on a CPU as many as `max_num_seqs` sequences of `max_model_len` tokens need, within a part of
    what is free. A pool smaller than one sequence of `max_model_len` is fine: a request that can't fit is
    refused by itself.

    Args:
        available_bytes: memory that may be taken now, the weights being in place.
        device: where the pool will be.
        draft_shape: what the draft model takes for the same token, behind the same block ids.
        unsure_bytes: of `available_bytes`, what weights that aren't read yet may take, too.

    Raises:
        ConfigError: the wanted pool doesn't fit, or no useful pool does; it says how much there is, and a
            size that is going to fit.
    """
    block_size = block_size_for(cache, device)
    token_bytes = shape.bytes_per_token + (0 if draft_shape is None else draft_shape.bytes_per_token)
    block_bytes = block_size * token_bytes
    if cache.num_blocks is not None:
        num_usable = cache.num_blocks
        wanted_by = f"num_blocks={num_usable}"
    elif cache.memory_bytes is not None:
        num_usable = cache.memory_bytes // block_bytes - 1
        wanted_by = f"memory_bytes={cache.memory_bytes}"
        if num_usable < 1:
            raise ConfigError(
                f"{wanted_by} holds no block of {block_size} tokens beside the null block: "
                f"give at least {2 * block_bytes}, or a smaller block_size"
            )
    else:
        least = math.ceil(min(max_model_len, _LEAST_USEFUL_TOKENS) / block_size)
        if device.type == "cpu":
            needed = max_num_seqs * math.ceil(max_model_len / block_size)
            affordable = int(available_bytes * DEFAULT_MEMORY_FRACTION) // block_bytes - 1
            part = f", of which the KV pool takes {DEFAULT_MEMORY_FRACTION:.0%}"
        else:
            needed = affordable = available_bytes // block_bytes - 1
            part = " beside weights and activations"
        if affordable < least:
            raise ConfigError(
                f"{gib(available_bytes)} are free{part}: too little for one sequence of "
                f"{least * block_size} tokens, which takes {gib(least * block_bytes)}. Free memory, take a "
                "smaller model, or set the KV memory yourself (--kv-memory; on a GPU also "
                "--gpu-memory-utilization and --max-num-batched-tokens)"
            )
        num_usable = min(needed, affordable)
        wanted_by = "the default size"
    layout = CacheLayout(num_usable + 1, block_size)
    pool_bytes = layout.num_blocks * block_bytes
    if pool_bytes > available_bytes:
        most = int((available_bytes - unsure_bytes) * _ADVISED_FRACTION) // block_bytes - 1
        remedy = "free memory, or take a smaller model"
        if most > 0:
            is_by_size = cache.memory_bytes is not None
            at_most = f"memory_bytes={(most + 1) * block_bytes}" if is_by_size else f"num_blocks={most}"
            remedy = f"use {at_most} at most"
        raise ConfigError(
            f"{wanted_by} makes a KV pool of {gib(pool_bytes)} ({token_bytes} bytes per token), "
            f"but {gib(available_bytes)} are free: {remedy}"
        )
    return layout


def available_memory(device: torch.device) -> int:
    """Bytes that may be taken on `device` now. On the CPU a limit of the control group counts too."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    free = psutil.virtual_memory().available
    group_free = ControlGroup().free_memory()
    return free if group_free is None else min(free, group_free)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # The system's own zero pages: memory is taken when a block is first written, not at start.
    num_bytes = math.prod(size) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(size)


def gib(num_bytes: int) -> str:
    """As it is told."""
    return f"{num_bytes / 2**30:.2f} GiB"
