"""Faults of the model under the engine: who is hurt, who is told, and what goes on."""

import asyncio

import pytest

from headrace.engine import EngineDead, FailureEvent, RequestFailed
from tests.support.engines import assert_serves, collect, running_engine
from tests.support.fake_runner import expected_output
from tests.support.requests import make_config, make_request
from tests.support.step_gate import StepGate


async def test_a_row_that_fails_ends_alone():
    poison = (200, 201, 202)

    def choke(plan):
        if any(row.token_ids == poison for row in plan.rows):
            raise RuntimeError("bad row")

    async with running_engine(before_step=choke) as engine:
        requests = [make_request(max_tokens=8) for _ in range(3)]
        streams = [engine.submit(request) for request in requests]
        bad = engine.submit(make_request(prompt=poison))
        failure = (await collect(bad))[2]
        assert isinstance(failure, FailureEvent)
        assert isinstance(failure.error, RequestFailed)
        assert "bad row" not in str(failure.error), "the inside of an exception is no answer to a caller"
        for request, stream in zip(requests, streams, strict=True):
            assert (await collect(stream))[0] == expected_output(request.prompt_token_ids, 8)
        await assert_serves(engine)


@pytest.mark.parametrize("fault", [KeyboardInterrupt, SystemExit, asyncio.CancelledError, MemoryError])
async def test_when_the_loop_dies_everybody_is_told(fault):
    gate = StepGate()

    def die(plan):
        gate(plan)
        raise fault

    async with running_engine(before_step=die, config=make_config(max_num_seqs=2)) as engine:
        watch = engine.watch_steps()
        streams = [engine.submit(make_request(prompt_len=1, max_tokens=5)) for _ in range(20)]
        await gate.wait_held()
        gate.open()
        for stream in streams:
            last = (await collect(stream))[2]
            assert isinstance(last, FailureEvent)
        async with asyncio.timeout(30):
            assert isinstance(await engine.died(), EngineDead)
        assert engine.is_dead
        with pytest.raises(EngineDead):
            engine.submit(make_request())
        # An ordinary exception is given two more steps, each row tried alone; others end it at once.
        assert len([step async for step in watch]) == (2 if fault is MemoryError else 0)


async def test_a_request_that_can_not_be_run_kills_no_idle_server_however_often_it_comes():
    poison = (200, 201, 202)

    def choke(plan):
        if any(row.token_ids == poison for row in plan.rows):
            raise RuntimeError("bad row")

    async with running_engine(before_step=choke) as engine:
        for _ in range(6):
            failure = (await collect(engine.submit(make_request(prompt=poison))))[2]
            assert isinstance(failure, FailureEvent)
            assert isinstance(failure.error, RequestFailed)
        assert not engine.is_dead
        await assert_serves(engine)
