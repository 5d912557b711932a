"""Two steps under way: in which order things happen, and what becomes of those who leave meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.engine import (
    AsyncEngine,
    AsyncScheduling,
    DeadlineExceeded,
    Draining,
    FailureEvent,
    FinishEvent,
    FinishReason,
    OutputEvent,
    TokenEvent,
    async_engine,
)
from headrace.engine.scheduling.plan import StepPlan
from tests.support.engines import assert_serves, collect
from tests.support.fake_runner import FakeRunner, expected_output, make_fake_model
from tests.support.requests import make_config, make_request
from tests.support.staged_runner import FETCH, LAUNCH, StagedRunner
from tests.support.step_gate import StepGate


def at_fetch(gate: StepGate) -> Callable[[str, StepPlan], None]:
    """Holds each fetch of a step until it is let through."""
    return lambda stage, plan: gate(plan) if stage == FETCH else None


@asynccontextmanager
async def running(
    scheduling: AsyncScheduling = AsyncScheduling.ON, gate: StepGate | None = None, **options: Any
) -> AsyncIterator[tuple[AsyncEngine, StagedRunner]]:
    model = make_fake_model(block_size=1)
    runner = StagedRunner(model.runner, at_fetch(gate or StepGate(is_open=True)))
    config = make_config(async_scheduling=scheduling, **options)
    try:
        async with AsyncEngine(replace(model, runner=runner), config) as engine:
            yield engine, runner
            await engine.wait_idle()
            load = engine.load()
            assert (load.num_running, load.num_waiting, load.blocks.live) == (0, 0, 0)
    finally:
        if gate is not None:
            gate.open()


async def test_each_step_is_launched_before_the_last_one_is_fetched() -> None:
    async with running() as (engine, runner):
        request = make_request(max_tokens=5)
        token_ids, _, _ = await collect(engine.submit(request))
        assert token_ids == expected_output(request.prompt_token_ids, 5)
    expected = [(LAUNCH, 0)]
    for step in range(1, 5):
        expected += [(LAUNCH, step), (FETCH, step - 1)]
    assert runner.log == [*expected, (FETCH, 4)]


async def test_without_it_each_step_is_fetched_before_the_next_is_launched() -> None:
    async with running(AsyncScheduling.OFF) as (engine, runner):
        await collect(engine.submit(make_request(max_tokens=5)))
    assert runner.log == [(stage, step) for step in range(5) for stage in (LAUNCH, FETCH)]


@pytest.mark.parametrize("computes_apart", [False, True])
async def test_left_to_itself_it_is_on_where_a_device_computes(*, computes_apart: bool) -> None:
    model = make_fake_model()
    runner = StagedRunner(model.runner)
    model = replace(model, runner=runner, computes_apart=computes_apart)
    async with AsyncEngine(model, make_config()) as engine:
        await assert_serves(engine)
    assert (runner.log[1] == (LAUNCH, 1)) == computes_apart


async def test_a_cancelled_request_ends_when_the_first_of_two_steps_has_returned() -> None:
    gate = StepGate()
    async with running(gate=gate) as (engine, _):
        other = make_request(max_tokens=6)
        request = make_request(max_tokens=50)
        streams = engine.submit(request), engine.submit(other)
        await gate.wait_held()
        assert engine.load().totals.num_steps == 0
        engine.abort(request.request_id)
        gate.let(1)
        token_ids, _, last = await collect(streams[0])
        assert isinstance(last, FinishEvent)
        assert last.reason is FinishReason.CANCELLED
        assert token_ids == expected_output(request.prompt_token_ids, 1)
        # The second step is still under way: what it writes to is nobody's yet.
        await gate.wait_held()
        assert engine.load().blocks.live > len(other.prompt_token_ids) + 3
        gate.open()
        assert (await collect(streams[1]))[0] == expected_output(other.prompt_token_ids, 6)


async def test_a_deadline_that_passes_while_two_steps_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, passed_s = StepGate(), 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s)
    monkeypatch.setattr(async_engine, "time", clock)
    async with running(gate=gate) as (engine, _):
        stream = engine.submit(make_request(max_tokens=50, deadline_s=time.monotonic() + 1000.0))
        await gate.wait_held()
        passed_s = 1001.0
        gate.let(1)
        _, _, last = await collect(stream)
        assert isinstance(last, FailureEvent)
        assert isinstance(last.error, DeadlineExceeded)
        gate.open()


async def test_a_drain_past_its_grace_while_two_steps_are_under_way() -> None:
    gate = StepGate()
    async with running(gate=gate) as (engine, _):
        streams = [engine.submit(make_request(max_tokens=50)) for _ in range(3)]
        await gate.wait_held()
        assert await engine.drain(0.0) == 3
        gate.open()
        for stream in streams:
            last = (await collect(stream))[2]
            assert isinstance(last, FailureEvent)
            assert isinstance(last.error, Draining)


async def test_a_drain_lets_all_that_is_under_way_come_in() -> None:
    async with running() as (engine, _):
        requests = [make_request(max_tokens=5 + i) for i in range(3)]
        streams = [engine.submit(request) for request in requests]
        assert await engine.drain(None) == 0
        for request, stream in zip(requests, streams, strict=True):
            max_tokens = request.stop.max_tokens or 0
            assert (await collect(stream))[0] == expected_output(request.prompt_token_ids, max_tokens)


async def test_leaving_the_engine_brings_in_what_is_under_way_and_ends_the_rest() -> None:
    gate = StepGate()
    model = make_fake_model()
    runner = StagedRunner(model.runner, at_fetch(gate))
    engine = AsyncEngine(replace(model, runner=runner), make_config(async_scheduling=AsyncScheduling.ON))
    try:
        await engine.__aenter__()
        request = make_request(max_tokens=50)
        stream = engine.submit(request)
        await gate.wait_held()
        leaving = asyncio.create_task(engine.__aexit__(None, None, None))
        await asyncio.sleep(0)
        gate.open()
        await leaving
    finally:
        gate.open()
    token_ids, _, last = await collect(stream)
    assert token_ids == expected_output(request.prompt_token_ids, 2)
    assert isinstance(last, FailureEvent)
    assert isinstance(last.error, Draining)
    assert runner.log == [(LAUNCH, 0), (LAUNCH, 1), (FETCH, 0), (FETCH, 1)]
    assert engine.load().blocks.live == 0


async def test_a_reader_that_lags_is_paused_and_gets_every_token_once() -> None:
    async with running(max_unread_tokens=3) as (engine, _):
        request = make_request(prompt_len=2, max_tokens=40)
        stream = engine.submit(request)
        other = make_request(prompt_len=2, max_tokens=30)
        assert (await collect(engine.submit(other)))[0] == expected_output(other.prompt_token_ids, 30)
        token_ids: list[int] = []
        events: list[OutputEvent] = []
        async for event in stream:
            events.append(event)
            if isinstance(event, TokenEvent):
                token_ids += event.token_ids
        assert token_ids == expected_output(request.prompt_token_ids, 40)
        assert isinstance(events[-1], FinishEvent)


async def test_a_request_that_comes_while_two_steps_are_under_way_joins_the_one_behind_them() -> None:
    gate = StepGate()
    async with running(gate=gate) as (engine, runner):
        first = engine.submit(make_request(max_tokens=9))
        await gate.wait_held()
        second = engine.submit(make_request(max_tokens=3))
        gate.open()
        await collect(first)
        await collect(second)
    assert isinstance(runner.runner, FakeRunner)
    assert [len(plan.rows) for plan in runner.runner.plans[:4]] == [1, 1, 2, 2]
