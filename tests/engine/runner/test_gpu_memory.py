"""The share of a GPU that the KV pool gets."""

from __future__ import annotations

import pytest

from headrace.engine.errors import ConfigError
from headrace.engine.runner.gpu_memory import GpuUse, kv_budget

GIB = 2**30


def use(*, used: int = 20, reserved: int = 16, peak_reserved: int = 18) -> GpuUse:
    """Of 80 GiB: by default 4 are taken beside torch, which held 18 at most."""
    return GpuUse(80 * GIB, used * GIB, reserved * GIB, peak_reserved * GIB)


def test_the_pool_gets_what_weights_activations_and_others_leave() -> None:
    assert kv_budget(use(), 0.5) == (40 - 4 - 18) * GIB


def test_graphs_are_set_aside() -> None:
    assert kv_budget(use(), 0.5, graph_bytes=3 * GIB) == (40 - 4 - 18 - 3) * GIB


def test_what_others_take_counts() -> None:
    assert kv_budget(use(used=50), 0.9) == (72 - 34 - 18) * GIB


def test_too_little_is_told_with_numbers_and_flags() -> None:
    with pytest.raises(ConfigError) as refusal:
        kv_budget(use(used=60), 0.75)

    for part in ("80.00 GiB", "allows 60.00 GiB", "18.00 GiB", "44.00 GiB", "--gpu-memory-utilization"):
        assert part in str(refusal.value)
