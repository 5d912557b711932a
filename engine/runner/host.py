"""Settings of the process that the model computes in. Set once, before the first tensor is large."""

from __future__ import annotations

import logging
import os

import torch

from headrace.engine.control_group import ControlGroup
from headrace.engine.heap import keep_freed_memory

logger = logging.getLogger(__name__)


def prepare_host(num_threads: int | None) -> int:
    """Set the number of compute threads and keep freed memory for the next step.

    Args:
        num_threads: None takes the cores that this process may use.

    Returns:
        The number of threads.
    """
    chosen = usable_cores() if num_threads is None else num_threads
    torch.set_num_threads(chosen)
    keep_freed_memory()
    logger.info("computing with %d thread%s (torch %s)", chosen, "s" * (chosen != 1), torch.__version__)
    return chosen


def usable_cores() -> int:
    """Cores that this process may use: torch's own count, within the affinity mask and the group's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = ControlGroup().num_cores()
    cores = min(torch.get_num_threads(), allowed)
    return max(1, cores if quota is None else min(cores, quota))
