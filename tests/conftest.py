"""What holds for every test: no settings from outside, no deadlines in hypothesis, GPU tests on GPUs."""

from __future__ import annotations

import os

import hypothesis
import pytest

# A slow machine is no failure; the global timeout catches what hangs.
hypothesis.settings.register_profile("headrace", deadline=None, print_blob=True)
hypothesis.settings.load_profile("headrace")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell's HEADRACE_* must not change a test's outcome; where the cache folder lies does not."""
    for name in list(os.environ):
        if name.startswith("HEADRACE_") and name != "HEADRACE_CACHE":
            monkeypatch.delenv(name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests where there is no CUDA device; torch is imported only when there are such tests."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not gpu_items:
        return
    import torch  # noqa: PLC0415  most runs never need it

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
