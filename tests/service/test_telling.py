"""What a request's caller hears, over real gRPC: several sequences, echo, stops; streamed and whole."""

from __future__ import annotations

import pytest
import structlog

from headrace.service.limits import Limits
from headrace.v1.generation_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    Completion,
    GenerateOnceRequest,
    GenerateRequest,
    GenerationEvent,
    OutputOptions,
    SamplingOptions,
    StartGeneration,
    StopOptions,
)
from tests.support.fake_runner import EOS, expected_output, make_fake_model
from tests.support.indexed_runner import expected_child, logprobs_of, make_indexed_model
from tests.support.requests import make_config
from tests.support.service import (
    PROMPT,
    RawSession,
    RunningService,
    generate,
    make_start,
    running_service,
    until,
)
from tests.support.step_gate import StepGate


def by_index(events: list[GenerationEvent]) -> list[Completion]:
    """What the deltas of a stream say together, put together by hand."""
    completions: dict[int, Completion] = {}
    for event in events[1:]:
        completion = completions.setdefault(event.index, Completion(index=event.index))
        assert not completion.HasField("finished"), "nothing follows an end"
        if event.HasField("finished"):
            completion.finished.CopyFrom(event.finished)
            completion.finished.ClearField("timings")
        else:
            completion.text += event.delta.text
            completion.token_ids.extend(event.delta.token_ids)
            completion.logprobs.extend(event.delta.logprobs)
            completion.prompt_logprobs.extend(event.delta.prompt_logprobs)
    return [completions[index] for index in sorted(completions)]


async def streamed(service: RunningService, start: StartGeneration) -> list[Completion]:
    """The completions of a stream whose events are checked for their order."""
    events = await generate(service, start)
    assert [event.sequence for event in events] == list(range(len(events)))
    assert events[0].HasField("accepted")
    assert events[-1].HasField("finished")
    return by_index(events)


async def whole(service: RunningService, start: StartGeneration) -> list[Completion]:
    """The same, answered at once; without the times, which differ from run to run."""
    response = await service.generation.GenerateOnce(GenerateOnceRequest(start=start))
    for completion in response.completions:
        completion.finished.ClearField("timings")
    return list(response.completions)


async def in_session(service: RunningService, start: StartGeneration) -> list[Completion]:
    """The same over a Session."""
    session = RawSession(service.generation)
    await session.start(start)
    await session.half_close()
    events = session.events[start.request_id]
    assert [event.sequence for event in events] == list(range(len(events)))
    return by_index(events)


VARIANTS = [
    make_start("plain", temperature=1.0, sampling=SamplingOptions(seed=5)),
    make_start("several", n=3, sampling=SamplingOptions(seed=5)),
    make_start("best", n=2, sampling=SamplingOptions(seed=5, best_of=5)),
    make_start("echo", n=2, output=OutputOptions(echo=True, logprobs=1)),
    make_start("ids only", n=2, output=OutputOptions(text=False, logprobs=2, prompt_logprobs=1)),
    make_start("text only", n=2, output=OutputOptions(token_ids=False, logprobs=0)),
    make_start("nothing", n=2, output=OutputOptions(text=False, token_ids=False)),
    make_start("logprobs only", output=OutputOptions(text=False, token_ids=False, logprobs=3)),
    make_start("best, told", sampling=SamplingOptions(best_of=4), output=OutputOptions(prompt_logprobs=2)),
]


@pytest.mark.parametrize("start", VARIANTS, ids=lambda start: start.request_id)
async def test_streamed_whole_and_in_a_session_say_the_same(start: StartGeneration) -> None:
    # Without the prefix cache, for usage tells what came from it.
    start.cache.bypass = True
    model, _ = make_indexed_model()
    async with running_service(model) as service:
        told = await whole(service, start)
        assert await streamed(service, start) == told
        assert await in_session(service, start) == told
    assert [completion.index for completion in told] == list(range(start.n or 1))
    assert all(completion.finished.usage.completion_tokens == 8 for completion in told)


async def test_each_sequence_is_told_under_its_index_and_interleaved() -> None:
    model, _ = make_indexed_model()
    async with running_service(model) as service:
        events = await generate(service, make_start(n=3, max_tokens=12))
        completions = by_index(events)
    assert [list(completion.token_ids) for completion in completions] == [
        expected_child(PROMPT, 12, index) for index in range(3)
    ]
    assert [completion.finished.reason for completion in completions] == [FINISH_REASON_LENGTH] * 3
    first_end = next(i for i, event in enumerate(events) if event.HasField("finished"))
    assert {event.index for event in events[1:first_end]} == {0, 1, 2}


async def test_usage_is_each_sequences_own_and_says_what_was_shared() -> None:
    model, _ = make_indexed_model()
    async with running_service(model) as service:
        completions = await whole(service, make_start(prompt=range(1, 14), n=3))
    usages = [completion.finished.usage for completion in completions]
    assert [usage.prompt_tokens for usage in usages] == [13] * 3
    assert [usage.completion_tokens for usage in usages] == [8] * 3
    assert [usage.cached_tokens for usage in usages] == [0, 12, 12]


async def test_the_best_are_told_best_first_and_without_logprobs_that_nobody_asked_for() -> None:
    model, _ = make_indexed_model()
    async with running_service(model) as service:
        completions = await whole(service, make_start(n=2, sampling=SamplingOptions(best_of=5)))
    # The runner finds an id the likelier, the smaller it is.
    outputs = sorted((expected_child(PROMPT, 8, index) for index in range(5)), key=sum)
    assert [list(completion.token_ids) for completion in completions] == outputs[:2]
    assert not any(completion.logprobs for completion in completions)


async def test_the_prompts_logprobs_come_with_the_first_whichever_is_the_best() -> None:
    model, _ = make_indexed_model()
    prompts = [(7, seed, 9) for seed in range(8)]
    async with running_service(model) as service:
        for prompt in prompts:
            start = make_start(
                prompt=prompt, sampling=SamplingOptions(best_of=4), output=OutputOptions(prompt_logprobs=0)
            )
            (completion,) = await whole(service, start)
            assert [entry.chosen.token_id for entry in completion.prompt_logprobs] == list(prompt[1:])
            assert not completion.logprobs


async def test_an_echo_puts_the_prompt_before_every_sequence_and_counts_for_nothing() -> None:
    model, _ = make_indexed_model()
    prompt = tuple(b"to be")
    async with running_service(model) as service:
        start = make_start(prompt=prompt, n=2, output=OutputOptions(echo=True, logprobs=0))
        completions = await whole(service, start)
    for index, completion in enumerate(completions):
        output = expected_child(prompt, 8, index)
        assert list(completion.token_ids) == [*prompt, *output]
        assert completion.text == "to be" + bytes(output).decode()
        assert [entry.chosen.token_id for entry in completion.logprobs] == output
        assert completion.finished.usage.completion_tokens == 8


async def test_an_echo_comes_whole_after_prompt_logprobs_that_come_in_pieces() -> None:
    prompt = tuple(b"to be or not")
    start = make_start("a", prompt=prompt, output=OutputOptions(echo=True, prompt_logprobs=1))
    model, _ = make_indexed_model()
    with structlog.testing.capture_logs() as logs:
        async with running_service(model, make_config(max_num_batched_tokens=5)) as service:
            (told,) = await whole(service, start)
            streams = [await streamed(service, start), await in_session(service, start)]
    assert list(told.token_ids) == [*prompt, *expected_output(prompt, 8)]
    assert [entry.chosen.token_id for entry in told.prompt_logprobs] == list(prompt[1:])
    assert streams == [[told], [told]]
    ends = [line for line in logs if line["event"] == "request ended"]
    assert [line["completion_tokens"] for line in ends] == [8, 8, 8]


async def test_logprobs_are_told_per_token_with_its_own_text() -> None:
    model, _ = make_indexed_model()
    async with running_service(model) as service:
        (completion,) = await whole(service, make_start(output=OutputOptions(logprobs=2)))
    for token_id, entry in zip(expected_output(PROMPT, 8), completion.logprobs, strict=True):
        expected = logprobs_of(token_id, 2)
        assert (entry.chosen.token_id, entry.chosen.logprob) == (token_id, expected.chosen.logprob)
        assert entry.chosen.rank == expected.chosen.rank
        assert entry.chosen.text == chr(token_id)
        assert [(top.token_id, top.logprob, top.rank) for top in entry.top] == [
            (top.token_id, top.logprob, top.rank) for top in expected.top
        ]


TEXT = bytes(expected_output(PROMPT, 8)).decode()

# What may end the answer, what is told of it, and where its text ends without the stop.
STOPS: list[tuple[list[str], str, int]] = [
    *(
        ([TEXT[i : i + length]], TEXT[i : i + length], TEXT.index(TEXT[i : i + length]))
        for length in range(1, 9)
        for i in range(9 - length)
    ),
    (["never", TEXT[3:5], TEXT[1:7]], TEXT[3:5], 3),
    ([TEXT[3], TEXT[2:4]], TEXT[2:4], 2),
    ([TEXT[2:5], TEXT[2:4]], TEXT[2:4], 2),
]


async def test_a_stop_string_ends_the_text_wherever_it_lies() -> None:
    async with running_service() as service:
        for strings, stop, place in STOPS:
            for is_included in (False, True):
                start = make_start("a", stop=StopOptions(strings=strings, include_stop=is_included))
                (told,) = await streamed(service, start)
                assert told.text == TEXT[: place + len(stop) * is_included]
                assert told.finished.reason == FINISH_REASON_STOP
                assert told.finished.matched_stop.text == stop
                assert told.finished.usage.completion_tokens == len(told.token_ids) == place + len(stop)


async def test_text_that_only_began_like_a_stop_is_told_in_the_end() -> None:
    async with running_service() as service:
        (told,) = await streamed(service, make_start(stop=StopOptions(strings=[TEXT[-2:] + "?"])))
    assert (told.text, told.finished.reason) == (TEXT, FINISH_REASON_LENGTH)


async def test_an_echoed_prompt_is_not_searched_for_stops() -> None:
    async with running_service() as service:
        start = make_start(stop=StopOptions(strings=["head"]), output=OutputOptions(echo=True))
        (told,) = await streamed(service, start)
    assert (told.text, told.finished.reason) == ("head" + TEXT, FINISH_REASON_LENGTH)


@pytest.mark.parametrize("shows_special", [False, True])
@pytest.mark.parametrize("includes", [False, True])
async def test_a_stop_string_may_be_a_special_tokens_text(shows_special: bool, includes: bool) -> None:
    # Every answer is "ab</s>ab</s>..."; the end id is passed over.
    model = make_fake_model(choose=lambda token_ids, seed: (97, 98, EOS)[(len(token_ids) - 4) % 3])
    start = make_start(
        "a",
        stop=StopOptions(strings=["</s>"], ignore_eos=True, include_stop=includes),
        output=OutputOptions(skip_special_tokens=not shows_special),
    )
    async with running_service(model) as service:
        told = await whole(service, start)
        assert await streamed(service, start) == told
    (completion,) = told
    assert completion.finished.matched_stop.text == "</s>"
    assert list(completion.token_ids) == [97, 98, EOS]
    assert completion.text == ("ab</s>" if shows_special and includes else "ab")


async def test_before_min_tokens_no_stop_counts() -> None:
    async with running_service() as service:
        start = make_start(stop=StopOptions(strings=[TEXT[1], TEXT[4:6]], min_tokens=5))
        (told,) = await streamed(service, start)
    end = next(i for i in range(4, 8) if TEXT[i] == TEXT[1] or TEXT[i - 1 : i + 1] == TEXT[4:6])
    assert told.finished.usage.completion_tokens == end + 1


async def test_a_cancel_ends_every_sequence_also_before_the_engine_has_seen_it() -> None:
    gate = StepGate()
    model, _ = make_indexed_model(before_step=gate, max_model_len=4096, num_blocks=2048)
    async with running_service(model) as service:
        session = RawSession(service.generation)
        await session.start(make_start("running", n=3, max_tokens=4000))
        await until(lambda: service.engine.load().num_running > 0)
        slow = make_start("unseen", n=2)
        await session.start(slow)
        await session.cancel("unseen")
        await session.cancel("running")
        gate.open()
        await session.half_close()
    for label, n in (("running", 3), ("unseen", 2)):
        events = session.events[label]
        assert [event.sequence for event in events] == list(range(len(events)))
        ends = [event for event in events if event.HasField("finished")]
        assert sorted(event.index for event in ends) == list(range(n))
        assert {event.finished.reason for event in ends} == {FINISH_REASON_CANCELLED}


async def test_a_session_forgets_a_label_only_when_every_sequence_has_ended() -> None:
    model, _ = make_indexed_model()
    async with running_service(model) as service:
        session = RawSession(service.generation)
        await session.start(make_start("a", n=2))
        for _ in range(2):
            while not (await session.next()).HasField("finished"):
                pass
        await session.start(make_start("a"))
        await session.half_close()
    assert [event.index for event in session.events["a"] if event.HasField("finished")] == [0, 1, 0]


async def test_a_request_is_logged_once_however_many_sequences_it_has() -> None:
    model, _ = make_indexed_model()
    with structlog.testing.capture_logs() as logs:
        async with running_service(model) as service:
            await generate(service, make_start("mine", n=3))
            await whole(service, make_start("mine", n=3))
    ends = [line for line in logs if line["event"] == "request ended"]
    assert [(line["outcome"], line["completion_tokens"]) for line in ends] == [("LENGTH", 24)] * 2


async def test_more_logprobs_than_are_told_at_once_come_in_several_deltas() -> None:
    prompt = range(1, 121)
    model, _ = make_indexed_model(max_model_len=256)
    start = make_start("a", prompt=prompt, output=OutputOptions(prompt_logprobs=64))
    async with running_service(model, make_config(max_num_batched_tokens=128)) as service:
        (told,) = await whole(service, start)
        events = await generate(service, start)
    assert [entry.chosen.token_id for entry in told.prompt_logprobs] == list(prompt)[1:]
    assert by_index(events)[0].prompt_logprobs == told.prompt_logprobs
    assert sum(bool(event.delta.prompt_logprobs) for event in events) == 2


async def test_an_answer_too_large_for_one_message_says_how_to_get_it() -> None:
    model, _ = make_indexed_model()
    limits = Limits(max_message_bytes=3000)
    start = make_start("a", output=OutputOptions(logprobs=64))
    async with running_service(model, limits=limits) as service:
        with pytest.raises(Exception, match="streamed by Generate") as refusal:
            await whole(service, start)
        assert "RESOURCE_EXHAUSTED" in str(refusal.value)


async def test_the_log_of_a_request_that_was_broken_off_says_how_far_it_came() -> None:
    gate = StepGate()
    with structlog.testing.capture_logs() as logs:
        async with running_service(make_fake_model(before_step=gate)) as service:
            gate.open()
            start = make_start("a", max_tokens=100)
            start.output.echo = True
            call = service.generation.Generate(GenerateRequest(start=start))
            seen: list[int] = []
            async for response in call:
                seen += response.event.delta.token_ids
                if len(seen) > len(PROMPT) + 3:
                    call.cancel()
                    break
            await service.engine.wait_idle()
            await until(lambda: any(line["event"] == "request ended" for line in logs))
    (end,) = [line for line in logs if line["event"] == "request ended"]
    assert end["outcome"] == "CANCELLED/RPC_ENDED"
    assert end["prompt_tokens"] == len(PROMPT)
    assert end["completion_tokens"] >= len(seen) - len(PROMPT)
