"""The operator's calls."""

from __future__ import annotations

import pytest

from headrace.clients import ControlClient, Unavailable
from headrace.clients.events import StepTotals
from headrace.clients.retry import RetryPolicy
from tests.support.fake_server import running_fake_server


async def test_load_has_the_pool_and_the_totals() -> None:
    async with running_fake_server() as server, ControlClient(server.target) as control:
        load = await control.load()
    assert (load.num_running, load.num_waiting, load.max_num_seqs, load.batching) == (2, 1, 8, "continuous")
    assert (load.blocks.total, load.blocks.free, load.blocks.live) == (10, 7, 3)
    assert load.totals == StepTotals(
        num_steps=10, num_rows=40, num_kv_slots_allocated=110, num_kv_slots_used=100
    )


async def test_steps_are_told_as_they_happen() -> None:
    async with running_fake_server() as server, ControlClient(server.target) as control:
        reports = [report async for report in control.watch_steps()]
    assert [report.step for report in reports] == [11, 12, 13]
    assert reports[0].execute_s == pytest.approx(0.002)
    assert (reports[0].rows[0].slot, reports[0].rows[0].num_decode_tokens) == (4, 1)


async def test_drain_sends_its_grace_and_returns_what_is_left() -> None:
    async with running_fake_server() as server, ControlClient(server.target) as control:
        assert await control.drain(grace_s=3) == 3
        assert await control.drain() == 0


async def test_flushing_the_cache_tells_what_it_gave_back() -> None:
    async with running_fake_server() as server, ControlClient(server.target) as control:
        assert await control.flush_cache() == 5


async def test_nobody_there_is_unavailable() -> None:
    async with ControlClient("127.0.0.1:1", retry=RetryPolicy(max_attempts=1)) as control:
        with pytest.raises(Unavailable):
            await control.load()
        with pytest.raises(Unavailable):
            await anext(aiter(control.watch_steps()))
        with pytest.raises(Unavailable):
            async with control.step_watch():
                raise AssertionError("nobody watches")


def test_totals_since_a_moment_are_differences() -> None:
    earlier = StepTotals(*range(1, 9))
    later = StepTotals(*(3 * value for value in range(1, 9)))
    assert later.since(earlier) == StepTotals(*(2 * value for value in range(1, 9)))


async def test_a_client_that_is_not_open_says_how_to_open_it() -> None:
    with pytest.raises(RuntimeError, match="async with"):
        await ControlClient().load()
