"""The choice of a backend, and what a wrong one is told."""

from __future__ import annotations

import logging

import pytest
import torch

from headrace.engine.attention.backend import Capabilities
from headrace.engine.attention.select import check_capabilities, select_backend
from headrace.engine.config import CacheConfig, CacheLayout
from headrace.engine.errors import ConfigError
from headrace.engine.kv.storage import KVShape, KVStorage

FLASH_2 = Capabilities(
    name="flash",
    dtypes=frozenset({torch.float16, torch.bfloat16}),
    block_size_multiple=256,
    max_head_dim=256,
    head_dim_multiple=8,
    min_compute_capability=(8, 0),
)


def make_storage(dtype: torch.dtype = torch.float32) -> KVStorage:
    return KVStorage(CacheLayout(4, 16), KVShape(1, 2, 16, dtype), torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auto_takes_the_fast_backend_and_says_so(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        backend = select_backend("auto", make_storage(dtype))

    # Compiled kernels where they are built; else it says what would build them.
    chosen = backend.capabilities.name
    assert chosen == ("cpu" if "the native library" in caplog.text else "native")
    assert f"attention backend {chosen} chosen" in caplog.text


def test_auto_falls_back_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        backend = select_backend("auto", make_storage(torch.float64))

    assert backend.capabilities.name == "reference"
    assert "dtype=float64" in caplog.text


def test_a_backend_can_be_asked_for() -> None:
    assert select_backend("reference", make_storage()).capabilities.name == "reference"


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("flash", torch.float32, "not in this build"),
        ("torch_varlen", torch.float32, "not in this build"),
        ("fast", torch.float32, "use one of auto, native, cpu, reference"),
        ("cpu", torch.float16, "use one of bfloat16, float32"),
    ],
)
def test_what_does_not_suit_is_refused_with_the_fix(name: str, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        select_backend(name, make_storage(dtype))


def test_capabilities_name_the_fix() -> None:
    problems = check_capabilities(FLASH_2, dtype=torch.float32, block_size=16, head_dim=20)

    assert len(problems) == 3
    assert "float16" in problems[0]
    assert "multiple of 256" in problems[1]
    assert "multiple of 8" in problems[2]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_block_size_256_suits_flash_attention(head_dim: int) -> None:
    cache = CacheConfig(block_size=256)

    assert (
        check_capabilities(FLASH_2, dtype=torch.bfloat16, block_size=cache.block_size, head_dim=head_dim)
        == ()
    )
