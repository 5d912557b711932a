"""A request started with `detach` outlives its stream: nothing of it is lost, nothing comes twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from google.rpc import code_pb2

from headrace.service.auth import AuthRules
from headrace.service.identity import Role
from headrace.service.limits import Limits
from headrace.service.server import Entrance
from headrace.service.token_drawing import entry_line
from headrace.v1.control_pb2 import DrainRequest, GetLoadRequest
from headrace.v1.generation_pb2 import (
    FINISH_REASON_CANCELLED,
    GenerateOnceRequest,
)
from tests.support.detaching import BOUNDED, GONE, LONG, begun, broken, check_whole, long_model, refusal_of
from tests.support.fake_runner import expected_output, make_fake_model
from tests.support.requests import make_config
from tests.support.service import (
    PROMPT,
    RawSession,
    generate_ids,
    ids_of,
    make_start,
    reason_of,
    running_service,
    status_of,
    until,
    violated_fields,
)
from tests.support.step_gate import StepGate


@pytest.mark.parametrize("num_lost", [0, 1, 5, 12])
async def test_a_broken_stream_is_gone_on_with_where_it_broke_wherever_that_was(num_lost: int) -> None:
    async with running_service(long_model(), make_config(**BOUNDED)) as service:
        first = await begun(service, num_events=12)
        await broken(service, first)
        seen = first.events["a"][: 12 - num_lost]
        second = RawSession(service.generation)
        await second.resume("a", seen[-1].sequence if seen else None)
        await second.until_end_of("a")
        assert await second.half_close() is grpc.StatusCode.OK
        await service.engine.wait_idle()
        assert service.engine.load().blocks.live == 0
    check_whole([*seen, *second.events["a"]])


async def test_what_no_stream_takes_is_made_within_bounds_and_then_waits() -> None:
    async with running_service(long_model(), make_config(max_num_seqs=1, **BOUNDED)) as service:
        first = await begun(service)
        await broken(service, first)
        await until(lambda: service.engine.load().num_paused == 1)
        load = await service.control.GetLoad(GetLoadRequest())
        assert (load.num_detached, load.num_paused, load.num_running) == (1, 1, 0)
        # Its place is others'.
        assert await generate_ids(service, make_start()) == expected_output(PROMPT, 8)
        second = RawSession(service.generation)
        await second.resume("a", 1)
        assert await second.half_close() is grpc.StatusCode.OK
        load = await service.control.GetLoad(GetLoadRequest())
        assert (load.num_detached, load.num_paused) == (0, 0)
    check_whole([*first.events["a"][:2], *second.events["a"]])


async def test_what_was_finished_meanwhile_is_told_too_and_after_its_end_for_a_while() -> None:
    async with running_service() as service:
        first = await begun(service, max_tokens=20)
        await broken(service, first)
        await service.engine.wait_idle()
        for _ in range(2):
            session = RawSession(service.generation)
            await session.resume("a", 0)
            assert await session.half_close() is grpc.StatusCode.OK
            check_whole([first.events["a"][0], *session.events["a"]], 20)


async def test_a_stream_that_is_still_open_loses_the_request_to_the_one_that_resumes_it() -> None:
    async with running_service(long_model(), make_config(**BOUNDED)) as service:
        old = await begun(service, num_events=5, initial_credit=40)
        new = RawSession(service.generation)
        await new.resume("a", 4)
        await new.until_end_of("a")
        while not old.events["a"][-1].HasField("error"):
            await old.next()
        lost = old.events["a"][-1]
        assert (lost.error.code, reason_of(lost.error)) == (code_pb2.ABORTED, "RESUMED_ELSEWHERE")
        # The old one is as good as ever for others, and may say what it likes of this one.
        await old.grant("a", 5)
        await old.start(make_start("b"))
        assert await old.half_close() is grpc.StatusCode.OK
    assert ids_of(old.events["b"]) == expected_output(PROMPT, 8)
    check_whole([*old.events["a"][:5], *new.events["a"]])


async def test_of_many_that_resume_at_once_one_has_it_and_all_the_others_are_told() -> None:
    async with running_service(long_model(), make_config(**BOUNDED)) as service:
        first = await begun(service)
        await broken(service, first)
        sessions = [RawSession(service.generation) for _ in range(5)]
        await asyncio.gather(*(session.resume("a", 1) for session in sessions))
        await asyncio.gather(*(session.half_close() for session in sessions))
        await service.engine.wait_idle()
    whole = [session for session in sessions if session.events["a"][-1].HasField("finished")]
    assert len(whole) == 1
    check_whole([*first.events["a"][:2], *whole[0].events["a"]])
    for session in sessions:
        *told, last = session.events["a"]
        assert [event.sequence for event in told] == list(range(2, 2 + len(told))), (
            "a piece, and no gap in it"
        )
        assert session is whole[0] or reason_of(last.error) == "RESUMED_ELSEWHERE"


async def test_a_label_that_is_live_on_the_stream_is_not_resumed_there() -> None:
    async with running_service(long_model()) as service:
        session = await begun(service, num_events=1, max_tokens=40)
        await session.resume("a")
        assert await session.half_close() is grpc.StatusCode.OK
    answers = [event for event in session.events["a"] if event.HasField("error")]
    assert [reason_of(event.error) for event in answers] == ["DUPLICATE_REQUEST_ID"]
    check_whole([event for event in session.events["a"] if event not in answers], 40)


async def test_a_cancel_by_label_reaches_it_wherever_it_is() -> None:
    async with running_service(long_model(), make_config(**BOUNDED)) as service:
        held = await begun(service, "held")
        detached = await begun(service, "detached")
        await broken(service, detached)
        other = RawSession(service.generation)
        await other.cancel("held")
        await held.until_end_of("held")
        assert held.events["held"][-1].finished.reason == FINISH_REASON_CANCELLED
        await other.cancel("detached")
        await service.engine.wait_idle()
        await other.resume("detached", 1)
        assert await refusal_of(other, "detached") == GONE
        assert await other.half_close() is grpc.StatusCode.OK
        assert service.engine.load().blocks.live == 0


async def test_past_its_grace_it_is_ended_and_gone() -> None:
    async with running_service(long_model(), limits=Limits(detach_grace_s=0.0)) as service:
        first = await begun(service, max_tokens=4000)
        first.call.cancel()
        await service.engine.wait_idle()
        assert service.engine.load().blocks.live == len(service.serving.resumables) == 0
        second = RawSession(service.generation)
        await second.resume("a", 1)
        assert await refusal_of(second, "a") == GONE


async def test_what_others_have_is_told_in_the_same_words_as_what_nobody_has(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    names = ("alice", "bob")
    tokens.write_text(
        "\n".join(entry_line(name, f"hr_{name}s", frozenset({Role.GENERATE})) for name in names)
    )
    entrance = Entrance.guarded(AuthRules(Role.GENERATE, tokens=tokens), None)
    metadata = {name: (("authorization", f"Bearer hr_{name}s"),) for name in names}
    async with running_service(long_model(), make_config(**BOUNDED), entrance=entrance) as service:
        first = RawSession(service.generation, metadata=metadata["alice"])
        await first.start(make_start("hers", max_tokens=LONG, detach=True))
        await first.next()
        await broken(service, first)
        stranger = RawSession(service.generation, metadata=metadata["bob"])
        answers = []
        for label in ("hers", "nobodys"):
            await stranger.resume(label, 0)
            answers.append((await stranger.next()).error)
            await stranger.cancel(label)
            answers.append((await stranger.next()).error)
            await stranger.acknowledge(label, 0)
            answers.append((await stranger.next()).error)
        assert answers[:3] == answers[3:]
        # He may use the label himself, and takes nothing from her.
        stranger.events.clear()
        await stranger.start(make_start("hers", prompt=(1, 2), detach=True))
        await stranger.until_end_of("hers")
        assert ids_of(stranger.events["hers"]) == expected_output((1, 2), 8)
        second = RawSession(service.generation, metadata=metadata["alice"])
        await second.resume("hers", 0)
        await second.until_end_of("hers")
    check_whole([first.events["hers"][0], *second.events["hers"]])


async def test_a_request_that_nobody_has_heard_of_is_not_kept() -> None:
    gate = StepGate()
    config = make_config(max_num_seqs=1, max_num_waiting=1)
    async with running_service(make_fake_model(before_step=gate), config) as service:
        session = RawSession(service.generation)
        # The queue is full, so that it is refused: there is nothing to resume.
        await session.start(make_start("r0"))
        await until(lambda: service.engine.load().num_running == 1)
        await session.start(make_start("r1"), make_start("refused", detach=True))
        while "refused" not in session.events:
            await session.next()
        assert reason_of(session.events["refused"][0].error) == "OVERLOADED"
        await session.acknowledge("refused", 0)
        await session.resume("refused")
        gate.open()
        assert await session.half_close() is grpc.StatusCode.OK
    assert reason_of(session.events["refused"][-1].error) == "NOT_RESUMABLE"


async def test_two_of_one_client_have_two_labels_until_one_is_over() -> None:
    async with running_service(long_model(), make_config(**BOUNDED)) as service:
        first = await begun(service)
        second = RawSession(service.generation)
        await second.start(make_start("a", detach=True))
        assert await refusal_of(second, "a") == (code_pb2.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID")
        second.events.clear()
        await second.start(make_start("a", prompt=(1, 2)))
        await second.until_end_of("a")
        assert ids_of(second.events["a"]) == expected_output((1, 2), 8), (
            "labels of others are each stream's own"
        )
        await first.cancel("a")
        await first.until_end_of("a")
        second.events.clear()
        await second.start(make_start("a", prompt=(3, 4), detach=True))
        await second.until_end_of("a")
    assert ids_of(second.events["a"]) == expected_output((3, 4), 8)


async def test_the_deadline_of_the_stream_is_none_of_the_request() -> None:
    async with running_service(long_model(), make_config(**BOUNDED)) as service:
        first = RawSession(service.generation, timeout_s=2.0)
        await first.start(make_start("a", max_tokens=LONG, detach=True, initial_credit=3))
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await first.until_end_of("a")
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        second = RawSession(service.generation)
        await second.resume("a", first.events["a"][-1].sequence)
        await second.until_end_of("a")
    check_whole([*first.events["a"], *second.events["a"]])


async def test_a_drain_waits_for_them_to_be_resumed_and_ends_with_the_last() -> None:
    async with running_service(long_model()) as service:
        first = await begun(service, max_tokens=40)
        await broken(service, first)
        draining = service.control.Drain(DrainRequest())
        await service.engine.wait_idle()
        second = RawSession(service.generation)
        await second.resume("a", 1)
        assert await second.half_close() is grpc.StatusCode.OK
        assert (await draining).num_unfinished == 0
    check_whole([*first.events["a"][:2], *second.events["a"]], 40)


async def test_a_server_that_goes_down_ends_them_and_says_so_to_who_comes_late() -> None:
    async with running_service(long_model(), make_config(**BOUNDED)) as service:
        first = await begun(service)
        await broken(service, first)
        service.serving.close()
        await service.engine.wait_idle()
        assert service.engine.load().blocks.live == 0
    async with running_service() as restarted:
        second = RawSession(restarted.generation)
        await second.resume("a", 1)
        event = await second.next()
        assert (event.error.code, reason_of(event.error)) == GONE
        assert "restarted" in event.error.message


async def test_detach_is_for_a_session_alone() -> None:
    async with running_service() as service:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await service.generation.GenerateOnce(GenerateOnceRequest(start=make_start("a", detach=True)))
    assert violated_fields(status_of(refusal.value)) == ["detach"]
