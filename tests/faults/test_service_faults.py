"""Whatever breaks behind the service: each caller gets exactly one end; the next one is served, or told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import grpc
import pytest
from google.rpc import code_pb2

from headrace.engine.scheduling.plan import StepPlan
from headrace.v1.generation_pb2 import ChatMessage, ChatPrompt, GenerateRequest, StartGeneration
from tests.support.fake_runner import FakeTokenizer, expected_output, make_fake_model
from tests.support.requests import make_config
from tests.support.service import (
    PROMPT,
    RawSession,
    RunningService,
    generate,
    generate_ids,
    ids_of,
    is_ended,
    make_start,
    reason_of,
    running_service,
    until,
)

SECRET = "tell-nobody"


class Fault:
    """A step hook that raises from the moment it is armed on."""

    def __init__(self, make: Callable[[], BaseException]) -> None:
        self._make = make
        self.is_armed = False

    def __call__(self, plan: StepPlan) -> None:
        if self.is_armed:
            raise self._make()


async def outcome_of(service: RunningService, start: StartGeneration) -> grpc.StatusCode:
    """How one streamed request ends."""
    call = service.generation.Generate(GenerateRequest(start=start))
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    assert SECRET not in (await call.details() or "")
    return await call.code()


@pytest.mark.parametrize("make", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
async def test_a_dead_engine_ends_everybody_once_and_tells_who_comes_later(
    make: Callable[[str], BaseException],
) -> None:
    fault = Fault(lambda: make(SECRET))
    config = make_config(max_num_seqs=20, max_num_batched_tokens=64)
    model = make_fake_model(before_step=fault, num_blocks=4096, max_model_len=16384)
    async with running_service(model, config) as service:
        streams = [
            asyncio.create_task(outcome_of(service, make_start(max_tokens=16000, prompt=(i + 1, 2))))
            for i in range(20)
        ]
        session = RawSession(service.generation)
        labels = [f"r{i}" for i in range(20)]
        await session.start(*(make_start(label, max_tokens=16000) for label in labels))
        await until(lambda: service.engine.load().num_running + service.engine.load().num_waiting == 40)
        fault.is_armed = True
        assert set(await asyncio.gather(*streams)) == {grpc.StatusCode.INTERNAL}
        await session.until_end_of(*labels)
        assert await session.half_close() is grpc.StatusCode.OK
        assert await outcome_of(service, make_start()) is grpc.StatusCode.UNAVAILABLE
        assert service.engine.is_dead
    for label in labels:
        events = session.events[label]
        assert [is_ended(events[: i + 1]) for i in range(len(events))] == [False] * (len(events) - 1) + [True]
        assert (events[-1].error.code, reason_of(events[-1].error)) == (code_pb2.INTERNAL, "ENGINE_DEAD")


async def test_a_session_outlives_the_engine_and_says_so_to_each_new_request() -> None:
    fault = Fault(lambda: SystemExit(SECRET))
    async with running_service(make_fake_model(before_step=fault)) as service:
        session = RawSession(service.generation)
        fault.is_armed = True
        await session.start(make_start("first"))
        await session.until_end_of("first")
        await session.start(make_start("second"))
        await session.until_end_of("second")
        assert await session.half_close() is grpc.StatusCode.OK
    assert session.events["second"][-1].error.code == code_pb2.UNAVAILABLE


async def test_a_step_that_fails_once_harms_nobody() -> None:
    fails = iter([False, True, False])

    def fail_once(plan: StepPlan) -> None:
        if next(fails, False):
            raise MemoryError(SECRET)

    async with running_service(make_fake_model(before_step=fail_once)) as service:
        assert await generate_ids(service, make_start()) == expected_output(PROMPT, 8)
        await service.engine.wait_idle()
        assert service.engine.load().blocks.live == 0


async def test_a_request_that_always_fails_fails_alone() -> None:
    poison = (66, 77, 88)

    def fail_on_poison(plan: StepPlan) -> None:
        if any(row.token_ids[: len(poison)] == poison for row in plan.rows):
            raise ValueError(SECRET)

    async with running_service(make_fake_model(before_step=fail_on_poison)) as service:
        session = RawSession(service.generation)
        await session.start(make_start("good", max_tokens=30), make_start("bad", prompt=poison))
        assert await outcome_of(service, make_start(prompt=poison)) is grpc.StatusCode.INTERNAL
        assert await session.half_close() is grpc.StatusCode.OK
        assert await generate_ids(service, make_start()) == expected_output(PROMPT, 8)
    assert ids_of(session.events["good"]) == expected_output(PROMPT, 30)
    assert reason_of(session.events["bad"][-1].error) == "REQUEST_FAILED"
    assert SECRET not in str(session.events["bad"])


class BrokenTokenizer(FakeTokenizer):
    """Fails on every text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise RuntimeError(SECRET)

    def encode_chat(self, rendered: str) -> list[int]:
        raise RecursionError(SECRET)


async def test_a_tokenizer_that_fails_harms_only_who_needed_it() -> None:
    chat = ChatPrompt(messages=[ChatMessage(role="user", content="hi")])
    async with running_service(make_fake_model(tokenizer=BrokenTokenizer())) as service:
        session = RawSession(service.generation)
        await session.start(
            StartGeneration(request_id="text", text="x"),
            make_start("ids"),
            StartGeneration(request_id="chat", chat=chat),
        )
        assert await session.half_close() is grpc.StatusCode.OK
        assert await outcome_of(service, StartGeneration(text="x")) is grpc.StatusCode.INTERNAL
        assert (await generate(service, make_start()))[-1].HasField("finished")
    for label in ("text", "chat"):
        (event,) = session.events[label]
        assert event.error.code == code_pb2.INTERNAL
        assert SECRET not in str(event)
    assert ids_of(session.events["ids"]) == expected_output(PROMPT, 8)


async def test_five_hundred_calls_cancelled_at_any_moment_leave_nothing_behind() -> None:
    async with running_service(config=make_config(max_num_seqs=8, max_num_batched_tokens=32)) as service:

        async def cancelled(i: int) -> None:
            call = service.generation.Generate(GenerateRequest(start=make_start(max_tokens=20)))
            for _ in range(i % 4):
                await call.read()
            call.cancel()

        neighbour = asyncio.create_task(generate_ids(service, make_start(max_tokens=100)))
        for batch in range(10):
            await asyncio.gather(*(cancelled(batch + i) for i in range(50)))
        assert await neighbour == expected_output(PROMPT, 100)
        await service.engine.wait_idle()
        load = service.engine.load()
        assert (load.num_running, load.num_waiting, load.blocks.live) == (0, 0, 0)
