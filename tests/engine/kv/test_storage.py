"""How much KV memory is taken, what is refused, and how the memory lies."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch

from headrace.engine.config import CacheConfig, CacheLayout
from headrace.engine.control_group import ControlGroup
from headrace.engine.errors import ConfigError
from headrace.engine.kv.storage import (
    DEFAULT_MEMORY_FRACTION,
    KVShape,
    KVStorage,
    available_memory,
    block_size_for,
    resolve_layout,
)

SHAPE = KVShape(num_layers=2, num_kv_heads=3, head_dim=8, dtype=torch.float32)
BYTES_PER_TOKEN = 2 * 2 * 3 * 8 * 4
PLENTY = 2**40


def resolve(
    cache: CacheConfig,
    *,
    max_num_seqs: int = 4,
    max_model_len: int = 100,
    available: int = PLENTY,
    device: str = "cpu",
) -> CacheLayout:
    return resolve_layout(
        cache,
        SHAPE,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        available_bytes=available,
        device=torch.device(device),
    )


def test_bytes_per_token_count_k_and_v_of_all_layers() -> None:
    assert SHAPE.bytes_per_token == BYTES_PER_TOKEN


def test_k_and_v_are_one_tensor_each_and_zero() -> None:
    storage = KVStorage(CacheLayout(5, 4), SHAPE, torch.device("cpu"))

    for cache in (storage.key, storage.value):
        assert cache.shape == (2, 5, 4, 3, 8)
        assert cache.is_contiguous()
        assert not cache.any()
    assert storage.key.data_ptr() != storage.value.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_is_a_view(dtype: torch.dtype) -> None:
    storage = KVStorage(CacheLayout(5, 4), KVShape(2, 3, 8, dtype), torch.device("cpu"))

    key, value = storage.layer(1)
    key[2, 3] = 1.0
    value[2, 3] = 2.0

    assert key.dtype is dtype
    assert storage.key[1, 2, 3].eq(1.0).all()
    assert storage.value[1, 2, 3].eq(2.0).all()
    assert storage.key.count_nonzero() == 3 * 8


def test_a_number_of_blocks_is_taken_as_it_is() -> None:
    assert resolve(CacheConfig(block_size=4, num_blocks=7)) == CacheLayout(num_blocks=8, block_size=4)


def test_memory_is_divided_into_blocks_with_the_null_block_among_them() -> None:
    block_bytes = 4 * BYTES_PER_TOKEN

    layout = resolve(CacheConfig(block_size=4, memory_bytes=10 * block_bytes + block_bytes // 2))

    assert layout.num_blocks == 10


def test_the_default_is_what_all_slots_need() -> None:
    layout = resolve(CacheConfig(block_size=16), max_num_seqs=4, max_model_len=100)

    assert layout.num_usable_blocks == 4 * 7


def test_the_default_stays_within_its_part_of_what_is_free() -> None:
    available = 10 * 2**20

    layout = resolve(CacheConfig(block_size=16), max_num_seqs=64, max_model_len=8192, available=available)

    taken = layout.num_blocks * 16 * BYTES_PER_TOKEN
    assert taken <= available * DEFAULT_MEMORY_FRACTION
    assert taken + 16 * BYTES_PER_TOKEN > available * DEFAULT_MEMORY_FRACTION


def test_on_a_gpu_the_default_is_all_that_may_be_taken() -> None:
    block_bytes = 256 * BYTES_PER_TOKEN

    layout = resolve(CacheConfig(block_size=None), available=40 * block_bytes + 5, device="cuda")

    assert layout == CacheLayout(num_blocks=40, block_size=256)


def test_a_gpu_without_room_for_a_sequence_says_so() -> None:
    with pytest.raises(ConfigError, match=r"beside weights.*--gpu-memory-utilization"):
        resolve(CacheConfig(block_size=256), available=300 * BYTES_PER_TOKEN, device="cuda")


@pytest.mark.parametrize(("device", "expected"), [("cpu", 4), ("cuda", 256)])
def test_a_block_size_that_is_left_open_suits_the_device(device: str, expected: int) -> None:
    assert block_size_for(CacheConfig(block_size=None), torch.device(device)) == expected
    assert block_size_for(CacheConfig(block_size=32), torch.device(device)) == 32


def test_a_pool_below_the_longest_sequence_is_fine() -> None:
    layout = resolve(CacheConfig(block_size=4, num_blocks=5), max_model_len=8192)

    assert layout.num_tokens == 20


@pytest.mark.parametrize(
    ("cache", "available", "message"),
    [
        (CacheConfig(block_size=4, num_blocks=1000), 1000 * BYTES_PER_TOKEN, "use num_blocks=224 at most"),
        (
            CacheConfig(block_size=4, num_blocks=9),
            4 * BYTES_PER_TOKEN,
            "free: free memory, or take a smaller",
        ),
        (
            CacheConfig(block_size=4, memory_bytes=2**30),
            2**20,
            r"memory_bytes=1073741824 makes a KV pool of 1\.00 GiB",
        ),
        (CacheConfig(block_size=4, memory_bytes=100), PLENTY, f"at least {8 * BYTES_PER_TOKEN}"),
        (CacheConfig(block_size=4), 100 * BYTES_PER_TOKEN, "one sequence of 100 tokens"),
    ],
    ids=["blocks", "room for none", "memory", "no block", "default"],
)
def test_what_does_not_fit_is_refused_with_numbers(cache: CacheConfig, available: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(cache, available=available)


def test_the_null_block_alone_is_no_pool() -> None:
    with pytest.raises(ConfigError):
        resolve(CacheConfig(block_size=4, memory_bytes=4 * BYTES_PER_TOKEN))


def test_memory_that_the_machine_does_not_give_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="KV pool"):
        KVStorage(CacheLayout(2**50, 16), SHAPE, torch.device("cpu"))


def test_some_memory_is_available_here() -> None:
    assert available_memory(torch.device("cpu")) > 0


@pytest.mark.parametrize(("group_free", "expected"), [(1000, 1000), (None, 10_000), (2**62, 10_000)])
def test_what_is_available_is_what_machine_and_control_group_leave(
    monkeypatch: pytest.MonkeyPatch, group_free: int | None, expected: int
) -> None:
    monkeypatch.setattr(ControlGroup, "free_memory", lambda _: group_free)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))
    assert available_memory(torch.device("cpu")) == expected
