import asyncio
import threading
from dataclasses import replace

import pytest

from headrace.engine import (
    AsyncEngine,
    BatchingPolicy,
    DeadlineExceeded,
    Draining,
    DuplicateRequest,
    FailureEvent,
    FinishEvent,
    FinishReason,
    InvalidRequest,
    LatencyConfig,
    LatencyTargets,
    Overloaded,
    RequestId,
    SamplingParams,
    SchedulerConfig,
    TokenEvent,
)
from tests.support.engines import assert_serves, collect, running_engine
from tests.support.fake_runner import expected_output, make_fake_model
from tests.support.requests import make_config, make_request
from tests.support.step_gate import StepGate


async def test_many_requests_each_get_their_own_output():
    async with running_engine(num_blocks=30) as engine:
        requests = [make_request(prompt_len=1 + i % 11, max_tokens=1 + i % 13) for i in range(60)]
        outcomes = await asyncio.gather(*(collect(engine.submit(request)) for request in requests))
        for request, (token_ids, text, last) in zip(requests, outcomes, strict=True):
            assert token_ids == expected_output(request.prompt_token_ids, request.stop.max_tokens or 0)
            assert text == bytes(token_ids).decode()
            assert last.reason is FinishReason.LENGTH
            assert last.usage.num_prompt_tokens == len(request.prompt_token_ids)
            assert last.usage.num_completion_tokens == request.stop.max_tokens


async def test_times_are_told_in_order():
    async with running_engine() as engine:
        _, _, last = await collect(engine.submit(make_request(max_tokens=4)))
        told = (
            last.timings.queued_s,
            last.timings.prefill_s,
            last.timings.first_token_s,
            last.timings.decode_s,
        )
        queued_s, prefill_s, first_token_s, decode_s = (time_s for time_s in told if time_s is not None)
        assert queued_s >= 0
        assert prefill_s > 0
        assert first_token_s == pytest.approx(queued_s + prefill_s)
        assert decode_s > 0


async def test_a_stop_id_ends_the_text_before_it_and_is_named():
    async with running_engine() as engine:
        prompt = tuple(b"hello")
        expected = expected_output(prompt, 20)
        stop = expected[5]
        request = make_request(prompt=prompt, max_tokens=20, stop_token_ids=frozenset({stop}))
        token_ids, text, last = await collect(engine.submit(request))
        assert token_ids == expected[: expected.index(stop) + 1]
        assert text == bytes(token_ids[:-1]).decode()
        assert (last.reason, last.matched_stop) == (FinishReason.STOP, stop)


@pytest.mark.parametrize(("ignore_eos", "reason"), [(False, FinishReason.STOP), (True, FinishReason.LENGTH)])
async def test_the_models_end_id_ends_it_unless_told_not_to(ignore_eos, reason):
    async with running_engine(choose=lambda ids, seed: 257) as engine:
        token_ids, text, last = await collect(
            engine.submit(make_request(max_tokens=5, ignore_eos=ignore_eos))
        )
        assert last.reason is reason
        assert len(token_ids) == (5 if ignore_eos else 1)
        assert text == ""


async def test_without_a_cap_a_request_goes_on_to_the_end_of_the_context_or_the_pool():
    async with running_engine(num_blocks=64, max_model_len=40) as engine:
        _, _, last = await collect(engine.submit(make_request(prompt_len=39, max_tokens=None)))
        assert (last.reason, last.usage.num_completion_tokens) == (FinishReason.LENGTH, 1)
    async with running_engine(num_blocks=5, block_size=4, max_model_len=40) as engine:
        _, _, last = await collect(engine.submit(make_request(prompt_len=3, max_tokens=None)))
        assert (last.reason, last.usage.num_completion_tokens) == (FinishReason.LENGTH, 17)


TOLD = SamplingParams(num_prompt_logprobs=0)


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"prompt": ()}, "prompt", "at least one token"),
        ({"prompt": (1, 258)}, "prompt.token_ids", "from 0 to 257"),
        ({"prompt": (-1,)}, "prompt.token_ids", "from 0 to 257"),
        ({"prompt_len": 128, "max_tokens": None}, "prompt", "context"),
        ({"prompt_len": 120, "max_tokens": 9}, "stop.max_tokens", "129, more than the model's context"),
        ({"prompt_len": 70, "max_tokens": 31}, "stop.max_tokens", "whole KV pool"),
        ({"prompt_len": 104, "max_tokens": None}, "prompt", "whole KV pool"),
        (
            {"prompt_len": 90, "max_tokens": None, "min_tokens": 39},
            "stop.min_tokens",
            "and 39 to make are 129",
        ),
        ({"prompt_len": 90, "max_tokens": None, "min_tokens": 11}, "stop.min_tokens", "whole KV pool"),
        ({"max_tokens": 0}, "stop.max_tokens", "at least 1, or 0 to have prompt logprobs alone"),
        ({"max_tokens": 0, "sampling": TOLD, "n": 2}, "stop.max_tokens", "at least 1 for 2 sequences"),
        ({"max_tokens": 0, "sampling": TOLD, "is_echoed": True}, "stop.max_tokens", "at least 1 with echo"),
        ({"max_tokens": 0, "sampling": TOLD, "min_tokens": 1}, "stop.min_tokens", "max_tokens=0"),
        ({"max_tokens": -1, "sampling": TOLD}, "stop.max_tokens", "at least 1"),
        ({"prompt_len": 128, "max_tokens": 1, "sampling": TOLD}, "prompt", "129, more than the model's"),
        ({"prompt_len": 101, "max_tokens": 0, "sampling": TOLD}, "prompt", "whole KV pool"),
        ({"stop_token_ids": frozenset({999})}, "stop.token_ids", "got 999"),
        ({"stop_strings": ("fine", "")}, "stop.strings", "empty text"),
        ({"time_limit_s": 0.0}, "time_limit", "positive"),
        ({"time_limit_s": float("nan")}, "time_limit", "positive"),
    ],
)
async def test_what_can_never_be_served_is_refused_at_once_and_hurts_nobody(options, field, message):
    async with running_engine(num_blocks=25, block_size=4, max_model_len=128) as engine:
        neighbour = make_request(max_tokens=12)
        stream = engine.submit(neighbour)
        with pytest.raises(InvalidRequest, match=message) as caught:
            engine.submit(make_request(**options))
        assert caught.value.violations[0].field == field
        token_ids, _, _ = await collect(stream)
        assert token_ids == expected_output(neighbour.prompt_token_ids, 12)
        await assert_serves(engine)


async def test_a_live_id_can_not_be_taken_twice_and_the_first_goes_on():
    async with running_engine() as engine:
        request = make_request(request_id="twin", max_tokens=6)
        stream = engine.submit(request)
        with pytest.raises(DuplicateRequest, match="twin"):
            engine.submit(make_request(request_id="twin"))
        token_ids, _, _ = await collect(stream)
        assert token_ids == expected_output(request.prompt_token_ids, 6)
        await collect(engine.submit(make_request(request_id="twin")))


async def test_a_full_queue_refuses_with_a_time_to_come_back():
    gate = StepGate()
    async with running_engine(
        before_step=gate, config=make_config(max_num_seqs=1, max_num_waiting=2)
    ) as engine:
        streams = [engine.submit(make_request(max_tokens=1))]
        await gate.wait_held()
        streams += [engine.submit(make_request(max_tokens=1)) for _ in range(2)]
        with pytest.raises(Overloaded, match="2 sequences are waiting") as caught:
            engine.submit(make_request())
        assert caught.value.retry_after_s > 0
        gate.open()
        for stream in streams:
            assert (await collect(stream))[2].reason is FinishReason.LENGTH


async def test_an_idle_engine_refuses_nobody_for_being_late_and_so_it_learns():
    gate = StepGate()
    # Not to be kept by any machine.
    latency = LatencyConfig(LatencyTargets(ttft_s=1e-4), refuses_late=True)
    async with running_engine(before_step=gate, config=replace(make_config(), latency=latency)) as engine:
        stream = engine.submit(make_request(max_tokens=2))
        await gate.wait_held()
        with pytest.raises(Overloaded, match=r"0\.0001 s are promised"):
            engine.submit(make_request())
        gate.open()
        assert (await collect(stream))[2].reason is FinishReason.LENGTH
        await assert_serves(engine)


async def test_a_cancel_in_the_middle_of_a_step_waits_for_its_end():
    gate = StepGate()
    async with running_engine(before_step=gate) as engine:
        neighbour = make_request(max_tokens=9)
        cancelled, kept = engine.submit(make_request(max_tokens=50)), engine.submit(neighbour)
        await gate.wait_held()
        engine.abort(cancelled.request_id)
        engine.abort(cancelled.request_id)
        assert engine.load().blocks.live > 0, "blocks were freed under a step that may still write to them"
        gate.open()
        token_ids, _, last = await collect(cancelled)
        assert last.reason is FinishReason.CANCELLED
        assert len(token_ids) <= 1
        assert (await collect(kept))[0] == expected_output(neighbour.prompt_token_ids, 9)
        engine.abort(cancelled.request_id)
        engine.abort(RequestId("never seen"))


@pytest.mark.parametrize("after_tokens", [0, 1, 2, 5])
async def test_cancel_at_any_token_frees_everything(after_tokens):
    async with running_engine(num_blocks=12, config=make_config(max_prefill_chunk=2)) as engine:
        neighbours = [make_request(prompt_len=9, max_tokens=6) for _ in range(3)]
        streams = [engine.submit(request) for request in neighbours]
        stream = engine.submit(make_request(prompt_len=7, max_tokens=20))
        seen = 0
        if not after_tokens:
            engine.abort(stream.request_id)
        async for event in stream:
            if isinstance(event, TokenEvent):
                seen += len(event.token_ids)
                if seen >= after_tokens:
                    engine.abort(stream.request_id)
            else:
                assert event.reason is FinishReason.CANCELLED
                assert event.usage.num_completion_tokens == seen
        for request, other in zip(neighbours, streams, strict=True):
            assert (await collect(other))[0] == expected_output(request.prompt_token_ids, 6)


async def test_a_time_limit_ends_a_request_normally_and_a_deadline_does_not():
    clock = {"slow": True}

    def slowly(plan):
        if clock["slow"]:
            threading.Event().wait(0.02)

    async with running_engine(before_step=slowly) as engine:
        limited = engine.submit(make_request(max_tokens=100, time_limit_s=0.3))
        loop_now = asyncio.get_running_loop().time()  # the same monotonic clock
        late = engine.submit(make_request(max_tokens=100, deadline_s=loop_now + 0.3))
        token_ids, _, last = await collect(limited)
        assert last.reason is FinishReason.TIME_LIMIT
        assert len(token_ids) < 100
        failure = (await collect(late))[2]
        assert isinstance(failure, FailureEvent)
        assert isinstance(failure.error, DeadlineExceeded)
        with pytest.raises(DeadlineExceeded):
            engine.submit(make_request(deadline_s=loop_now - 1))
        clock["slow"] = False
        await assert_serves(engine)


async def test_leaving_the_engine_gives_every_open_request_an_end():
    gate = StepGate()
    engine = AsyncEngine(make_fake_model(before_step=gate), make_config(max_num_seqs=2))
    async with engine:
        streams = [engine.submit(make_request(max_tokens=50)) for _ in range(6)]
        await gate.wait_held()
        gate.open()
    for stream in streams:
        last = (await collect(stream))[2]
        assert isinstance(last, FailureEvent)
        assert isinstance(last.error, Draining)
    assert engine.load().blocks.live == 0


async def test_draining_finishes_what_there_is_and_refuses_the_rest():
    async with running_engine() as engine:
        requests = [make_request(max_tokens=10) for _ in range(6)]
        streams = [engine.submit(request) for request in requests]
        draining = asyncio.create_task(engine.drain(grace_s=None))
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            engine.submit(make_request())
        for request, stream in zip(requests, streams, strict=True):
            assert (await collect(stream))[0] == expected_output(request.prompt_token_ids, 10)
        assert await draining == 0


async def test_a_drain_past_its_grace_ends_the_rest_with_a_reason():
    gate = StepGate()
    async with running_engine(before_step=gate) as engine:
        stream = engine.submit(make_request(max_tokens=50))
        await gate.wait_held()
        assert await engine.drain(grace_s=0.01) == 1
        gate.open()
        last = (await collect(stream))[2]
        assert isinstance(last, FailureEvent)
        assert isinstance(last.error, Draining)


async def test_a_reader_that_does_not_read_holds_up_nobody_and_loses_nothing():
    async with running_engine() as engine:
        lazy_request = make_request(max_tokens=40)
        lazy = engine.submit(lazy_request)
        await assert_serves(engine)
        await engine.wait_idle()
        assert lazy.is_finished
        events = lazy.take()
        assert [type(event) for event in events] == [TokenEvent, FinishEvent], "40 tokens were not joined"
        assert list(events[0].token_ids) == expected_output(lazy_request.prompt_token_ids, 40)
        assert lazy.take() == []


async def test_one_listener_can_serve_many_streams():
    async with running_engine() as engine:
        ready = asyncio.Queue()
        requests = {f"s{i}": make_request(request_id=f"s{i}", max_tokens=5 + i) for i in range(10)}
        for request in requests.values():
            engine.submit(request).set_listener(ready.put_nowait)
        outputs = {request_id: [] for request_id in requests}
        num_open = len(requests)
        while num_open:
            stream = await ready.get()
            for event in stream.take():
                if isinstance(event, TokenEvent):
                    outputs[stream.request_id] += event.token_ids
                else:
                    num_open -= 1
        for request_id, request in requests.items():
            assert outputs[request_id] == expected_output(
                request.prompt_token_ids, request.stop.max_tokens or 0
            )


async def test_steps_can_be_watched():
    async with running_engine(config=make_config(max_num_seqs=2)) as engine:
        async with engine.watch_steps() as watch:
            for _ in range(3):
                engine.submit(make_request(request_id=None, prompt_len=4, max_tokens=3))
            seen = []
            async for missed, stats in watch:
                assert missed == 0
                seen.append(stats)
                if sum(row.is_finished for stats in seen for row in stats.rows) == 3:
                    break
        totals = engine.load().totals
        assert [stats.step for stats in seen] == list(range(totals.num_steps))
        assert sum(stats.num_prefill_tokens for stats in seen) == totals.num_prefill_tokens == 12
        assert sum(stats.num_decode_tokens for stats in seen) == totals.num_decode_tokens == 6
        assert {row.slot for stats in seen for row in stats.rows} == {0, 1}
        assert all(stats.num_kv_slots_used <= stats.num_kv_slots_allocated for stats in seen)
        assert (seen[0].num_kv_slots_used, seen[0].num_kv_slots_allocated) == (8, 8)
        assert (seen[1].num_kv_slots_used, seen[1].num_kv_slots_allocated) == (10, 16)


async def test_a_watcher_that_lags_is_told_how_much_it_missed():
    async with running_engine(num_blocks=200, max_model_len=600) as engine, engine.watch_steps() as watch:
        await collect(engine.submit(make_request(prompt_len=1, max_tokens=300)))
        await engine.wait_idle()
        missed, stats = await anext(aiter(watch))
        assert missed == 300 - 256
        assert stats.step == missed


async def test_the_heartbeat_stands_still_only_while_a_step_hangs():
    gate = StepGate()
    async with running_engine(before_step=gate) as engine:
        assert engine.seconds_since_progress() == 0.0
        stream = engine.submit(make_request(max_tokens=2))
        await gate.wait_held()
        assert engine.seconds_since_progress() > 0.0
        gate.open()
        await collect(stream)
        await engine.wait_idle()
        assert engine.seconds_since_progress() == 0.0


async def test_ten_thousand_cancels_at_random_moments_leave_nothing_behind():
    async with running_engine(num_blocks=20, config=make_config(max_num_waiting=20_000)) as engine:

        async def one(number):
            request = make_request(prompt_len=1 + number % 9, max_tokens=1 + number % 12)
            stream = engine.submit(request)
            for _ in range(number % 7):
                await asyncio.sleep(0)
            if number % 3:
                engine.abort(request.request_id)
            token_ids, _, last = await collect(stream)
            assert token_ids == expected_output(request.prompt_token_ids, len(token_ids))
            assert last.reason in (FinishReason.LENGTH, FinishReason.CANCELLED)
            if number % 3 == 0:
                assert len(token_ids) == request.stop.max_tokens

        for start in range(0, 10_000, 500):
            await asyncio.gather(*(one(number) for number in range(start, start + 500)))


async def test_a_static_batch_begins_when_it_is_full_and_a_lone_request_is_not_left_to_wait():
    # So long a wait would be noticed: only a full batch begins before it is over.
    patient = SchedulerConfig(2, batching=BatchingPolicy.STATIC, static_batch_wait_s=3600.0)
    async with running_engine(config=replace(make_config(), scheduler=patient)) as engine:
        streams = [engine.submit(make_request(max_tokens=3)) for _ in range(2)]
        for stream in streams:
            assert len((await collect(stream))[0]) == 3
        waits = engine.submit(make_request(max_tokens=3))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.wait_idle(), 0.05)
        assert engine.load().num_waiting == 1
        engine.abort(waits.request_id)
        assert (await collect(waits))[2].reason is FinishReason.CANCELLED
    hasty = replace(patient, static_batch_wait_s=0.01)
    async with running_engine(config=replace(make_config(), scheduler=hasty)) as engine:
        await assert_serves(engine)
