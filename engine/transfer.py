"""Numbers between host and device: to the device without waiting for it, back in one copy that waits.

A GPU computes what it was given while the host goes on. Whoever looks at one of its numbers, be it to ask
whether any row is tied, waits for all that it has to do: so a step looks once, at its end, and only at what
was copied to the host behind its own work. What was launched after that, nobody waits for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
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


def on_device(
    values: Sequence[int] | Sequence[float] | NDArray[np.generic],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Numbers of the host as a tensor; on a GPU nobody waits for it.

    Args:
        values: what `torch.tensor` takes.
        dtype: None takes what suits the values.
    """
    here = torch.tensor(values, dtype=dtype)
    return here if device.type == "cpu" else upload((here,), device)[0]


def is_at_hand(tensor: Tensor) -> bool:
    """Whether nobody waits where its numbers are looked at: it was computed on the host, by whoever looks."""
    return tensor.device.type == "cpu"


class Download:
    """A tensor's numbers on their way to the host. Its copy stands behind all that was launched before, and
    before all that is launched after: what comes after is not waited for.

    Args:
        tensor: on any device; not written to any more.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            here.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(tensor.device))
            tensor = here
        self._here = tensor

    def numbers(self) -> list[float]:
        """They, flat. Waits until they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers: list[float] = self._here.flatten().tolist()
        return numbers


def download(tensor: Tensor) -> list[float]:
    """A tensor's numbers, flat, on the host. Waits for all that its device has to do before."""
    return Download(tensor).numbers()


def _part(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)
