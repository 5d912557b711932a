"""Threads follow the configuration, the affinity mask and the control group."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from headrace.engine.runner.host import prepare_host, usable_cores


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_configured_number_holds_in_every_thread() -> None:
    assert prepare_host(1) == 1

    seen: list[int] = []
    worker = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    worker.start()
    worker.join()
    assert seen == [1]


def test_without_one_it_takes_what_it_may_use() -> None:
    assert prepare_host(None) == usable_cores() == torch.get_num_threads()
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
