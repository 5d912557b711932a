from __future__ import annotations

import asyncio
import threading

import grpc
import pytest
from google.rpc import code_pb2

from headrace.engine import LoadedModel
from headrace.service.limits import Limits
from headrace.v1.generation_pb2 import (
    FINISH_REASON_CANCELLED,
    SessionRequest,
    StartGeneration,
    StopOptions,
)
from tests.support.fake_runner import FakeTokenizer, expected_output, make_fake_model
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


def long_model() -> LoadedModel:
    """Room for answers that would take long."""
    return make_fake_model(max_model_len=4096, num_blocks=2048)


async def test_half_close_finishes_what_runs_and_ends_with_ok() -> None:
    async with running_service() as service:
        session = RawSession(service.generation)
        await session.start(*(make_start(f"r{i}", prompt=(i + 1, i + 2), max_tokens=5 + i) for i in range(3)))
        assert await session.half_close() is grpc.StatusCode.OK
    for i in range(3):
        events = session.events[f"r{i}"]
        assert ids_of(events) == expected_output((i + 1, i + 2), 5 + i)
        assert [event.sequence for event in events] == list(range(len(events)))
        assert [events[0].WhichOneof("event"), events[-1].WhichOneof("event")] == ["accepted", "finished"]


async def test_an_empty_session_ends_with_ok() -> None:
    async with running_service() as service:
        assert await RawSession(service.generation).half_close() is grpc.StatusCode.OK


async def test_two_hundred_requests_share_one_stream() -> None:
    prompts = [(97 + i % 26, 97 + i // 26, 98) for i in range(200)]
    async with running_service(config=make_config(max_num_seqs=16, max_num_batched_tokens=64)) as service:
        session = RawSession(service.generation)
        await session.start(*(make_start(f"r{i}", prompt=p, max_tokens=6) for i, p in enumerate(prompts)))
        assert await session.half_close() is grpc.StatusCode.OK
        load = service.engine.load()
    assert [ids_of(session.events[f"r{i}"]) for i in range(200)] == [expected_output(p, 6) for p in prompts]
    assert (load.num_running, load.num_waiting, load.blocks.live) == (0, 0, 0)


async def test_a_bad_request_between_good_ones_ends_only_itself() -> None:
    async with running_service() as service:
        session = RawSession(service.generation)
        bad = make_start("bad", temperature=-1.0)
        await session.start(make_start("before"), bad, make_start("after"))
        assert await session.half_close() is grpc.StatusCode.OK
    (refusal,) = session.events["bad"]
    assert refusal.error.code == code_pb2.INVALID_ARGUMENT
    assert violated_fields(refusal.error) == ["sampling.temperature"]
    assert ids_of(session.events["before"]) == ids_of(session.events["after"]) == expected_output(PROMPT, 8)


async def test_what_the_engine_refuses_is_an_event_too() -> None:
    async with running_service() as service:
        session = RawSession(service.generation)
        await session.start(make_start("too long", max_tokens=1000), make_start("good"))
        assert await session.half_close() is grpc.StatusCode.OK
    (refusal,) = session.events["too long"]
    assert violated_fields(refusal.error) == ["stop.max_tokens"]
    assert ids_of(session.events["good"]) == expected_output(PROMPT, 8)


async def test_a_full_queue_is_an_event_with_a_hint_when_to_retry() -> None:
    gate = StepGate()
    model, config = make_fake_model(before_step=gate), make_config(max_num_seqs=1, max_num_waiting=1)
    async with running_service(model, config) as service:
        session = RawSession(service.generation)
        await session.start(make_start("running"))
        await until(lambda: service.engine.load().num_running == 1)
        await session.start(make_start("waiting"), make_start("refused"))
        await session.until_end_of("refused")
        gate.open()
        assert await session.half_close() is grpc.StatusCode.OK
    (refusal,) = session.events["refused"]
    assert (refusal.error.code, reason_of(refusal.error)) == (code_pb2.RESOURCE_EXHAUSTED, "OVERLOADED")
    assert ids_of(session.events["waiting"]) == expected_output(PROMPT, 8)


async def test_a_duplicate_of_a_live_label_is_refused_and_the_first_goes_on() -> None:
    gate = StepGate()
    async with running_service(make_fake_model(before_step=gate)) as service:
        session = RawSession(service.generation)
        await session.start(make_start("a"))
        accepted = await session.next()
        await session.start(make_start("a", prompt=(1, 2)))
        refusal = await session.next()
        gate.open()
        assert await session.half_close() is grpc.StatusCode.OK
    assert accepted.WhichOneof("event") == "accepted"
    assert (refusal.error.code, reason_of(refusal.error)) == (code_pb2.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID")
    assert refusal.sequence == 0
    rest = [event for event in session.events["a"] if event is not refusal]
    assert [event.sequence for event in rest] == list(range(len(rest)))
    assert ids_of(rest) == expected_output(PROMPT, 8)


async def test_a_label_may_be_used_again_once_its_end_was_read() -> None:
    async with running_service() as service:
        session = RawSession(service.generation)
        for prompt in ((1, 2), (3, 4)):
            await session.start(make_start("again", prompt=prompt))
            await session.until_end_of("again")
            assert ids_of(session.events.pop("again")) == expected_output(prompt, 8)


async def test_labels_belong_to_their_stream() -> None:
    async with running_service(long_model()) as service:
        one, other = RawSession(service.generation), RawSession(service.generation)
        await one.start(make_start("a", max_tokens=4000))
        await one.next()
        await other.start(make_start("a", prompt=(1, 2)))
        await other.until_end_of("a")
        await other.cancel("a")
        await one.next()
        await one.cancel("a")
        await one.until_end_of("a")
    assert ids_of(other.events["a"]) == expected_output((1, 2), 8)
    assert one.events["a"][-1].finished.reason == FINISH_REASON_CANCELLED


async def test_a_cancel_ends_one_request_and_leaves_the_others() -> None:
    async with running_service(long_model()) as service:
        session = RawSession(service.generation)
        await session.start(make_start("long", max_tokens=4000), make_start("short", max_tokens=100))
        while not ids_of(session.events.get("long", [])):
            await session.next()
        await session.cancel("long")
        assert await session.half_close() is grpc.StatusCode.OK
        assert service.engine.load().blocks.live == 0
    finished = session.events["long"][-1].finished
    assert finished.reason == FINISH_REASON_CANCELLED
    made = ids_of(session.events["long"])
    assert made == expected_output(PROMPT, finished.usage.completion_tokens)
    assert len(made) < 4000
    assert ids_of(session.events["short"]) == expected_output(PROMPT, 100)


async def test_a_cancel_of_a_request_that_waits_ends_it() -> None:
    gate = StepGate()
    async with running_service(make_fake_model(before_step=gate), make_config(max_num_seqs=1)) as service:
        session = RawSession(service.generation)
        await session.start(make_start("running"), make_start("waiting"))
        await until(lambda: service.engine.load().num_waiting == 1)
        await session.cancel("waiting")
        gate.open()
        assert await session.half_close() is grpc.StatusCode.OK
    end = session.events["waiting"][-1]
    assert (end.finished.reason, end.finished.usage.completion_tokens) == (FINISH_REASON_CANCELLED, 0)


class HeldTokenizer(FakeTokenizer):
    """Encodes once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.released.wait(15)
        return super().encode(text, add_special_tokens=add_special_tokens)


def make_text_start(label: str, text: str = "head") -> StartGeneration:
    """A request whose prompt has to be encoded."""
    return StartGeneration(request_id=label, text=text, stop=StopOptions(max_tokens=4))


async def test_a_cancel_before_the_prompt_is_encoded_ends_the_request_at_once() -> None:
    tokenizer = HeldTokenizer()
    async with running_service(make_fake_model(tokenizer=tokenizer)) as service:
        session = RawSession(service.generation)
        await session.start(make_text_start("early"))
        await session.cancel("early")
        end = await session.next()
        tokenizer.released.set()
        await session.start(make_start("early"))
        assert await session.half_close() is grpc.StatusCode.OK
        assert service.engine.load().totals.num_steps > 0
    assert (end.sequence, end.finished.reason) == (0, FINISH_REASON_CANCELLED)
    assert ids_of(session.events["early"]) == expected_output(PROMPT, 8)


async def test_requests_are_queued_in_the_order_sent_though_texts_take_their_time() -> None:
    tokenizer = HeldTokenizer()
    model, config = make_fake_model(tokenizer=tokenizer), make_config(max_num_seqs=1)
    async with running_service(model, config) as service:
        session = RawSession(service.generation)
        await session.start(make_text_start("text"), make_start("ids"), make_text_start("text again"))
        tokenizer.released.set()
        assert await session.half_close() is grpc.StatusCode.OK
    assert list(session.events) == ["text", "ids", "text again"]


async def test_too_many_texts_at_once_are_refused_as_overload() -> None:
    tokenizer = HeldTokenizer()
    limits = Limits(max_pending_texts=2)
    async with running_service(make_fake_model(tokenizer=tokenizer), limits=limits) as service:
        session = RawSession(service.generation)
        await session.start(*(make_text_start(f"r{i}") for i in range(3)))
        await session.cancel("r0")
        await session.until_end_of("r0")
        tokenizer.released.set()
        assert await session.half_close() is grpc.StatusCode.OK
    assert reason_of(session.events["r2"][-1].error) == "OVERLOADED"
    assert session.events["r1"][-1].HasField("finished")


async def test_a_cancel_of_an_id_never_started_is_not_found() -> None:
    async with running_service() as service:
        session = RawSession(service.generation)
        await session.cancel("nobody")
        assert await session.half_close() is grpc.StatusCode.OK
    (event,) = session.events["nobody"]
    assert (event.error.code, reason_of(event.error)) == (code_pb2.NOT_FOUND, "UNKNOWN_REQUEST_ID")


async def test_a_cancel_of_a_finished_request_says_nothing() -> None:
    async with running_service() as service:
        session = RawSession(service.generation)
        await session.start(make_start("a"))
        await session.until_end_of("a")
        num_events = len(session.events["a"])
        await session.cancel("a")
        await session.cancel("a")
        assert await session.half_close() is grpc.StatusCode.OK
    assert len(session.events["a"]) == num_events


async def test_only_so_many_ended_requests_are_remembered() -> None:
    async with running_service(limits=Limits(max_remembered_labels=2)) as service:
        session = RawSession(service.generation)
        for label in ("a", "b", "c"):
            await session.start(make_start(label))
            await session.until_end_of(label)
        for label in ("a", "b", "c"):
            await session.cancel(label)
        assert await session.half_close() is grpc.StatusCode.OK
    assert reason_of(session.events["a"][-1].error) == "UNKNOWN_REQUEST_ID"
    assert session.events["b"][-1].HasField("finished")
    assert session.events["c"][-1].HasField("finished")


@pytest.mark.parametrize("label", ["", "x" * 129, "line\nbreak", "naïve", "\x1b[31m"])
async def test_a_label_that_is_no_label_is_refused(label: str) -> None:
    async with running_service() as service:
        session = RawSession(service.generation)
        await session.start(make_start(label), make_start("good"))
        assert await session.half_close() is grpc.StatusCode.OK
    (refusal,) = session.events[label[:128]]
    assert violated_fields(refusal.error) == ["request_id"]
    assert ids_of(session.events["good"]) == expected_output(PROMPT, 8)


async def test_an_empty_message_is_a_breach_and_ends_the_stream_with_all_its_requests() -> None:
    async with running_service(long_model()) as service:
        session = RawSession(service.generation)
        await session.start(make_start("a", max_tokens=4000))
        await session.next()
        await session.call.write(SessionRequest())
        with pytest.raises(grpc.aio.AioRpcError) as breach:
            await session.until_end_of("a")
        await service.engine.wait_idle()
    assert breach.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_fields(status_of(breach.value)) == ["action"]


async def test_an_action_of_a_later_protocol_is_named_in_the_breach() -> None:
    async with running_service() as service:
        session = RawSession(service.generation)
        await session.call.write(SessionRequest.FromString(b"\x9a\x06\x01x"))
        with pytest.raises(grpc.aio.AioRpcError) as breach:
            await session.next()
    assert violated_fields(status_of(breach.value)) == ["#99", "action"]


@pytest.mark.parametrize("action", ["cancel", "grant_credit"])
async def test_unknown_fields_beside_or_in_an_action_refuse_it_and_its_request_goes_on(action: str) -> None:
    async with running_service() as service:
        session = RawSession(service.generation)
        for unknown_within in (True, False):
            request = SessionRequest()
            holder = getattr(request, action)
            holder.request_id = "a"
            (holder if unknown_within else request).MergeFromString(b"\x98\x06\x01")
            await session.call.write(request)
        assert await session.half_close() is grpc.StatusCode.OK
    within, beside = (event.error for event in session.events["a"])
    assert violated_fields(within) == [f"{action}.#99"]
    assert violated_fields(beside) == ["#99"]
    assert reason_of(within) == reason_of(beside) == "INVALID_ACTION"


async def test_an_unknown_field_beside_a_start_refuses_that_request_alone() -> None:
    async with running_service() as service:
        session = RawSession(service.generation)
        request = SessionRequest(start=make_start("bad"))
        request.MergeFromString(b"\x98\x06\x01")
        await session.call.write(request)
        await session.start(make_start("good"))
        assert await session.half_close() is grpc.StatusCode.OK
    assert [violated_fields(event.error) for event in session.events["bad"]] == [["#99"]]
    assert ids_of(session.events["good"]) == expected_output(PROMPT, 8)


async def test_the_end_of_the_call_ends_all_its_requests() -> None:
    async with running_service(long_model(), make_config(max_num_seqs=2)) as service:
        session = RawSession(service.generation)
        await session.start(*(make_start(f"r{i}", max_tokens=4000) for i in range(5)))
        await session.next()
        session.call.cancel()
        await service.engine.wait_idle()
        load = service.engine.load()
        assert (load.num_running, load.num_waiting, load.blocks.live) == (0, 0, 0)
        assert await generate_ids(service, make_start()) == expected_output(PROMPT, 8)


async def test_the_streams_deadline_ends_all_its_requests() -> None:
    gate = StepGate()
    model = make_fake_model(before_step=gate, max_model_len=4096, num_blocks=2048)
    async with running_service(model) as service:
        session = RawSession(service.generation, timeout_s=0.3)
        await session.start(*(make_start(f"r{i}", max_tokens=4000) for i in range(3)))
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await session.until_end_of("r0", "r1", "r2")
        gate.open()
        await service.engine.wait_idle()
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_reader_that_pauses_loses_nothing() -> None:
    async with running_service(make_fake_model(max_model_len=1024, num_blocks=1024)) as service:
        session = RawSession(service.generation)
        await session.start(*(make_start(f"r{i}", prompt=(i + 1,), max_tokens=200) for i in range(4)))
        await session.next()
        await service.engine.wait_idle()
        assert await session.half_close() is grpc.StatusCode.OK
    for i in range(4):
        assert ids_of(session.events[f"r{i}"]) == expected_output((i + 1,), 200)


@pytest.mark.parametrize("limits", [Limits(max_session_backlog=0), Limits(max_session_backlog_bytes=0)])
async def test_beyond_the_backlog_messages_wait_their_turn_and_none_is_lost(limits: Limits) -> None:
    tokenizer = HeldTokenizer()
    model = make_fake_model(tokenizer=tokenizer)
    async with running_service(model, limits=limits) as service:
        session = RawSession(service.generation)
        labels = [f"r{i}" for i in range(5)]
        await session.start(*(make_text_start(label) for label in labels))
        ending = asyncio.create_task(session.half_close())
        tokenizer.released.set()
        assert await ending is grpc.StatusCode.OK
    assert list(session.events) == labels
    assert all(session.events[label][-1].HasField("finished") for label in labels)


async def test_a_session_that_waits_for_requests_is_ended_when_the_server_goes_down() -> None:
    async with running_service() as service:
        session = RawSession(service.generation)
        await session.start(make_start("a"))
        await session.until_end_of("a")
        service.serving.close()
        with pytest.raises(grpc.aio.AioRpcError) as end:
            await session.next()
    assert end.value.code() is grpc.StatusCode.UNAVAILABLE
