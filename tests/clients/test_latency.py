from __future__ import annotations

import pytest

from headrace.clients import ControlClient, InvalidArgument
from headrace.clients.latency import LatencyClass, LatencyStatus
from tests.support.fake_server import running_fake_server


async def test_what_is_set_arrives_and_what_is_left_out_is_no_target() -> None:
    async with running_fake_server() as server, ControlClient(server.target) as control:
        both = await control.set_latency_budget(tpot_s=0.05, ttft_s=1.25)
        one = await control.set_latency_budget(ttft_s=0.5, priority=0)
        none = await control.set_latency_budget()
    assert both == LatencyStatus((LatencyClass(None, 0.05, 1.25),), num_late=2)
    assert one.classes == (LatencyClass(None), LatencyClass(0, None, 0.5))
    assert none.classes == (LatencyClass(None),)


async def test_a_refusal_is_an_error_of_its_class() -> None:
    async with running_fake_server() as server, ControlClient(server.target) as control:
        with pytest.raises(InvalidArgument, match="priority"):
            await control.set_latency_budget(priority=-1)


async def test_a_server_that_does_not_tell_has_no_classes() -> None:
    async with running_fake_server() as server, ControlClient(server.target) as control:
        assert (await control.load()).latency.classes == ()
