"""Requests whose readers lag: paused, and gone on with; nobody else notices."""

import asyncio
import time
from dataclasses import replace

import pytest

from headrace.engine import (
    AsyncEngine,
    DeadlineExceeded,
    Draining,
    EngineConfig,
    FinishReason,
    Overloaded,
    TokenEvent,
)
from headrace.engine.core import EngineCore
from tests.support.engines import assert_serves, collect, running_engine
from tests.support.fake_runner import expected_output, make_fake_model
from tests.support.requests import make_config, make_request


def slow_readers(**limits) -> EngineConfig:
    return make_config(**{"max_unread_tokens": 8, "paused_hold_s": 1000.0, **limits})


async def until_paused(engine: AsyncEngine, number: int = 1) -> None:
    while engine.load().num_paused < number:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0)


async def test_a_request_whose_reader_lags_is_paused_and_loses_nothing():
    async with running_engine(config=slow_readers(max_num_seqs=1)) as engine:
        request = make_request(max_tokens=60)
        stream = engine.submit(request)
        await until_paused(engine)
        assert 8 < stream.num_unread_tokens <= 10
        num_steps = engine.load().totals.num_steps
        await assert_serves(engine)
        assert engine.load().totals.num_steps <= num_steps + 4, "nothing was computed for it meanwhile"
        token_ids, _, last = await collect(stream)
        assert token_ids == expected_output(request.prompt_token_ids, 60)
        assert (last.reason, last.num_preemptions) == (FinishReason.LENGTH, 0)


async def test_paused_requests_give_up_their_blocks_to_others_and_are_computed_again():
    async with running_engine(config=slow_readers(), num_blocks=12, max_model_len=48) as engine:
        requests = [make_request(max_tokens=30) for _ in range(3)]
        streams = [engine.submit(request) for request in requests]
        await until_paused(engine, 3)
        large = make_request(prompt_len=40, max_tokens=4)
        assert (await collect(engine.submit(large)))[0] == expected_output(large.prompt_token_ids, 4)
        assert engine.load().totals.num_preemptions == 3
        for request, stream in zip(requests, streams, strict=True):
            token_ids, _, last = await collect(stream)
            assert token_ids == expected_output(request.prompt_token_ids, 30)
            assert last.num_preemptions >= 1


async def test_blocks_of_a_paused_request_are_given_up_though_nothing_else_happens():
    async with running_engine(config=slow_readers(paused_hold_s=0.01)) as engine:
        stream = engine.submit(make_request(max_tokens=60))
        await until_paused(engine)
        while engine.load().blocks.live:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.001)
        assert engine.load().totals.num_preemptions == 1
        assert (await collect(stream))[2].num_preemptions == 1


async def test_to_wait_for_a_reader_is_neither_idle_nor_a_standstill():
    async with running_engine(config=slow_readers()) as engine:
        stream = engine.submit(make_request(max_tokens=60))
        await until_paused(engine)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.wait_idle(), 0.02)
        assert engine.seconds_since_progress() < 5.0
        await collect(stream)


@pytest.mark.parametrize("how", ["abort", "time limit", "deadline", "drain", "stop"])
async def test_a_paused_request_ends_in_every_way(how):
    async with AsyncEngine(make_fake_model(), slow_readers()) as engine:
        now_s = time.monotonic()
        request = make_request(
            max_tokens=60,
            time_limit_s=3.0 if how == "time limit" else None,
            deadline_s=now_s + 3.0 if how == "deadline" else None,
        )
        stream = engine.submit(request)
        await until_paused(engine)
        if how == "abort":
            engine.abort(request.request_id)
        elif how == "drain":
            assert await engine.drain(0.01) == 1
        if how != "stop":
            await engine.wait_idle()
            assert engine.load().blocks.live == engine.load().num_paused == 0
    token_ids, _, last = await collect(stream)
    assert token_ids == expected_output(request.prompt_token_ids, len(token_ids))
    match how:
        case "abort":
            assert last.reason is FinishReason.CANCELLED
        case "time limit":
            assert last.reason is FinishReason.TIME_LIMIT
        case "deadline":
            assert isinstance(last.error, DeadlineExceeded)
        case _:
            assert isinstance(last.error, Draining)


async def test_of_too_many_that_are_paused_those_of_the_client_with_the_most_are_given_up():
    async with running_engine(config=slow_readers(max_num_paused=3, max_num_seqs=1)) as engine:
        modest = engine.submit(make_request(max_tokens=20, client="modest"))
        await until_paused(engine)
        greedy = []
        for _ in range(4):
            greedy.append(engine.submit(make_request(max_tokens=20, client="greedy")))
            while engine.load().num_running + engine.load().num_waiting:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0)
        ends = [(await collect(stream))[2] for stream in greedy[:2]]
        assert all(isinstance(end.error, Overloaded) and end.error.retry_after_s for end in ends)
        for stream in (modest, *greedy[2:]):
            assert len((await collect(stream))[0]) == 20


async def test_who_gets_much_at_once_and_takes_it_is_not_paused():
    async with running_engine(config=slow_readers(max_unread_tokens=1)) as engine:
        paused: list[int] = []
        request = make_request(max_tokens=60)
        token_ids: list[int] = []
        # Every token is more than may wait, but none waits longer than a step.
        async for event in engine.submit(replace(request, n=2, best_of=2)):
            paused.append(engine.load().num_paused)
            if isinstance(event, TokenEvent) and event.index == 0:
                token_ids += event.token_ids
        assert token_ids == expected_output(request.prompt_token_ids, 60)
        assert sum(paused) == 0


async def test_who_is_told_of_an_end_reads_it_before_the_pool_is_audited(monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []
    monkeypatch.setattr(EngineCore, "check_integrity", lambda core: order.append("audit"))
    async with running_engine() as engine:
        await collect(engine.submit(make_request(max_tokens=2)))
        order.append("end")
        await engine.wait_idle()
    assert order[-2:] == ["end", "audit"]
