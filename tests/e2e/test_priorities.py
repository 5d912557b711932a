"""Priorities, order and cached conversations, from the wire to the scheduler and back."""

import asyncio
from functools import partial

from headrace.v1.generation_pb2 import ChatMessage, ChatPrompt, StartGeneration, StopOptions
from tests.support.fake_runner import make_fake_model
from tests.support.requests import make_config
from tests.support.service import (
    RunningService,
    generate,
    generate_ids,
    make_start,
    running_service,
    until,
)
from tests.support.step_gate import StepGate


async def test_a_request_of_higher_priority_is_served_before_those_that_wait() -> None:
    gate = StepGate()
    model, config = make_fake_model(before_step=gate), make_config(max_num_seqs=1, priority_ageing_s=1e6)
    ended: list[str] = []

    async def serve(start: StartGeneration) -> None:
        await generate_ids(service, start)
        ended.append(start.request_id)

    async with running_service(model, config) as service, asyncio.TaskGroup() as tasks:
        priorities = {"running": 0, "usual": 0, "low": -3, "high": 7}
        for number, (label, priority) in enumerate(priorities.items()):
            tasks.create_task(serve(make_start(label, prompt=(number, 1, 2), priority=priority)))
            await until(partial(_has_live, service, number + 1))
        gate.open()
    assert ended == ["running", "high", "usual", "low"]


def _has_live(service: RunningService, wanted: int) -> bool:
    load = service.engine.load()
    return load.num_running + load.num_waiting == wanted


async def test_turn_two_of_a_chat_finds_the_blocks_of_turn_one_answer_included() -> None:
    first = [ChatMessage(role="user", content="Where does the water go?")]
    async with running_service(make_fake_model(block_size=4)) as service:
        events = await generate(service, _chat(first))
        answer = "".join(event.delta.text for event in events)
        assert len(answer) == 12
        prompt_tokens = events[0].accepted.prompt_tokens
        second = [
            *first,
            ChatMessage(role="assistant", content=answer),
            ChatMessage(role="user", content="And then?"),
        ]
        usage = (await generate(service, _chat(second)))[-1].finished.usage
    # All full blocks of what was computed: prompt and answer, but for the last token, which was only drawn.
    assert usage.cached_tokens == (prompt_tokens + 12 - 1) // 4 * 4 > prompt_tokens


def _chat(messages: list[ChatMessage]) -> StartGeneration:
    return StartGeneration(chat=ChatPrompt(messages=messages), stop=StopOptions(max_tokens=12))
