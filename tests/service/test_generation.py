from __future__ import annotations

import asyncio
import threading

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2

from headrace.service.limits import Limits
from headrace.v1.generation_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FINISH_REASON_TIME_LIMIT,
    CacheOptions,
    ChatMessage,
    ChatPrompt,
    GenerateOnceRequest,
    GenerateRequest,
    OutputOptions,
    StartGeneration,
    StopOptions,
)
from tests.support.fake_runner import EOS, FakeTokenizer, expected_output, make_fake_model
from tests.support.requests import make_config
from tests.support.service import (
    PROMPT,
    detail,
    generate,
    generate_ids,
    ids_of,
    make_start,
    reason_of,
    rest_of,
    running_service,
    status_of,
    until,
    violated_fields,
)
from tests.support.step_gate import StepGate


async def test_events_come_in_order_and_add_up() -> None:
    async with running_service() as service:
        events = await generate(service, make_start("a", max_tokens=8))
    assert [event.sequence for event in events] == list(range(len(events)))
    assert {event.request_id for event in events} == {"a"}
    assert [event.WhichOneof("event") for event in events] == [
        "accepted",
        *["delta"] * (len(events) - 2),
        "finished",
    ]
    assert ids_of(events) == expected_output(PROMPT, 8)
    assert "".join(event.delta.text for event in events) == bytes(expected_output(PROMPT, 8)).decode()
    finished = events[-1].finished
    assert finished.reason == FINISH_REASON_LENGTH
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (len(PROMPT), 8)
    assert finished.timings.HasField("time_to_first_token")


async def test_the_whole_answer_equals_the_streamed_one() -> None:
    async with running_service() as service:
        response = await service.generation.GenerateOnce(GenerateOnceRequest(start=make_start("a")))
    assert response.request_id == "a"
    assert response.accepted.prompt_tokens == len(PROMPT)
    (completion,) = response.completions
    assert list(completion.token_ids) == expected_output(PROMPT, 8)
    assert completion.text == bytes(expected_output(PROMPT, 8)).decode()
    assert completion.finished.reason == FINISH_REASON_LENGTH


async def test_accepted_tells_what_the_request_really_runs_with() -> None:
    async with running_service(make_fake_model(max_model_len=32)) as service:
        start = make_start(max_tokens=None)
        start.ClearField("sampling")
        start.stop.token_ids.append(99)
        accepted = (await generate(service, start))[0].accepted
        again = (await generate(service, start))[0].accepted
    assert accepted.max_tokens == 32 - len(PROMPT)
    assert accepted.model == "fake"
    sampling = accepted.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1.0, 0, 1.0, 0.0)
    assert sampling.HasField("seed")
    assert sampling.seed != again.sampling.seed


async def test_the_seed_that_was_told_gives_the_same_tokens_again() -> None:
    async with running_service() as service:
        first = await generate(service, make_start(temperature=1.0))
        seed = first[0].accepted.sampling.seed
        again = make_start(temperature=1.0)
        again.sampling.seed = seed
        assert await generate_ids(service, again) == ids_of(first)


async def test_text_and_chat_are_encoded_as_the_model_wants_them() -> None:
    async with running_service() as service:
        text = await generate(service, StartGeneration(text="head", stop=StopOptions(max_tokens=1)))
        chat = ChatPrompt(messages=[ChatMessage(role="user", content="hi")])
        rendered = await generate(service, StartGeneration(chat=chat, stop=StopOptions(max_tokens=1)))
    assert text[0].accepted.prompt_tokens == len("head") + 1
    assert rendered[0].accepted.prompt_tokens == len("user: hi\nassistant: ")


@pytest.mark.parametrize(("wants_text", "wants_ids"), [(True, False), (False, True), (False, False)])
async def test_only_the_wanted_output_is_sent(wants_text: bool, wants_ids: bool) -> None:
    async with running_service() as service:
        start = make_start(output=OutputOptions(text=wants_text, token_ids=wants_ids))
        events = await generate(service, start)
    assert bool("".join(event.delta.text for event in events)) is wants_text
    assert bool(ids_of(events)) is wants_ids
    assert events[-1].finished.usage.completion_tokens == 8
    assert [event.sequence for event in events] == list(range(len(events)))


async def test_a_stop_id_ends_the_answer_and_is_named() -> None:
    ids = expected_output(PROMPT, 8)
    start = make_start()
    start.stop.token_ids.append(ids[3])
    async with running_service() as service:
        events = await generate(service, start)
    assert events[-1].finished.reason == FINISH_REASON_STOP
    assert events[-1].finished.matched_stop.token_id == ids[3]
    assert ids_of(events)[-1] == ids[3]


async def test_a_stop_string_ends_the_answer_and_is_left_out_unless_wanted() -> None:
    text = bytes(expected_output(PROMPT, 8)).decode()
    stop = text[3:5]
    async with running_service() as service:
        without = await generate(service, make_start(stop=StopOptions(strings=["never", stop])))
        start = make_start(stop=StopOptions(strings=[stop], include_stop=True))
        with_it = await generate(service, start)
    assert without[-1].finished.matched_stop.text == stop
    assert "".join(event.delta.text for event in without) == text[: text.index(stop)]
    assert "".join(event.delta.text for event in with_it) == text[: text.index(stop) + 2]


async def test_a_prompt_seen_before_is_not_computed_again_unless_the_request_keeps_apart() -> None:
    async def cached_tokens(cache: CacheOptions) -> int:
        events = await generate(service, make_start(prompt=range(1, 14), max_tokens=1, cache=cache))
        return events[-1].finished.usage.cached_tokens

    async with running_service() as service:
        assert await cached_tokens(CacheOptions()) == 0
        assert await cached_tokens(CacheOptions()) == 12
        assert await cached_tokens(CacheOptions(bypass=True)) == 0
        assert await cached_tokens(CacheOptions(salt="apart")) == 0
        assert await cached_tokens(CacheOptions(salt="apart")) == 12


async def test_an_end_id_is_ignored_on_request() -> None:
    model = make_fake_model(choose=lambda token_ids, seed: EOS)
    async with running_service(model) as service:
        stopped = await generate(service, make_start())
        start = make_start()
        start.stop.ignore_eos = True
        ignored = await generate(service, start)
    assert stopped[-1].finished.usage.completion_tokens == 1
    assert ignored[-1].finished.usage.completion_tokens == 8


async def test_a_full_queue_refuses_before_the_first_message() -> None:
    gate = StepGate()
    model, config = make_fake_model(before_step=gate), make_config(max_num_seqs=1, max_num_waiting=1)
    async with running_service(model, config) as service:
        running = asyncio.create_task(generate_ids(service, make_start("running")))
        await until(lambda: service.engine.load().num_running == 1)
        waiting = asyncio.create_task(generate_ids(service, make_start("waiting")))
        await until(lambda: service.engine.load().num_waiting == 1)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await generate(service, make_start("refused"))
        gate.open()
        assert await running == await waiting == expected_output(PROMPT, 8)
    status = status_of(refusal.value)
    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert reason_of(status) == "OVERLOADED"
    assert detail(status, error_details_pb2.RetryInfo).retry_delay.ToTimedelta().total_seconds() > 0


async def test_a_cancelled_call_gives_its_blocks_back() -> None:
    async with running_service(make_fake_model(max_model_len=4096, num_blocks=1024)) as service:
        call = service.generation.Generate(GenerateRequest(start=make_start(max_tokens=4000)))
        await call.read()
        call.cancel()
        await service.engine.wait_idle()
        load = service.engine.load()
        assert (load.num_running, load.num_waiting, load.blocks.live) == (0, 0, 0)
        assert await generate_ids(service, make_start()) == expected_output(PROMPT, 8)


async def test_a_call_cancelled_in_the_queue_never_runs() -> None:
    gate = StepGate()
    async with running_service(make_fake_model(before_step=gate), make_config(max_num_seqs=1)) as service:
        running = asyncio.create_task(generate_ids(service, make_start()))
        await until(lambda: service.engine.load().num_running == 1)
        call = service.generation.Generate(GenerateRequest(start=make_start(max_tokens=100)))
        await call.read()
        call.cancel()
        gate.open()
        await running
        await service.engine.wait_idle()
        assert service.engine.load().totals.num_decode_tokens < 100


async def test_a_unary_call_that_is_cancelled_stops_the_engine() -> None:
    async with running_service(make_fake_model(max_model_len=4096, num_blocks=1024)) as service:
        call = service.generation.GenerateOnce(GenerateOnceRequest(start=make_start(max_tokens=4000)))
        await until(lambda: service.engine.load().num_running == 1)
        call.cancel()
        await service.engine.wait_idle()
        assert service.engine.load().totals.num_decode_tokens < 4000


async def test_a_deadline_ends_the_request_in_the_engine_too() -> None:
    def slowly(plan: object) -> None:
        threading.Event().wait(0.02)

    model = make_fake_model(before_step=slowly, max_model_len=4096, num_blocks=1024)
    async with running_service(model) as service:
        call = service.generation.Generate(GenerateRequest(start=make_start(max_tokens=4000)), timeout=0.2)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            async for _ in call:
                pass
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await service.engine.wait_idle()
        assert service.engine.load().blocks.live == 0


async def test_a_time_limit_is_a_normal_end() -> None:
    def slowly(plan: object) -> None:
        threading.Event().wait(0.02)

    model = make_fake_model(before_step=slowly, max_model_len=4096, num_blocks=1024)
    async with running_service(model) as service:
        events = await generate(service, make_start(max_tokens=4000, time_limit=Duration(nanos=200_000_000)))
    assert events[-1].finished.reason == FINISH_REASON_TIME_LIMIT
    assert ids_of(events) == expected_output(PROMPT, events[-1].finished.usage.completion_tokens)


async def test_the_servers_own_limit_is_a_deadline() -> None:
    def slowly(plan: object) -> None:
        threading.Event().wait(0.02)

    model = make_fake_model(before_step=slowly, max_model_len=4096, num_blocks=1024)
    async with running_service(model, limits=Limits(max_request_s=0.2)) as service:
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await generate(service, make_start(max_tokens=4000))
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_reader_that_pauses_holds_nobody_up_and_loses_nothing() -> None:
    async with running_service(make_fake_model(max_model_len=2048, num_blocks=1024)) as service:
        call = service.generation.Generate(GenerateRequest(start=make_start(max_tokens=300)))
        events = [response.event async for response in rest_of(call, 1)]
        assert await generate_ids(service, make_start()) == expected_output(PROMPT, 8)
        await service.engine.wait_idle()
        events += [response.event async for response in rest_of(call)]
    assert ids_of(events) == expected_output(PROMPT, 300)
    assert [event.sequence for event in events] == list(range(len(events)))


async def test_two_hundred_streams_at_once_each_get_their_own() -> None:
    prompts = [(97 + i % 26, 97 + i // 26, 98) for i in range(200)]
    async with running_service(config=make_config(max_num_seqs=16, max_num_batched_tokens=64)) as service:
        answers = await asyncio.gather(
            *(generate(service, make_start("same label", prompt=prompt, max_tokens=5)) for prompt in prompts)
        )
        await service.engine.wait_idle()
        assert service.engine.load().blocks.live == 0
    assert [ids_of(events) for events in answers] == [expected_output(prompt, 5) for prompt in prompts]


async def test_an_unknown_model_is_not_found() -> None:
    async with running_service() as service:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await generate(service, make_start(model="other"))
        assert (await generate(service, make_start(model="fake")))[-1].HasField("finished")
    assert refusal.value.code() is grpc.StatusCode.NOT_FOUND
    assert "'fake'" in (refusal.value.details() or "")


async def test_a_request_that_can_never_fit_is_refused_with_the_limit() -> None:
    async with running_service(make_fake_model(num_blocks=4, block_size=4)) as service:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await generate(service, make_start(max_tokens=13))
        assert len(await generate_ids(service, make_start(max_tokens=12))) == 12
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_fields(status_of(refusal.value)) == ["stop.max_tokens"]
    assert "16" in (refusal.value.details() or "")


async def test_an_empty_prompt_is_refused_and_neighbours_are_untouched() -> None:
    async with running_service() as service:
        neighbour = asyncio.create_task(generate_ids(service, make_start(max_tokens=50)))
        for empty in (StartGeneration(text=""), make_start(prompt=()), StartGeneration(chat=ChatPrompt())):
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await generate(service, empty)
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await neighbour == expected_output(PROMPT, 50)


async def test_a_call_without_a_request_is_refused() -> None:
    async with running_service() as service:
        with pytest.raises(grpc.aio.AioRpcError) as streamed:
            await service.generation.Generate(GenerateRequest()).read()
        with pytest.raises(grpc.aio.AioRpcError) as whole:
            await service.generation.GenerateOnce(GenerateOnceRequest())
    assert violated_fields(status_of(streamed.value)) == violated_fields(status_of(whole.value)) == ["start"]


async def test_while_loading_requests_are_turned_away_at_once() -> None:
    async with running_service(opens=False) as service:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await generate(service, make_start())
    assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
    assert reason_of(status_of(refusal.value)) == "LOADING"


async def test_a_model_without_a_template_says_what_to_send_instead() -> None:
    model = make_fake_model(tokenizer=FakeTokenizer(has_chat_template=False))
    start = StartGeneration(chat=ChatPrompt(messages=[ChatMessage(role="user", content="hi")]))
    async with running_service(model) as service:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await generate(service, start)
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_fields(status_of(refusal.value)) == ["chat"]
