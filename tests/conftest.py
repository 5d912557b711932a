"""What holds for every test: no settings from outside, one thread, no deadlines, GPU tests on GPUs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest

# Before torch is imported, for this process and its children: tiny products gain nothing from more threads,
# and on a busy machine each would wait for it at a barrier, milliseconds at a time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The reference library reads tiny models as well without a pool of threads for each, which nobody waits for:
# a machine that is short of threads would fail here.
os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")

# A shell that starts the tests in the background has them ignore Ctrl-C, and with them the programs that they
# start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A slow machine is no failure; the global timeout catches what hangs.
hypothesis.settings.register_profile(
    "headrace",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    print_blob=True,
)
hypothesis.settings.load_profile("headrace")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell's HEADRACE_* must not change a test's outcome; where the cache folder lies does not."""
    for name in list(os.environ):
        if name.startswith("HEADRACE_") and name != "HEADRACE_CACHE":
            monkeypatch.delenv(name)


def pytest_addoption(parser: pytest.Parser) -> None:
    """What whole runs can be done over."""
    parser.addoption(
        "--kernel-contract",
        type=int,
        metavar="BLOCK_SIZE",
        help="engines on the CPU run over the reference kernel behind checks of what CUDA kernels demand, "
        "in blocks of so many tokens; 0: in blocks of the tests' own sizes",
    )


@pytest.fixture(autouse=True, scope="session")
def _kernel_contract(pytestconfig: pytest.Config) -> Iterator[None]:
    block_size = pytestconfig.getoption("--kernel-contract")
    if block_size is None:
        yield
        return
    from tests.support.contract_runs import every_engine_checked  # noqa: PLC0415  most runs never need it

    with every_engine_checked(block_size):
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip `gpu` tests where there is no CUDA device; torch is imported only when there are such tests. Skip
    `small_blocks` tests where all blocks are of another size."""
    if config.getoption("--kernel-contract"):
        for item in items:
            if item.get_closest_marker("small_blocks") is not None:
                item.add_marker(pytest.mark.skip(reason="what it counts needs blocks of its own size"))
    gpu_items = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not gpu_items:
        return
    import torch  # noqa: PLC0415  most runs never need it

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
