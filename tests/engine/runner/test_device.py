"""The choice of a device, and what is said where there is none or too little of it."""

from __future__ import annotations

import logging

import pytest
import torch

from headrace.engine.errors import ConfigError
from headrace.engine.runner.device import choose_device, explained_out_of_memory

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_the_cpu_can_be_asked_for() -> None:
    assert choose_device("cpu") == torch.device("cpu")


def test_auto_is_the_cpu_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert choose_device("auto") == torch.device("cpu")

    assert "computing on the CPU: " in caplog.text
    assert ("--device cuda" in caplog.text) == torch.cuda.is_available()


@without_gpu
def test_a_gpu_that_is_not_there_is_refused_with_the_fix() -> None:
    with pytest.raises(ConfigError, match=r"--device.*(without CUDA|sees no GPU).*--device cpu"):
        choose_device("cuda")


def test_a_lack_of_memory_is_told_in_words() -> None:
    with (
        pytest.raises(ConfigError, match="while reading the weights: take a smaller model"),
        explained_out_of_memory("reading the weights", "take a smaller model"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_other_faults_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="a kernel failed"), explained_out_of_memory("working", "rest"):
        raise RuntimeError("a kernel failed")
