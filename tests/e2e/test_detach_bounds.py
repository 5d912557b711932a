"""How much is kept of requests that outlive their streams, for whom, and until when."""

from __future__ import annotations

import grpc
from google.rpc import code_pb2

from headrace.service.edge import Edge
from headrace.service.limits import Limits
from headrace.service.quotas import QuotaRules, Quotas
from tests.support.detaching import BOUNDED, GONE, begun, broken, check_whole, long_model, refusal_of
from tests.support.fake_runner import expected_output
from tests.support.requests import make_config
from tests.support.service import (
    PROMPT,
    RawSession,
    ids_of,
    make_start,
    reason_of,
    running_service,
    until,
    violated_fields,
)


async def test_a_detached_request_counts_in_its_clients_quota_until_it_is_over() -> None:
    edge = Edge(quotas=Quotas(QuotaRules(max_requests=1)))
    async with running_service(long_model(), make_config(**BOUNDED), edge=edge) as service:
        first = await begun(service)
        await broken(service, first)
        second = RawSession(service.generation)
        await second.start(make_start("b"))
        assert await refusal_of(second, "b") == (code_pb2.RESOURCE_EXHAUSTED, "REQUEST_QUOTA")
        await second.resume("a", 1)
        await second.until_end_of("a")
        await second.start(make_start("c"))
        await second.until_end_of("c")
    assert ids_of(second.events["c"]) == expected_output(PROMPT, 8)


async def test_acknowledged_events_are_forgotten_and_with_the_last_one_the_request() -> None:
    async with running_service() as service:
        session = await begun(service, max_tokens=10)
        await session.until_end_of("a")
        last = session.events["a"][-1].sequence
        await session.acknowledge("a", 1)
        await session.resume("a", 0)
        assert await refusal_of(session, "a") == (code_pb2.INVALID_ARGUMENT, "INVALID_ACTION")
        assert violated_fields(session.events["a"][-1].error) == ["resume.last_sequence"]
        await session.acknowledge("a", last + 1)
        assert await refusal_of(session, "a") == (code_pb2.INVALID_ARGUMENT, "INVALID_ACTION")
        assert violated_fields(session.events["a"][-1].error) == ["acknowledge.sequence"]
        await session.acknowledge("a", last)
        await session.resume("a", last)
        assert await refusal_of(session, "a") == GONE
        assert len(service.serving.resumables) == 0
        # What has ended for good says nothing, as to a cancel.
        await session.acknowledge("a", last)
        await session.start(make_start("plain", max_tokens=4))
        await session.until_end_of("plain")
        await session.acknowledge("plain", 0)
        assert await session.half_close() is grpc.StatusCode.OK
    assert session.events["plain"][-1].HasField("finished")


async def test_an_acknowledgement_is_for_what_can_be_resumed() -> None:
    async with running_service(long_model()) as service:
        session = RawSession(service.generation)
        await session.start(make_start("plain", max_tokens=4, initial_credit=0))
        await session.next()
        await session.acknowledge("plain", 0)
        assert await refusal_of(session, "plain") == (code_pb2.INVALID_ARGUMENT, "INVALID_ACTION")
        await session.acknowledge("nobody", 0)
        assert await refusal_of(session, "nobody") == (code_pb2.NOT_FOUND, "UNKNOWN_REQUEST_ID")


async def test_no_more_is_told_than_may_be_sent_again_until_it_is_acknowledged() -> None:
    limits = Limits(detach_buffer_bytes=1000)
    async with running_service(long_model(), make_config(**BOUNDED), limits) as service:
        session = await begun(service)
        await until(lambda: service.engine.load().num_paused == 1)
        num_seen = 0
        while not session.events["a"][-1].HasField("finished"):
            await session.next()
            if len(session.events["a"]) > num_seen + 3 or service.engine.load().num_paused:
                num_seen = len(session.events["a"])
                await session.acknowledge("a", num_seen - 1)
        assert await session.half_close() is grpc.StatusCode.OK
    check_whole(session.events["a"])


async def test_who_acknowledges_nothing_for_long_loses_that_request_alone() -> None:
    limits = Limits(detach_buffer_bytes=1000, slow_reader_s=0.2)
    async with running_service(long_model(), make_config(**BOUNDED), limits) as service:
        session = await begun(service)
        await session.until_end_of("a")
        failure = session.events["a"][-1].error
        assert (failure.code, reason_of(failure)) == (code_pb2.RESOURCE_EXHAUSTED, "SLOW_READER")
        assert "acknowledge" in failure.message
        await service.engine.wait_idle()
        await session.start(make_start("b"))
        await session.until_end_of("b")
    assert ids_of(session.events["b"]) == expected_output(PROMPT, 8)


async def test_credit_is_given_anew_with_a_resume() -> None:
    async with running_service(long_model(), make_config(**BOUNDED)) as service:
        first = await begun(service, num_events=4, initial_credit=3)
        await broken(service, first)
        second = RawSession(service.generation)
        await second.resume("a", 3, credit=2)
        while len(ids_of(second.events.get("a", []))) < 2:
            await second.next()
        await until(lambda: service.engine.load().num_paused == 1)
        await second.grant("a", 1000)
        assert await second.half_close() is grpc.StatusCode.OK
    check_whole([*first.events["a"], *second.events["a"]])


async def test_so_many_are_kept_and_those_that_are_told_give_way() -> None:
    async with running_service(long_model(), limits=Limits(max_resumable=2)) as service:
        session = await begun(service, "told", max_tokens=3)
        await session.until_end_of("told")
        await session.start(make_start("held", max_tokens=4000, detach=True, initial_credit=0))
        await session.start(make_start("next", max_tokens=4000, detach=True, initial_credit=0))
        await session.start(make_start("one too many", detach=True))
        while "one too many" not in session.events:
            await session.next()
        await session.resume("told", 0)
        while not session.events["told"][-1].HasField("error"):
            await session.next()
    refusal = session.events["one too many"][0].error
    assert (refusal.code, reason_of(refusal)) == (code_pb2.RESOURCE_EXHAUSTED, "TOO_MANY_RESUMABLE")
    assert reason_of(session.events["told"][-1].error) == "NOT_RESUMABLE"


async def test_a_server_may_offer_none() -> None:
    async with running_service(limits=Limits(max_resumable=0)) as service:
        session = RawSession(service.generation)
        await session.start(make_start("a", detach=True))
        assert await refusal_of(session, "a") == (code_pb2.UNIMPLEMENTED, "NOT_OFFERED")
