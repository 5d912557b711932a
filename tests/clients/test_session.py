"""Many requests over one stream: each gets its own, whatever happens to the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from headrace.clients import (
    AlreadyExists,
    Cancelled,
    ConnectionOptions,
    Delta,
    Event,
    Finished,
    FinishReason,
    InferenceClient,
    InvalidArgument,
    NotFound,
    Overloaded,
    ProtocolError,
    RetryPolicy,
    Unavailable,
)
from headrace.v1 import generation_pb2
from tests.support.fake_scripts import (
    Accept,
    Fail,
    Gate,
    Say,
    Skip,
    Step,
    bad_request,
    echo,
    fails,
    retry_info,
    says,
    status_of,
)
from tests.support.fake_server import running_fake_server

QUICK = RetryPolicy(max_attempts=4, initial_backoff_s=0.001, max_backoff_s=0.002)


async def read(generation: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in generation]


async def test_requests_interleave_and_each_gets_its_own() -> None:
    gate = Gate()
    async with (
        running_fake_server(gate.says("a"), says("b")) as server,
        InferenceClient(server.target) as client,
        client.session() as session,
    ):
        slow, quick = session.generate("one"), session.generate("two")
        # The one that was sent later is answered whole while the other one waits.
        assert (await quick.answer()).text == "b"
        assert session.num_open == 1
        gate.opened.set()
        assert (await slow.answer()).text == "first a"
        assert session.num_open == 0
    assert server.record.num_sessions == 1


async def test_two_hundred_requests_share_one_stream() -> None:
    async with (
        running_fake_server() as server,
        InferenceClient(server.target) as client,
        client.session() as session,
    ):
        answers = await asyncio.gather(
            *(session.generate(f"word{i}", max_tokens=1 + i % 7).answer() for i in range(200))
        )
        assert [answer.text for answer in answers] == [f"word{i} " * (1 + i % 7) for i in range(200)]
    assert server.record.num_sessions == 1
    assert len({start.request_id for start in server.record.starts}) == 200


async def test_a_request_that_fails_harms_no_other() -> None:
    gate = Gate()
    refusal = fails(grpc.StatusCode.INVALID_ARGUMENT, "bad", bad_request(stop__max_tokens="too many"))
    async with (
        running_fake_server(
            gate.says("a"), refusal, fails(grpc.StatusCode.NOT_FOUND, "no such model")
        ) as server,
        InferenceClient(server.target) as client,
        client.session() as session,
    ):
        running = session.generate("one")
        with pytest.raises(InvalidArgument) as caught:
            await session.generate("two").answer()
        with pytest.raises(NotFound):
            await session.generate("three").answer()
        gate.opened.set()
        assert (await running.answer()).text == "first a"
    assert caught.value.violations[0].field == "stop.max_tokens"


async def test_a_request_that_nobody_reads_does_not_hold_up_the_others() -> None:
    async with (
        running_fake_server() as server,
        InferenceClient(server.target) as client,
        client.session() as session,
    ):
        unread = session.generate("unread", max_tokens=5000)
        assert (await session.generate("read", max_tokens=3).answer()).text == "read read read "
    # It was finished before the session was, and can still be read; what waited was joined.
    events = await read(aiter(unread))
    deltas = [event for event in events if isinstance(event, Delta)]
    assert sum(len(delta.token_ids) for delta in deltas) == 5000
    assert len(deltas) == 1


async def test_cancel_ends_one_request_and_the_server_has_the_last_word() -> None:
    gate = Gate()
    async with (
        running_fake_server(gate.says(), gate.says("a")) as server,
        InferenceClient(server.target) as client,
        client.session() as session,
    ):
        given_up, kept = session.generate("one"), session.generate("two")
        await server.record.until(lambda record: len(record.starts) == 2)
        given_up.cancel()
        given_up.cancel()
        answer = await given_up.answer()
        assert answer.finished.reason is FinishReason.CANCELLED
        gate.opened.set()
        assert (await kept.answer()).text == "first a"
        kept.cancel()
    assert server.record.cancelled == [given_up.request_id]


async def test_breaking_out_of_a_requests_loop_cancels_it_alone() -> None:
    gate = Gate()
    async with (
        running_fake_server(gate.says(), gate.says("a")) as server,
        InferenceClient(server.target) as client,
        client.session() as session,
    ):
        given_up, kept = session.generate("one"), session.generate("two")
        async for event in given_up:
            if isinstance(event, Delta):
                break
        await server.record.until(lambda record: record.cancelled == [given_up.request_id])
        gate.opened.set()
        assert (await kept.answer()).text == "first a"


async def test_pushback_is_tried_again_on_the_same_stream_until_something_was_said() -> None:
    async def fails_late(start: generation_pb2.StartGeneration) -> AsyncIterator[Step]:
        yield Accept()
        yield Say("a")
        yield Fail(status_of(grpc.StatusCode.UNAVAILABLE, "draining"))

    scripts = (
        fails(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_info(0.001)),
        fails(grpc.StatusCode.UNAVAILABLE, "loading"),
        says("a"),
        fails_late,
        fails(grpc.StatusCode.RESOURCE_EXHAUSTED, "for good"),
    )
    async with (
        running_fake_server(*scripts) as server,
        InferenceClient(server.target, retry=QUICK) as client,
        client.session() as session,
    ):
        assert (await session.generate("one", request_id="r").answer()).text == "a"
        with pytest.raises(Unavailable, match="draining"):
            await session.generate("two").answer()
        with pytest.raises(Overloaded, match="for good"):
            await session.generate("three").answer()
    assert [start.request_id for start in server.record.starts[:3]] == ["r"] * 3
    assert len(server.record.starts) == 5
    assert server.record.num_sessions == 1


async def test_retries_in_a_session_end() -> None:
    refusal = fails(grpc.StatusCode.UNAVAILABLE, "loading")
    async with (
        running_fake_server(default=refusal) as server,
        InferenceClient(server.target, retry=QUICK) as client,
        client.session() as session,
    ):
        with pytest.raises(Unavailable, match="loading"):
            await session.generate("one").answer()
    assert len(server.record.starts) == QUICK.max_attempts


async def test_cancel_ends_the_wait_between_two_attempts() -> None:
    refusal = fails(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_info(20))
    async with (
        running_fake_server(refusal, default=echo) as server,
        InferenceClient(server.target) as client,
        client.session() as session,
    ):
        generation = session.generate("one")
        # The answer to a later request shows that the refusal has arrived.
        await session.generate("two").answer()
        generation.cancel()
        with pytest.raises(Cancelled):
            await generation.answer()
    assert len(server.record.starts) == 2
    assert server.record.cancelled == []


async def test_an_id_is_unique_among_open_requests_only() -> None:
    gate = Gate()
    async with (
        running_fake_server(gate.says("a")) as server,
        InferenceClient(server.target) as client,
        client.session() as session,
    ):
        first = session.generate("one", request_id="r")
        with pytest.raises(AlreadyExists, match="'r'"):
            session.generate("two", request_id="r")
        gate.opened.set()
        await first.answer()
        assert (await session.generate("three", request_id="r").answer()).text == "three "


async def test_a_lost_event_fails_that_request_alone() -> None:
    async def loses_one(start: generation_pb2.StartGeneration) -> AsyncIterator[Step]:
        yield Accept()
        yield Skip()
        yield Say("b")
        await asyncio.Event().wait()

    gate = Gate()
    async with (
        running_fake_server(gate.says("a"), loses_one) as server,
        InferenceClient(server.target) as client,
        client.session() as session,
    ):
        kept, broken = session.generate("one"), session.generate("two")
        with pytest.raises(ProtocolError, match="event 2 came where 1 was due"):
            await broken.answer()
        await server.record.until(lambda record: record.cancelled == [broken.request_id])
        gate.opened.set()
        assert (await kept.answer()).text == "first a"


async def test_a_request_too_long_for_the_connection_harms_no_other() -> None:
    gate = Gate()
    async with (
        running_fake_server(gate.says("a")) as server,
        InferenceClient(server.target, connection=ConnectionOptions(max_message_bytes=1000)) as client,
        client.session() as session,
    ):
        running = session.generate("one")
        with pytest.raises(InvalidArgument, match="up to 1000"):
            session.generate("x" * 2000)
        gate.opened.set()
        assert (await running.answer()).text == "first a"


async def test_nobody_there_is_told_when_the_session_is_entered() -> None:
    async with InferenceClient("127.0.0.1:1", retry=QUICK) as client:
        with pytest.raises(Unavailable, match=r"no server answers at 127\.0\.0\.1:1"):
            async with client.session():
                pytest.fail("there is no server")


async def test_a_session_that_was_not_entered_says_how_to() -> None:
    async with running_fake_server() as server, InferenceClient(server.target) as client:
        with pytest.raises(RuntimeError, match="async with"):
            client.session().generate("one")


async def test_the_last_event_of_every_request_is_its_finish() -> None:
    async with (
        running_fake_server() as server,
        InferenceClient(server.target) as client,
        client.session() as session,
    ):
        events = await read(aiter(session.generate("a b c")))
    assert isinstance(events[-1], Finished)
    assert sum(isinstance(event, Finished) for event in events) == 1
