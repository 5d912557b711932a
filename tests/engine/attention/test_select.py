"""The choice of a backend, and what a wrong one is told."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from headrace.engine.attention import flash, torch_varlen
from headrace.engine.attention.backend import AttentionSpec, Capabilities
from headrace.engine.attention.select import (
    AttentionTask,
    check_capabilities,
    choose_backend,
    select_backend,
)
from headrace.engine.config import CacheLayout
from headrace.engine.errors import ConfigError
from headrace.engine.kv.storage import KVShape, KVStorage
from tests.support.attention_cases import make_case
from tests.support.emulated_kernels import EmulatedKernels, installed_as_flash_attn

CUDA = torch.device("cuda")


def gpu_task(**changes: object) -> AttentionTask:
    """What suits flash-attn, but for what is changed."""
    task = AttentionTask(CUDA, (9, 0), torch.bfloat16, block_size=256, head_dim=128)
    return replace(task, **changes)  # type: ignore[arg-type]


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
        ("flash", torch.bfloat16, "it runs on cuda, not on cpu"),
        ("torch_varlen", torch.bfloat16, "it runs on cuda, not on cpu"),
        ("fast", torch.float32, "use one of auto, native, cpu, flash, torch_varlen, reference"),
        ("cpu", torch.float16, "use one of bfloat16, float32"),
    ],
)
def test_what_does_not_suit_is_refused_with_the_fix(name: str, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        select_backend(name, make_storage(dtype))


def test_a_refusal_names_all_that_is_wrong_and_the_flags() -> None:
    task = gpu_task(compute_capability=(7, 5), dtype=torch.float32, block_size=16, head_dim=20)

    problems = check_capabilities(flash.CAPABILITIES, task)

    assert len(problems) == 4
    assert "bfloat16, float16 (--dtype)" in problems[0]
    assert "--block-size 256" in problems[1]
    assert "multiple of 8" in problems[2]
    assert "7.5: 8.0 or newer" in problems[3]


@pytest.mark.parametrize(
    "capabilities", [flash.CAPABILITIES, torch_varlen.CAPABILITIES], ids=["own", "torch"]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_what_models_have_suits_the_kernels_at_block_size_256(
    capabilities: Capabilities, dtype: torch.dtype, head_dim: int
) -> None:
    assert check_capabilities(capabilities, gpu_task(dtype=dtype, head_dim=head_dim)) == ()


def test_a_soft_cap_is_beyond_torch_and_not_beyond_flash_attn() -> None:
    task = gpu_task(has_soft_cap=True)

    assert check_capabilities(flash.CAPABILITIES, task) == ()
    assert "--attention-backend flash" in check_capabilities(torch_varlen.CAPABILITIES, task)[0]


def test_on_a_gpu_auto_takes_what_the_task_allows_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """Block size 16 suits no kernel, wherever they are installed: what is left is slow, and said to be."""
    with caplog.at_level(logging.INFO):
        choice = choose_backend("auto", gpu_task(block_size=16))

    assert choice.capabilities.name == "reference"
    for expected in ("flash does not suit", "torch_varlen does not suit", "--block-size 256", "not fast"):
        assert expected in caplog.text


def test_an_installed_flash_attn_is_preferred_on_a_gpu() -> None:
    kernels = EmulatedKernels()
    case = make_case([(300, 1)], block_size=256, dtype=torch.bfloat16)

    with installed_as_flash_attn(kernels):
        choice = choose_backend("auto", gpu_task())
        case.run(choice.build(case.storage), AttentionSpec(scale=1.0))

    assert choice.capabilities.name == "flash"
    assert [call.function for call in kernels.calls] == ["with_kvcache"]


@pytest.mark.parametrize(("may_split", "num_splits"), [(True, 0), (False, 1)])
def test_whether_kv_is_split_is_handed_on(num_splits: int, *, may_split: bool) -> None:
    kernels = EmulatedKernels()
    case = make_case([(300, 1)], block_size=256, dtype=torch.bfloat16)

    with installed_as_flash_attn(kernels):
        choice = choose_backend("flash", gpu_task(may_split=may_split))
        case.run(choice.build(case.storage), AttentionSpec(scale=1.0))

    assert [call.terms.num_splits for call in kernels.calls] == [num_splits]


def test_without_flash_attn_it_says_what_would_install_it() -> None:
    if flash.missing() is None:
        pytest.skip("flash-attn is installed here")

    with pytest.raises(ConfigError, match=r"headrace\[cuda\]"):
        choose_backend("flash", gpu_task())
