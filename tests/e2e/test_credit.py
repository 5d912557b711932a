"""A Session's request is told as many tokens as its client has room for; who takes none is given up."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import code_pb2

from headrace.service.limits import Limits
from headrace.v1.generation_pb2 import (
    FINISH_REASON_CANCELLED,
    GenerateOnceRequest,
    GrantCredit,
    SessionRequest,
)
from tests.support.fake_runner import expected_output, make_fake_model
from tests.support.service import (
    PROMPT,
    RawSession,
    generate_ids,
    ids_of,
    make_start,
    reason_of,
    running_service,
    status_of,
    violated_fields,
)


async def grant(session: RawSession, label: str, tokens: int) -> None:
    await session.call.write(SessionRequest(grant_credit=GrantCredit(request_id=label, tokens=tokens)))


async def until_told(session: RawSession, label: str, num_tokens: int) -> None:
    while len(ids_of(session.events.get(label, []))) < num_tokens:
        await session.next()


async def test_so_many_tokens_come_as_were_granted_and_nothing_is_lost() -> None:
    async with running_service() as service:
        session = RawSession(service.generation)
        await session.start(make_start("a", max_tokens=30, initial_credit=3))
        await until_told(session, "a", 3)
        # It is made by now, and waits; others go on meanwhile.
        await service.engine.wait_idle()
        await session.start(make_start("b", max_tokens=20))
        await session.until_end_of("b")
        assert ids_of(session.events["a"]) == expected_output(PROMPT, 3)
        for granted, total in ((1, 4), (5, 9), (1, 10)):
            await grant(session, "a", granted)
            await until_told(session, "a", total)
            await session.start(make_start(f"c{total}", max_tokens=2))
            await session.until_end_of(f"c{total}")
            assert ids_of(session.events["a"]) == expected_output(PROMPT, total)
        await grant(session, "a", 1000)
        await session.until_end_of("a")
        assert await session.half_close() is grpc.StatusCode.OK
    events = session.events["a"]
    assert ids_of(events) == expected_output(PROMPT, 30)
    assert [event.sequence for event in events] == list(range(len(events)))


async def test_an_exact_credit_also_brings_the_end() -> None:
    async with running_service() as service:
        session = RawSession(service.generation)
        await session.start(
            make_start("a", max_tokens=8, initial_credit=8), make_start("b", initial_credit=0)
        )
        await session.until_end_of("a")
        await grant(session, "b", 8)
        assert await session.half_close() is grpc.StatusCode.OK
    for label in ("a", "b"):
        assert ids_of(session.events[label]) == expected_output(PROMPT, 8)


async def test_a_cancel_needs_no_credit() -> None:
    model = make_fake_model(max_model_len=4096, num_blocks=2048)
    async with running_service(model) as service:
        session = RawSession(service.generation)
        await session.start(make_start("a", max_tokens=4000, initial_credit=2))
        await until_told(session, "a", 2)
        await session.cancel("a")
        await session.until_end_of("a")
        assert await session.half_close() is grpc.StatusCode.OK
    ids = ids_of(session.events["a"])
    assert ids == expected_output(PROMPT, len(ids))
    assert session.events["a"][-1].finished.reason == FINISH_REASON_CANCELLED


async def test_who_grants_nothing_for_long_loses_that_request_alone() -> None:
    async with running_service(limits=Limits(slow_reader_s=1.0)) as service:
        session = RawSession(service.generation)
        await session.start(make_start("a", max_tokens=30, initial_credit=3))
        await session.until_end_of("a")
        failure = session.events["a"][-1].error
        assert (failure.code, reason_of(failure)) == (code_pb2.RESOURCE_EXHAUSTED, "SLOW_READER")
        await grant(session, "a", 7)  # too late, and no error: it has ended
        await session.start(make_start("b"))
        assert await session.half_close() is grpc.StatusCode.OK
        assert await generate_ids(service, make_start()) == expected_output(PROMPT, 8)
        assert service.engine.load().blocks.live == 0
    assert ids_of(session.events["a"]) == expected_output(PROMPT, 3)
    assert ids_of(session.events["b"]) == expected_output(PROMPT, 8)


@pytest.mark.parametrize(
    ("label", "tokens", "reason"),
    [
        ("nobody", 1, "UNKNOWN_REQUEST_ID"),
        ("unlimited", 1, "INVALID_ACTION"),
        ("limited", 0, "INVALID_ACTION"),
    ],
)
async def test_a_grant_that_means_nothing_is_refused_and_harms_nobody(
    label: str, tokens: int, reason: str
) -> None:
    model = make_fake_model(max_model_len=4096, num_blocks=2048)
    async with running_service(model) as service:
        session = RawSession(service.generation)
        await session.start(
            make_start("unlimited", max_tokens=4000), make_start("limited", max_tokens=9, initial_credit=5)
        )
        await until_told(session, "limited", 5)
        await grant(session, label, tokens)
        while not any(event.HasField("error") for event in session.events.get(label, [])):
            await session.next()
        (refusal,) = (event for event in session.events[label] if event.HasField("error"))
        assert reason_of(refusal.error) == reason
        await grant(session, "limited", 4)
        await session.cancel("unlimited")
        assert await session.half_close() is grpc.StatusCode.OK
    assert ids_of(session.events["limited"]) == expected_output(PROMPT, 9)
    assert session.events["unlimited"][-1].finished.reason == FINISH_REASON_CANCELLED


async def test_credit_is_for_a_session_alone() -> None:
    async with running_service() as service:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await service.generation.GenerateOnce(GenerateOnceRequest(start=make_start(initial_credit=1)))
    assert violated_fields(status_of(refusal.value)) == ["initial_credit"]
