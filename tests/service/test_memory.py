from __future__ import annotations

import asyncio

import pytest

from headrace.service import memory
from tests.support.service import until


async def test_what_is_free_goes_back_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    num_times = 0

    def give_back() -> None:
        nonlocal num_times
        num_times += 1

    monkeypatch.setattr(memory, "_GIVE_BACK_EVERY_S", 0.0)
    monkeypatch.setattr(memory, "give_back_memory", give_back)
    tidying = asyncio.create_task(memory.give_back_freed())
    try:
        await until(lambda: num_times > 2)
    finally:
        tidying.cancel()
