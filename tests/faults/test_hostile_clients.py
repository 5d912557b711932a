"""Whoever means no good hurts himself alone: beside each hostile client a good one gets what it gets alone.

The real program over a tiny model; every attack ends with an idle server that answers as at its start.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from google.protobuf.struct_pb2 import Struct

from headrace.v1.control_pb2 import GetLoadRequest
from headrace.v1.generation_pb2 import (
    ChatMessage,
    ChatPrompt,
    Constraint,
    GenerateRequest,
    OutputOptions,
    SamplingOptions,
    StartGeneration,
    StopOptions,
    TokenIds,
)
from tests.support import http2
from tests.support.hostile import ATTACKS, GENERATE, connected
from tests.support.served_tiny import ServedTiny, ids_over, served_tiny
from tests.support.service import make_start
from tests.support.tiny_models import VOCAB_SIZE

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

MAX_GROWTH_BYTES = 200 * 2**20
MAX_UNREAD_BYTES = 16 * 2**20
MAX_LEFT_BYTES = 8192
"""By a call that is over: gRPC's own state of one takes more."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServedTiny]:
    async with served_tiny(tmp_path_factory.mktemp("hostile")) as tiny:
        yield tiny


@pytest.mark.parametrize("name", ATTACKS)
async def test_an_attack_on_the_connection_hurts_only_itself(served: ServedTiny, name: str) -> None:
    before_bytes = served.rss_bytes
    attacking = asyncio.create_task(ATTACKS[name](served.process.port))
    largest_bytes, has_ended = before_bytes, False
    try:
        while not has_ended:
            # At least one answer begins after the attack has ended.
            has_ended = attacking.done()
            assert await ids_over(served.process) == served.long
            largest_bytes = max(largest_bytes, served.rss_bytes)
    finally:
        # However it ends, it is not the next test's.
        await attacking
    await served.assert_unharmed()
    assert largest_bytes - before_bytes < MAX_GROWTH_BYTES


def nested(depth: int) -> str:
    """A JSON Schema that goes down so far."""
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


def variables(depth: int) -> Struct:
    """Template variables that go down so far."""
    struct = Struct()
    place = struct
    for _ in range(depth):
        place = place.get_or_create_struct("a")
    return struct


def with_chat(**fields: object) -> StartGeneration:
    return StartGeneration(chat=ChatPrompt(messages=[ChatMessage(role="user", content="x")], **fields))  # type: ignore[arg-type]


HUGE = {
    "n": make_start(n=10**6),
    "logprobs of the vocabulary": make_start(output=OutputOptions(logprobs=VOCAB_SIZE)),
    "logprobs of the vocabulary but one": make_start(output=OutputOptions(prompt_logprobs=VOCAB_SIZE - 1)),
    "biases of more than the vocabulary": make_start(
        sampling=SamplingOptions(logit_bias=dict.fromkeys(range(10000), 1.0))
    ),
    "allowed ids": make_start(sampling=SamplingOptions(allowed_token_ids=TokenIds(ids=range(200_000)))),
    "stop strings": make_start(stop=StopOptions(max_tokens=4, strings=["s" * 10_000] * 1000)),
    "a prompt of ids": make_start(prompt=[5] * 1_000_000),
    "a prompt of text": StartGeneration(text="x " * 1_000_000),
    "too much text": StartGeneration(text="x" * (3 * 2**20)),
    "a deep schema": make_start(constraint=Constraint(json_schema=nested(5000))),
    "a long schema": make_start(constraint=Constraint(json_schema='{"enum":[' + '"a",' * 300_000 + '"b"]}')),
    "a template of one's own": with_chat(template_variables=Struct(fields={})),
    "many messages": StartGeneration(
        chat=ChatPrompt(messages=[ChatMessage(role="user", content="x")] * 100_000)
    ),
    "priority": make_start(priority=2**31 - 1),
    "a label": make_start("l" * 1_000_000),
    "a cache salt": make_start(cache={"salt": "s" * 1_000_000}),
}


@pytest.mark.parametrize("name", HUGE)
async def test_a_request_without_measure_is_refused_before_anything_is_done(
    served: ServedTiny, name: str
) -> None:
    start = HUGE[name]
    if name == "a template of one's own":
        start.chat.template_variables.update({"chat_template": "{% for i in range(10**9) %}x{% endfor %}"})
    before_bytes = served.rss_bytes
    neighbour = asyncio.create_task(ids_over(served.process))
    call = served.process.generation.Generate(GenerateRequest(start=start), timeout=60)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await call.read()
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT, refusal.value.details()
    assert await neighbour == served.long
    assert served.rss_bytes - before_bytes < MAX_GROWTH_BYTES
    await served.assert_unharmed()


async def test_calls_that_are_cancelled_leave_no_memory_behind(served: ServedTiny) -> None:
    async def cancelled() -> None:
        start = make_start(prompt=[5, 6, 7], max_tokens=50)
        call = served.process.generation.Generate(GenerateRequest(start=start), timeout=60)
        await call.read()
        call.cancel()

    async def cancel(num_calls: int) -> int:
        for _ in range(num_calls // 20):
            await asyncio.gather(*(cancelled() for _ in range(20)))
        await served.assert_unharmed()
        return served.rss_bytes

    # What is kept for later calls is there after the first ones.
    warm_bytes = await cancel(400)
    assert await cancel(1200) - warm_bytes < 1200 * MAX_LEFT_BYTES
    await served.assert_unharmed()


async def test_answers_that_nobody_reads_take_no_more_memory_once_they_are_paused(tmp_path: Path) -> None:
    num_readers = 50
    start = make_start(
        prompt=[5, 6, 7], max_tokens=240, output=OutputOptions(logprobs=20), stop=StopOptions(ignore_eos=True)
    )
    encoded = GenerateRequest(start=start).SerializeToString()
    calls = b"".join(
        http2.call_headers(stream, GENERATE) + http2.message(stream, encoded)
        for stream in range(1, 2 * num_readers, 2)
    )
    async with served_tiny(tmp_path, "--max-unread-tokens", "32") as served:
        async with connected(served.process.port) as connection:
            await connection.send(http2.PREFACE + http2.settings(initial_window_size=0), calls)
            while (await served.process.control.GetLoad(GetLoadRequest())).num_paused < num_readers:
                assert await ids_over(served.process) == served.long
            paused_bytes = served.rss_bytes
            for _ in range(20):
                assert await ids_over(served.process) == served.long
            assert served.rss_bytes - paused_bytes < MAX_UNREAD_BYTES
        await served.assert_unharmed()


async def test_a_message_beyond_the_limit_fails_alone(served: ServedTiny) -> None:
    neighbour = asyncio.create_task(ids_over(served.process))
    start = StartGeneration(text="x" * (17 * 2**20))
    options = [("grpc.max_send_message_length", 2**30)]
    async with grpc.aio.insecure_channel(served.address, options=options) as channel:
        send = channel.unary_stream(
            "/headrace.v1.GenerationService/Generate",
            request_serializer=GenerateRequest.SerializeToString,
            response_deserializer=None,
        )
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await send(GenerateRequest(start=start), timeout=60).read()
        assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "16777216" in (refusal.value.details() or "")
    assert await neighbour == served.long
    await served.assert_unharmed()
