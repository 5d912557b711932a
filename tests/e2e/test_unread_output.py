"""What nobody reads is made within bounds: the request waits, and who leaves too much is cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2

from headrace.engine import LoadedModel
from headrace.service.limits import Limits
from headrace.service.session import SessionRun
from headrace.service.status import RpcFailure
from headrace.v1.generation_pb2 import SessionRequest
from tests.support.fake_runner import expected_output, make_fake_model
from tests.support.requests import make_config
from tests.support.service import (
    PROMPT,
    RawSession,
    RunningService,
    detail,
    generate_ids,
    ids_of,
    make_start,
    reason_of,
    running_service,
    status_of,
    until,
)


def long_model() -> LoadedModel:
    return make_fake_model(max_model_len=4096, num_blocks=2048)


def is_paused(service: RunningService, number: int) -> bool:
    return service.engine.load().num_paused == number


async def test_without_credit_so_much_is_made_ahead_and_then_nothing_until_there_is_some() -> None:
    config = make_config(max_num_seqs=1, max_unread_tokens=16)
    async with running_service(long_model(), config) as service:
        session = RawSession(service.generation)
        await session.start(make_start("a", max_tokens=200, initial_credit=3))
        await until(lambda: service.engine.load().num_paused == 1)
        made = service.engine.load().totals.num_decode_tokens
        assert made <= 3 + 16 + 2
        # It holds no place: others go on though there is only one.
        assert await generate_ids(service, make_start()) == expected_output(PROMPT, 8)
        for granted in (1, 20, 3):
            await session.grant("a", granted)
        await session.grant("a", 1000)
        assert await session.half_close() is grpc.StatusCode.OK
        assert service.engine.load().num_paused == 0
    assert ids_of(session.events["a"]) == expected_output(PROMPT, 200)
    assert session.events["a"][-1].finished.preemptions == 0


async def test_under_pressure_a_request_without_credit_is_computed_again_and_its_usage_says_so() -> None:
    config = make_config(max_unread_tokens=8)
    model = make_fake_model(max_model_len=64, num_blocks=16)
    async with running_service(model, config) as service:
        session = RawSession(service.generation)
        await session.start(make_start("a", max_tokens=40, initial_credit=0))
        await until(lambda: service.engine.load().num_paused == 1)
        prompt = tuple(range(1, 57))
        assert await generate_ids(service, make_start(prompt=prompt)) == expected_output(prompt, 8)
        await session.grant("a", 1000)
        assert await session.half_close() is grpc.StatusCode.OK
        assert service.engine.load().totals.num_preemptions == 1
    assert ids_of(session.events["a"]) == expected_output(PROMPT, 40)
    assert session.events["a"][-1].finished.preemptions == 1


@pytest.mark.parametrize("num_requests", [1, 300])
async def test_a_stream_that_leaves_too_much_unread_is_cut_at_once_and_harms_nobody(
    num_requests: int,
) -> None:
    limits = Limits(max_unread_bytes=100_000 if num_requests == 1 else 1_000_000)
    config = make_config(max_unread_tokens=1024 if num_requests == 1 else 32, max_num_paused=1000)
    async with running_service(long_model(), config, limits) as service:
        session = RawSession(service.generation)
        for number in range(num_requests):
            await session.start(make_start(f"r{number}", max_tokens=1000, initial_credit=0))
        with pytest.raises(grpc.aio.AioRpcError) as cut:
            await session.until_end_of("r0")
        assert cut.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = status_of(cut.value)
        assert reason_of(status) == "UNREAD_OUTPUT"
        told = detail(status, error_details_pb2.ErrorInfo)
        assert dict(told.metadata) == {"limit": "max_unread_size", "value": str(limits.max_unread_bytes)}
        assert "--max-unread-size" in status.message
        await service.engine.wait_idle()
        assert service.engine.load().blocks.live == 0
        assert await generate_ids(service, make_start()) == expected_output(PROMPT, 8)
        samples = service.serving.edge.metrics.registry
        assert samples.get_sample_value("headrace_slow_readers_total", {"limit": "bytes"}) == 1


async def test_of_a_stream_that_is_cut_those_go_on_that_may_be_resumed() -> None:
    config, limits = make_config(max_unread_tokens=64), Limits(max_unread_bytes=20_000)
    async with running_service(long_model(), config, limits) as service:
        session = RawSession(service.generation)
        await session.start(make_start("kept", max_tokens=100, initial_credit=0, detach=True))
        await session.next()
        await session.start(make_start("lost", max_tokens=100, initial_credit=0))
        with pytest.raises(grpc.aio.AioRpcError):
            await session.until_end_of("lost")
        again = RawSession(service.generation)
        await again.resume("kept", 0)
        assert await again.half_close() is grpc.StatusCode.OK
        await service.engine.wait_idle()
    assert ids_of(again.events["kept"]) == expected_output(PROMPT, 100)


async def test_what_is_ready_and_not_fetched_for_long_cuts_the_stream_however_steadily_it_trickles() -> None:
    async def requests() -> AsyncIterator[SessionRequest]:
        yield SessionRequest(start=make_start("a"))
        await asyncio.Event().wait()

    async with running_service() as service:
        # Nothing may wait at all: whoever takes his time is too slow.
        run = SessionRun(service.serving, Limits(slow_reader_s=0.0), requests(), lambda: None)
        async with run:
            with pytest.raises(RpcFailure) as cut:
                async for _ in run.messages():
                    pass
        await service.engine.wait_idle()
    assert (cut.value.code, cut.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER")
    assert cut.value.metadata["limit"] == "slow_reader_s"


async def test_too_many_whose_readers_lag_are_given_up_and_told_so() -> None:
    async with running_service(long_model(), make_config(max_unread_tokens=8, max_num_paused=2)) as service:
        session = RawSession(service.generation)
        for number, label in enumerate(("a", "b", "c")):
            await session.start(make_start(label, max_tokens=100, initial_credit=0))
            await until(partial(is_paused, service, min(2, number + 1)))
        # Nobody has to grant anything to be told of a failure, and of what was made before it.
        await session.until_end_of("a")
        assert ids_of(session.events["a"]) == expected_output(PROMPT, len(ids_of(session.events["a"])))
        failure = session.events["a"][-1].error
        assert (failure.code, reason_of(failure)) == (code_pb2.RESOURCE_EXHAUSTED, "OVERLOADED")
        for label in ("b", "c"):
            await session.grant(label, 100)
        assert await session.half_close() is grpc.StatusCode.OK
    for label in ("b", "c"):
        assert ids_of(session.events[label]) == expected_output(PROMPT, 100)


@pytest.mark.parametrize("paused_hold_s", [0.0, 1000.0])
@pytest.mark.parametrize("how", ["cancel", "end of the call", "deadline"])
async def test_a_paused_request_ends_with_its_stream_whatever_it_holds(
    how: str, paused_hold_s: float
) -> None:
    config = make_config(max_unread_tokens=8, paused_hold_s=paused_hold_s)
    async with running_service(long_model(), config) as service:
        session = RawSession(service.generation, timeout_s=3.0 if how == "deadline" else None)
        await session.start(make_start("a", max_tokens=4000, initial_credit=2))
        await until(lambda: service.engine.load().num_paused == 1 or session.call.done())
        num_steps = service.engine.load().totals.num_steps
        if how == "cancel":
            await session.cancel("a")
            await session.until_end_of("a")
            ids = ids_of(session.events["a"])
            assert ids == expected_output(PROMPT, len(ids))
            assert len(ids) == session.events["a"][-1].finished.usage.completion_tokens
        elif how == "end of the call":
            session.call.cancel()
        await service.engine.wait_idle()
        load = service.engine.load()
        assert (load.num_paused, load.blocks.live, load.totals.num_steps) == (0, 0, num_steps)


async def test_two_hundred_who_read_nothing_cost_a_bounded_part_of_memory_and_no_neighbour() -> None:
    config = make_config(max_unread_tokens=16, max_num_paused=1000, paused_hold_s=0.0)
    model = make_fake_model(max_model_len=2048, num_blocks=600)
    async with running_service(model, config) as service:
        lazy = [RawSession(service.generation) for _ in range(10)]
        for session in lazy:
            for number in range(20):
                await session.start(make_start(f"r{number}", max_tokens=2000, initial_credit=1))
        await until(lambda: service.engine.load().num_paused == 200)
        load = service.engine.load()
        assert load.totals.num_decode_tokens <= 200 * (1 + 16 + 2), "nothing is made that nobody takes"
        for _ in range(5):
            assert await generate_ids(service, make_start()) == expected_output(PROMPT, 8)
        for session in lazy:
            session.call.cancel()
        await service.engine.wait_idle()
        assert service.engine.load().blocks.live == 0
