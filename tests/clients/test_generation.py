"""A request with an RPC of its own: order, early end, cancel, retries before the first token only."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import grpc
import pytest

from headrace.clients import (
    Accepted,
    Cancelled,
    DeadlineExceeded,
    Delta,
    Event,
    Finished,
    FinishReason,
    Generation,
    InferenceClient,
    InvalidArgument,
    Overloaded,
    ProtocolError,
    RequestOptions,
    RetryPolicy,
    TokenLogprob,
    TokenLogprobs,
    Unavailable,
)
from headrace.clients.generation import EventOrder
from headrace.v1 import generation_pb2
from tests.support.fake_scripts import (
    Accept,
    Fail,
    Say,
    Script,
    Skip,
    Step,
    bad_request,
    fails,
    retry_info,
    says,
    says_and_hangs,
    status_of,
)
from tests.support.fake_server import running_fake_server

QUICK = RetryPolicy(max_attempts=4, initial_backoff_s=0.001, max_backoff_s=0.002)
UNAVAILABLE = fails(grpc.StatusCode.UNAVAILABLE, "loading")


def says_then_fails(*texts: str, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> Script:
    async def script(start: generation_pb2.StartGeneration) -> AsyncIterator[Step]:
        yield Accept()
        for text in texts:
            yield Say(text)
        yield Fail(status_of(code, "gone", retry_info(0)))

    return script


async def collect(generation: Generation, events: list[Event]) -> None:
    async for event in generation:
        events.append(event)  # noqa: PERF401  what was read before an error counts


async def last_of(iterator: AsyncIterator[Event]) -> Event | None:
    last = None
    async for event in iterator:
        last = event
    return last


async def test_events_come_in_order_and_add_up() -> None:
    async with running_fake_server(says("a", "b", "c")) as server, InferenceClient(server.target) as client:
        events = [event async for event in client.generate("hello", temperature=0, request_id="mine")]
    assert isinstance(events[0], Accepted)
    assert [event.text for event in events if isinstance(event, Delta)] == ["a", "b", "c"]
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.reason is FinishReason.LENGTH
    assert (last.usage.num_prompt_tokens, last.usage.num_completion_tokens) == (3, 3)
    assert last.timings.time_to_first_token_s == pytest.approx(0.005)
    assert last.timings.queued_s is None
    assert server.record.starts[0].request_id == "mine"


async def test_the_whole_answer_is_the_same_streamed_and_at_once() -> None:
    async with running_fake_server() as server, InferenceClient(server.target) as client:
        streamed = await client.generate("to be or", max_tokens=5, request_id="r").answer()
        at_once = await client.generate_once("to be or", max_tokens=5, request_id="r")
    assert streamed == at_once
    assert streamed.text == "to be or to be "
    assert streamed.token_ids == (0, 1, 2, 3, 4)
    assert streamed.finished.reason is FinishReason.LENGTH


OPTIONS: list[RequestOptions] = [
    {"request_id": "r", "n": 3},
    {"request_id": "r", "n": 2, "logprobs": 2, "prompt_logprobs": 1},
    {"request_id": "r", "logprobs": 0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
async def test_several_sequences_and_logprobs_are_the_same_streamed_at_once_and_in_a_session(
    options: RequestOptions,
) -> None:
    async with running_fake_server() as server, InferenceClient(server.target) as client:
        at_once = await client.generate_once("to be or", **options)
        assert await client.generate("to be or", **options).answer() == at_once
        async with client.session() as session:
            assert await session.generate("to be or", **options).answer() == at_once
    texts = ["to be or ", "be or to ", "or to be "]
    assert [completion.text for completion in at_once.completions] == texts[: options.get("n", 1)]
    assert [completion.index for completion in at_once.completions] == list(range(options.get("n", 1)))
    for completion in at_once.completions:
        told = [entry.chosen.token_id for entry in completion.logprobs]
        assert told == ([0, 1, 2] if "logprobs" in options else [])
    told = [entry.chosen.token_id for entry in at_once.prompt_logprobs]
    assert told == ([1, 2] if "prompt_logprobs" in options else [])


async def test_a_logprob_says_which_token_how_likely_and_what_was_likelier() -> None:
    async with running_fake_server() as server, InferenceClient(server.target) as client:
        answer = await client.generate_once("to be", logprobs=1)
    assert answer.logprobs[1] == TokenLogprobs(
        chosen=TokenLogprob(1, -0.25, 2, "#1"), top=(TokenLogprob(0, 0.0, 1, "#0"),)
    )


async def test_events_of_different_sequences_interleave_and_tell_their_index() -> None:
    async with running_fake_server() as server, InferenceClient(server.target) as client:
        events = [event async for event in client.generate("to be", n=2)]
    assert [event.index for event in events if isinstance(event, Delta)] == [0, 1, 0, 1]
    assert [event.index for event in events if isinstance(event, Finished)] == [0, 1]


@pytest.mark.parametrize("indexes", [(2,), (0, 0), (1, 0, 1)], ids=str)
def test_an_end_of_a_sequence_that_can_have_none_is_noticed(indexes: tuple[int, ...]) -> None:
    order = EventOrder("r", num_sequences=2)
    *before, last = [
        generation_pb2.GenerationEvent(index=index, sequence=i, finished=generation_pb2.Finished())
        for i, index in enumerate(indexes)
    ]
    for message in before:
        order.take(message)
    with pytest.raises(ProtocolError):
        order.take(last)


async def test_breaking_out_of_the_loop_cancels_the_request_though_it_is_still_referred_to() -> None:
    async with running_fake_server(says_and_hangs) as server, InferenceClient(server.target) as client:
        generation = client.generate("hello")
        async for event in generation:
            if isinstance(event, Delta):
                break
        await server.record.until(lambda record: record.cancelled == [generation.request_id])


async def test_an_error_in_the_loop_cancels_the_request() -> None:
    async with running_fake_server(says_and_hangs) as server, InferenceClient(server.target) as client:

        async def read() -> None:
            async for _ in client.generate("hello", request_id="r"):
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await read()
        await server.record.until(lambda record: record.cancelled == ["r"])


async def test_leaving_async_with_cancels_the_request_whoever_holds_the_iterator() -> None:
    async with running_fake_server(says_and_hangs) as server, InferenceClient(server.target) as client:
        async with client.generate("hello", request_id="r") as generation:
            iterator = aiter(generation)
            await anext(iterator)
        await server.record.until(lambda record: record.cancelled == ["r"])
        with pytest.raises(Cancelled):
            await last_of(iterator)


async def test_cancel_ends_the_loop_of_another_task() -> None:
    async with running_fake_server(says_and_hangs) as server, InferenceClient(server.target) as client:
        generation = client.generate("hello", request_id="r")
        answer = asyncio.create_task(generation.answer())
        await server.record.until(lambda record: len(record.starts) == 1)
        generation.cancel()
        with pytest.raises(Cancelled, match="'r' was cancelled"):
            await answer
        await server.record.until(lambda record: record.cancelled == ["r"])
        generation.cancel()


async def test_cancelling_the_task_is_a_cancelled_task_and_cancels_the_request() -> None:
    async with running_fake_server(says_and_hangs) as server, InferenceClient(server.target) as client:
        answer = asyncio.create_task(client.generate("hello", request_id="r").answer())
        await server.record.until(lambda record: len(record.starts) == 1)
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        await server.record.until(lambda record: record.cancelled == ["r"])


async def test_a_request_cancelled_before_it_was_read_is_never_sent() -> None:
    async with running_fake_server() as server, InferenceClient(server.target) as client:
        generation = client.generate("hello")
        generation.cancel()
        with pytest.raises(Cancelled):
            await generation.answer()
    assert server.record.starts == []


async def test_events_can_be_read_once() -> None:
    async with running_fake_server() as server, InferenceClient(server.target) as client:
        generation = client.generate("hello", max_tokens=1)
        await generation.answer()
        with pytest.raises(RuntimeError, match="once"):
            await generation.answer()


async def test_unavailable_before_the_first_token_is_tried_again() -> None:
    scripts = (UNAVAILABLE, says_then_fails(), says("a"))
    async with running_fake_server(*scripts) as server, InferenceClient(server.target, retry=QUICK) as client:
        answer = await client.generate("hello", request_id="r").answer()
    assert answer.text == "a"
    assert [start.request_id for start in server.record.starts] == ["r", "r", "r"]


async def test_a_request_that_said_something_is_never_sent_again() -> None:
    async with (
        running_fake_server(says_then_fails("a"), says("never")) as server,
        InferenceClient(server.target, retry=QUICK) as client,
    ):
        events: list[Event] = []
        with pytest.raises(Unavailable, match="gone"):
            await collect(client.generate("hello"), events)
    assert [event.text for event in events if isinstance(event, Delta)] == ["a"]
    assert len(server.record.starts) == 1


async def test_pushback_with_a_delay_is_tried_again_and_without_one_is_not() -> None:
    scripts = (
        fails(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_info(0.001)),
        says("a"),
        fails(grpc.StatusCode.RESOURCE_EXHAUSTED, "too slow"),
    )
    async with running_fake_server(*scripts) as server, InferenceClient(server.target, retry=QUICK) as client:
        assert (await client.generate("hello").answer()).text == "a"
        with pytest.raises(Overloaded, match="too slow"):
            await client.generate("hello").answer()
    assert len(server.record.starts) == 3


async def test_retries_end() -> None:
    async with (
        running_fake_server(default=UNAVAILABLE) as server,
        InferenceClient(server.target, retry=QUICK) as client,
    ):
        with pytest.raises(Unavailable, match="loading"):
            await client.generate("hello").answer()
        with pytest.raises(Unavailable, match="loading"):
            await client.generate_once("hello")
    assert len(server.record.starts) == 2 * QUICK.max_attempts


async def test_what_is_refused_for_good_is_not_repeated() -> None:
    refusal = fails(grpc.StatusCode.INVALID_ARGUMENT, "bad", bad_request(sampling__top_p="must be above 0"))
    async with running_fake_server(default=refusal) as server, InferenceClient(server.target) as client:
        with pytest.raises(InvalidArgument) as caught:
            await client.generate("hello", top_p=0).answer()
    assert caught.value.violations[0].field == "sampling.top_p"
    assert len(server.record.starts) == 1


async def test_cancel_ends_the_wait_between_two_attempts() -> None:
    refusal = fails(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_info(20))
    async with running_fake_server(default=refusal) as server, InferenceClient(server.target) as client:
        generation = client.generate("hello")
        answer = asyncio.create_task(generation.answer())
        await server.record.until(lambda record: len(record.starts) == 1)
        generation.cancel()
        with pytest.raises(Cancelled):
            await answer
    assert len(server.record.starts) == 1


async def test_a_deadline_ends_a_silent_request() -> None:
    async with running_fake_server(says_and_hangs) as server, InferenceClient(server.target) as client:
        with pytest.raises(DeadlineExceeded, match="the deadline passed"):
            await client.generate("hello", timeout_s=0.2, request_id="r").answer()
        await server.record.until(lambda record: record.cancelled == ["r"])


async def test_a_lost_event_is_noticed() -> None:
    async def loses_one(start: generation_pb2.StartGeneration) -> AsyncIterator[Step]:
        yield Accept()
        yield Skip()
        yield Say("b")

    async with running_fake_server(loses_one) as server, InferenceClient(server.target) as client:
        with pytest.raises(ProtocolError, match="event 2 came where 1 was due"):
            await client.generate("hello").answer()


async def test_nobody_there_is_unavailable_after_all_attempts() -> None:
    async with InferenceClient("127.0.0.1:1", retry=QUICK, rng=random.Random(0)) as client:
        with pytest.raises(Unavailable):
            await client.generate("hello").answer()
