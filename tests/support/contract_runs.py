"""Whole test runs over the checks of what CUDA kernels demand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace.engine.attention import reference
from headrace.engine.attention.backend import AttentionBackend
from headrace.engine.attention.select import AUTO, AttentionTask, BackendChoice, choose_backend
from headrace.engine.config import CacheConfig
from headrace.engine.kv.storage import KVStorage
from headrace.engine.runner import placement
from headrace.engine.runner.model_runner import ModelRunner
from tests.support.contract_backend import ContractCheckingBackend


@contextmanager
def every_engine_checked(block_size: int) -> Iterator[None]:
    """Whoever leaves the choice of a backend to the engine gets the reference behind the checks.

    Args:
        block_size: of every engine's blocks, whatever its configuration says, with as many of them as hold
            the same number of tokens; 0 leaves them.
    """

    def build(storage: KVStorage) -> AttentionBackend:
        return ContractCheckingBackend(storage, block_size_multiple=max(1, block_size))

    def choose(name: str, task: AttentionTask) -> BackendChoice:
        if name != AUTO:
            return choose_backend(name, task)
        return BackendChoice(reference.CAPABILITIES, "this run checks the kernels' contract", build)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "choose_backend", choose)
        # Its rows are nobody's: all of them share the null block.
        patch.setattr(ModelRunner, "warm_up", lambda *_, **__: None)
        if block_size:
            _set_block_size(patch, block_size)
        yield


def _set_block_size(patch: pytest.MonkeyPatch, block_size: int) -> None:
    check = CacheConfig.__post_init__

    def widened(config: CacheConfig) -> None:
        check(config)
        if config.num_blocks is not None:
            num_blocks = math.ceil(config.num_blocks * (config.block_size or 4) / block_size)
            object.__setattr__(config, "num_blocks", max(num_blocks, 2))
        object.__setattr__(config, "block_size", block_size)

    patch.setattr(CacheConfig, "__post_init__", widened)
