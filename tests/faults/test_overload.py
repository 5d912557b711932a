"""Of ten times too many whoever is turned away knows at once, and the others are served in time.

The clock is the engine's steps.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import grpc
import pytest
from google.rpc import error_details_pb2

from headrace.v1.generation_pb2 import GenerateRequest, StartGeneration
from tests.support.aftermath import until_idle
from tests.support.fake_runner import expected_output, make_fake_model
from tests.support.requests import make_config
from tests.support.service import (
    PROMPT,
    RunningService,
    detail,
    generate_ids,
    make_start,
    reason_of,
    running_service,
    status_of,
    until,
)
from tests.support.step_gate import StepGate

NUM_SLOTS, MOST_WAITING, NUM_TOKENS = 4, 12, 8
CAPACITY = NUM_SLOTS + MOST_WAITING
STEPS_EACH = NUM_TOKENS + 1
"""Of one request: the first of them reads its prompt."""


@dataclass
class Crowd:
    """Callers of one server.

    Args:
        right: who was served as if alone.
        refusals: how the others were turned away.
    """

    service: RunningService
    right: int = 0
    refusals: Counter[tuple[grpc.StatusCode, str, bool]] = field(default_factory=Counter)

    async def call(self, number: int) -> None:
        """Come once, with a prompt of one's own."""
        prompt = (*PROMPT, number % 90 + 1, number // 90 + 1)
        call = self.service.generation.Generate(
            GenerateRequest(start=make_start(prompt=prompt, max_tokens=NUM_TOKENS)), timeout=60
        )
        ids: list[int] = []
        try:
            async for response in call:
                ids += response.event.delta.token_ids
        except grpc.aio.AioRpcError as error:
            retry = detail(status_of(error), error_details_pb2.RetryInfo).retry_delay
            is_told_when = retry.ToTimedelta().total_seconds() > 0
            self.refusals[error.code(), reason_of(status_of(error)), is_told_when] += 1
        else:
            assert ids == expected_output(prompt, NUM_TOKENS)
            self.right += 1

    def is_decided(self, num_calls: int) -> bool:
        """Whether the last of so many is in, or knows that there is no place."""
        load = self.service.engine.load()
        return self.right + self.refusals.total() + load.num_running + load.num_waiting == num_calls


REFUSED = (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", True)


async def test_of_ten_times_too_many_at_once_as_many_are_served_as_there_are_places() -> None:
    gate = StepGate()
    config = make_config(max_num_seqs=NUM_SLOTS, max_num_batched_tokens=64, max_num_waiting=MOST_WAITING)
    async with running_service(make_fake_model(before_step=gate, num_blocks=512), config) as service:
        crowd = Crowd(service)
        calls = [asyncio.create_task(crowd.call(number)) for number in range(10 * CAPACITY)]
        load = service.engine.load
        # While nothing moves, all that are too many are told so.
        await until(lambda: crowd.is_decided(len(calls)))
        num_inside = load().num_running + load().num_waiting
        assert crowd.right == 0
        assert MOST_WAITING < num_inside <= CAPACITY
        gate.open()
        await asyncio.gather(*calls)
        assert (crowd.right, dict(crowd.refusals)) == (num_inside, {REFUSED: len(calls) - num_inside})
        # No first token comes later than the last one of all: one round more than there are waiting.
        assert load().totals.num_steps <= (CAPACITY // NUM_SLOTS + 1) * STEPS_EACH
        await until_idle(service.control)
        assert await generate_ids(service, make_start()) == expected_output(PROMPT, 8)


async def test_however_long_too_many_come_no_more_wait_and_whoever_is_let_in_is_served() -> None:
    steps = StepGate()
    config = make_config(max_num_seqs=NUM_SLOTS, max_num_batched_tokens=64, max_num_waiting=MOST_WAITING)
    async with running_service(make_fake_model(before_step=steps, num_blocks=512), config) as service:
        crowd, calls, longest = Crowd(service), list[asyncio.Task[None]](), 0
        for _ in range(3 * STEPS_EACH):
            # Whatever became of those before them.
            calls += [asyncio.create_task(crowd.call(len(calls) + i)) for i in range(CAPACITY)]
            await until(partial(crowd.is_decided, len(calls)))
            longest = max(longest, service.engine.load().num_waiting)
            steps.let(1)
        steps.let(len(calls) * STEPS_EACH)
        await asyncio.gather(*calls)
        assert longest == MOST_WAITING
        assert set(crowd.refusals) == {REFUSED}
        assert crowd.right + crowd.refusals.total() == len(calls)
        assert crowd.refusals.total() > crowd.right > CAPACITY
        await until_idle(service.control)


async def test_few_huge_requests_fill_the_queue_as_many_small_ones_do() -> None:
    gate = StepGate()
    config = make_config(max_num_seqs=1, max_waiting_tokens=1000)
    model = make_fake_model(before_step=gate, max_model_len=1000, num_blocks=1024)
    async with running_service(model, config) as service:

        def huge(number: int) -> StartGeneration:
            return make_start(prompt=(number, *range(1, 90)) * 5, max_tokens=40)

        served = [asyncio.create_task(generate_ids(service, huge(1)))]
        await until(lambda: service.engine.load().num_running == 1)
        served += [asyncio.create_task(generate_ids(service, huge(number))) for number in (2, 3)]
        await until(lambda: service.engine.load().num_waiting == 2)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await generate_ids(service, huge(4))
        assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        gate.open()
        assert [len(ids) for ids in await asyncio.gather(*served)] == [40, 40, 40]


async def test_who_is_out_of_time_in_the_queue_is_never_computed() -> None:
    gate = StepGate()
    async with running_service(make_fake_model(before_step=gate), make_config(max_num_seqs=1)) as service:
        running = asyncio.create_task(generate_ids(service, make_start()))
        await until(lambda: service.engine.load().num_running == 1)
        late = service.generation.Generate(GenerateRequest(start=make_start(prompt=(9,) * 12)), timeout=0.2)
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in late:
                pass
        assert await late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        gate.open()
        assert await running == expected_output(PROMPT, 8)
        await until_idle(service.control)
        assert service.engine.load().totals.num_prefill_tokens == len(PROMPT)
