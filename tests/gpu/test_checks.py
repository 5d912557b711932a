"""What has to hold on a GPU; on a CPU the same bodies, over emulated kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.benchmarks import gpu as benchmark
from tests.gpu.checks import CHECKS
from tests.gpu.sampling_checks import SAMPLING_CHECKS

ALL = {**CHECKS, **SAMPLING_CHECKS}


@pytest.mark.parametrize("check", ALL.values(), ids=ALL.keys())
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_holds(check: Callable[[torch.device], str], device: str) -> None:
    assert check(torch.device(device))


def test_the_benchmark_tells_decode_steps_and_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.run(benchmark.Options.quick("cpu"))

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["attention", "decode", "decode", "prompt"]
