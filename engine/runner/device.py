"""Where the model computes, and what is said when that place has too little memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from headrace.engine.errors import ConfigError

logger = logging.getLogger(__name__)


def find_device(wanted: str) -> torch.device:
    """Do what `choose_device` does, without a word in the log.

    Raises:
        ConfigError: there is no such device here; it says what is missing.
    """
    if wanted != "cuda":
        return torch.device("cpu")
    absent = _why_no_gpu()
    if absent is not None:
        raise ConfigError(f"device 'cuda' (--device): {absent}; or use --device cpu")
    return torch.device("cuda", 0)


def choose_device(wanted: str) -> torch.device:
    """Find the device; the log says which, and why.

    Args:
        wanted: one of `headrace.engine.config.DEVICES`; "auto" is the CPU: what is written for GPUs has not
            been run on one yet, and nobody should get it without asking.

    Raises:
        ConfigError: there is no such device here; it says what is missing.
    """
    device = find_device(wanted)
    if wanted == "auto":
        reason = (
            _why_no_gpu()
            or "--device cuda computes on this machine's GPU, which is new and has to be asked for"
        )
        logger.info("computing on the CPU: %s", reason)
    elif device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        logger.info(
            "computing on %s, compute capability %d.%d", torch.cuda.get_device_name(device), major, minor
        )
    return device


def _why_no_gpu() -> str | None:
    """Why torch can't compute on a GPU here; None when it can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA, which a GPU needs"
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} sees no GPU: check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES, "
            "and in a container that it was started with its GPUs (docker run --gpus all)"
        )
    return None


@contextmanager
def explained_out_of_memory(doing: str, advice: str) -> Iterator[None]:
    """Turn a GPU's lack of memory into words.

    Args:
        doing: what it happened at: "reading the weights".
        advice: what would take less.

    Raises:
        ConfigError: instead of torch's own error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the GPU ran out of memory while {doing}: {advice}. torch says: {error}"
        ) from error
