"""How much of a GPU the KV pool may take: measured, not guessed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.engine.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GpuUse:
    """A GPU's memory after the largest steps have run once without a pool, bytes.

    Args:
        total: of the GPU.
        used: by everybody, other processes and the driver's own needs included.
        reserved: what torch holds of it now.
        peak_reserved: the most that torch has held: weights and the activations of the largest step.
    """

    total: int
    used: int
    reserved: int
    peak_reserved: int


def kv_budget(use: GpuUse, utilization: float, graph_bytes: int = 0) -> int:
    """Bytes that the pool may take.

    Args:
        utilization: the share of the GPU that the whole server may take.
        graph_bytes: kept for captured graphs, which are made when the pool is there.

    Raises:
        ConfigError: nothing is left; it says who takes what.
    """
    allowed = int(use.total * utilization)
    others = use.used - use.reserved
    budget = allowed - others - use.peak_reserved - graph_bytes
    logger.info(
        "GPU memory: %s in all, %s allowed (utilization %g), %s weights and activations, %s beside torch "
        "(driver, other processes), %s for graphs: %s left for the KV pool",
        _gib(use.total),
        _gib(allowed),
        utilization,
        _gib(use.peak_reserved),
        _gib(others),
        _gib(graph_bytes),
        _gib(max(budget, 0)),
    )
    if budget <= 0:
        raise ConfigError(
            f"no memory is left for the KV pool: of {_gib(use.total)}, utilization {utilization:g} "
            f"allows {_gib(allowed)}, and {_gib(use.peak_reserved)} are taken by weights and activations, "
            f"{_gib(others)} by the driver and other processes, {_gib(graph_bytes)} by graphs. Raise "
            "--gpu-memory-utilization, lower --max-num-batched-tokens, stop other processes on this GPU, or "
            "take a smaller model or type (--dtype bfloat16)"
        )
    return budget


def measure_gpu(device: torch.device, run_largest_steps: Callable[[], None]) -> GpuUse:
    """Run the largest steps and see what they take.

    Args:
        device: a GPU with the weights on it.
        run_largest_steps: without a pool worth the name.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    run_largest_steps()
    torch.cuda.synchronize(device)
    peak_reserved = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return GpuUse(total, total - free, torch.cuda.memory_reserved(device), peak_reserved)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
