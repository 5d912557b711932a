"""However a session ends, its requests end as well: nothing hangs, nothing runs on unseen."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from headrace.clients import (
    Cancelled,
    DeadlineExceeded,
    Delta,
    FinishReason,
    InferenceClient,
    RetryPolicy,
    Unavailable,
)
from tests.support.fake_scripts import (
    Gate,
    fails,
    says,
)
from tests.support.fake_server import running_fake_server

QUICK = RetryPolicy(max_attempts=4, initial_backoff_s=0.001, max_backoff_s=0.002)


async def test_when_the_stream_breaks_every_open_request_raises_what_broke_it() -> None:
    gate, stuck = Gate(), Gate()
    scripts = (says("done"), stuck.says(), stuck.says(), gate.breaks(), stuck.says())
    async with (
        running_fake_server(*scripts) as server,
        InferenceClient(server.target, retry=QUICK) as client,
        client.session() as session,
    ):
        finished = session.generate("finished")
        await finished.answer()
        reading = [asyncio.create_task(session.generate(f"{i}").answer()) for i in range(3)]
        unread = session.generate("unread")
        await server.record.until(lambda record: len(record.starts) == 5)
        gate.opened.set()
        outcomes = await asyncio.gather(*reading, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Unavailable] * 3
        with pytest.raises(Unavailable, match="connection lost"):
            await unread.answer()
        with pytest.raises(Unavailable, match="connection lost"):
            session.generate("late")
        assert session.num_open == 0


async def test_what_arrived_before_the_break_is_read_first() -> None:
    gate = Gate()
    async with (
        running_fake_server(gate.breaks()) as server,
        InferenceClient(server.target) as client,
        client.session() as session,
    ):
        texts = []

        async def read_texts() -> None:
            async for event in session.generate("one"):
                if isinstance(event, Delta):
                    texts.append(event.text)
                    gate.opened.set()

        with pytest.raises(Unavailable):
            await read_texts()
    assert texts == ["first "]


async def test_a_server_that_ends_the_stream_early_is_noticed() -> None:
    gate = Gate()
    async with (
        running_fake_server(gate.says()) as server,
        InferenceClient(server.target) as client,
        client.session() as session,
    ):
        generation = session.generate("one")
        await server.record.until(lambda record: len(record.starts) == 1)
        await server.stop()
        with pytest.raises((Unavailable, Cancelled)):
            await generation.answer()


async def test_leaving_the_block_finishes_what_runs_and_then_half_closes() -> None:
    gate = Gate()
    async with running_fake_server(gate.says("a")) as server, InferenceClient(server.target) as client:
        async with client.session() as session:
            generation = session.generate("one")
            await server.record.until(lambda record: len(record.starts) == 1)
            asyncio.get_running_loop().call_soon(gate.opened.set)
        assert (await generation.answer()).text == "first a"
        await server.record.until(lambda record: record.half_closes == 1)
        assert server.record.cancelled == []
        with pytest.raises(RuntimeError, match="closed"):
            session.generate("late")


async def test_a_request_can_be_cancelled_while_the_session_is_being_left() -> None:
    gate = Gate()
    async with running_fake_server(gate.says()) as server, InferenceClient(server.target) as client:
        async with client.session() as session:
            generation = session.generate("one")
            await server.record.until(lambda record: len(record.starts) == 1)
            asyncio.get_running_loop().call_soon(generation.cancel)
        assert (await generation.answer()).finished.reason is FinishReason.CANCELLED


async def test_an_error_in_the_block_cancels_what_runs() -> None:
    gate = Gate()
    async with running_fake_server(gate.says()) as server, InferenceClient(server.target) as client:
        generations = []

        async def use() -> None:
            async with client.session() as session:
                generations.append(session.generate("one"))
                await server.record.until(lambda record: len(record.starts) == 1)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await use()
        await server.record.until(lambda record: record.cancelled == [generations[0].request_id])
        with pytest.raises(Cancelled, match="session was closed"):
            await generations[0].answer()


async def test_closing_with_cancel_ends_every_request() -> None:
    gate = Gate()
    async with running_fake_server(default=gate.says()) as server, InferenceClient(server.target) as client:
        async with client.session() as session:
            reading = [asyncio.create_task(session.generate(f"{i}").answer()) for i in range(3)]
            await server.record.until(lambda record: len(record.starts) == 3)
            await session.close(cancel=True)
            outcomes = await asyncio.gather(*reading, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [Cancelled] * 3
        await server.record.until(lambda record: len(record.cancelled) == 3)


async def test_cancelling_the_task_that_leaves_the_block_cancels_what_runs() -> None:
    gate = Gate()
    async with running_fake_server(gate.says()) as server, InferenceClient(server.target) as client:

        async def use() -> None:
            async with client.session() as session:
                session.generate("one", request_id="r")

        using = asyncio.create_task(use())
        await server.record.until(lambda record: len(record.starts) == 1)
        using.cancel()
        with pytest.raises(asyncio.CancelledError):
            await using
        await server.record.until(lambda record: record.cancelled == ["r"])


async def test_a_request_that_waits_to_be_sent_again_is_sent_before_the_session_ends() -> None:
    scripts = (fails(grpc.StatusCode.UNAVAILABLE, "loading"), says("a"))
    async with running_fake_server(*scripts) as server, InferenceClient(server.target, retry=QUICK) as client:
        async with client.session() as session:
            generation = session.generate("one")
        assert (await generation.answer()).text == "a"


async def test_a_sessions_own_deadline_ends_its_requests() -> None:
    gate = Gate()
    async with (
        running_fake_server(gate.says()) as server,
        InferenceClient(server.target) as client,
        client.session(timeout_s=0.3) as session,
    ):
        with pytest.raises(DeadlineExceeded):
            await session.generate("one").answer()


async def test_an_empty_session_ends_well() -> None:
    async with running_fake_server() as server, InferenceClient(server.target) as client:
        async with client.session() as session:
            assert session.num_open == 0
        await server.record.until(lambda record: record.half_closes == 1)
