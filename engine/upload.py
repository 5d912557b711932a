"""Many small tensors to a device in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 16
"""Bytes: where every tensor begins, so that kernels may load it as wide as they can."""


def upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors to a device; on a GPU without waiting for it.

    What is written into is page-locked and belongs to torch's allocator, which gives it to nobody else before
    the copy is through.

    Args:
        tensors: on the CPU, contiguous.

    Returns:
        The same types and shapes, parts of one buffer.
    """
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    staged = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for tensor, start in zip(tensors, starts, strict=True):
        _part(staged, start, tensor).copy_(tensor)
    there = staged.to(device, non_blocking=True)
    return [_part(there, start, tensor) for tensor, start in zip(tensors, starts, strict=True)]


def _part(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)
