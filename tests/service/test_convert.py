from __future__ import annotations

import math
from collections.abc import Callable

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Struct

from headrace.engine import (
    BlockCounts,
    FinishEvent,
    FinishReason,
    InvalidRequest,
    ModelInfo,
    OutputParams,
    RowStats,
    SamplingParams,
    SpeculationParams,
    StepStats,
    StopConditions,
    Timings,
    TokenEvent,
    Usage,
)
from headrace.service.convert import (
    Start,
    chat_from_proto,
    delta_into_proto,
    finished_to_proto,
    seconds,
    start_from_proto,
    step_to_proto,
)
from headrace.service.limits import Limits
from headrace.service.status import duration
from headrace.v1.generation_pb2 import (
    FINISH_REASON_STOP,
    CacheOptions,
    ChatMessage,
    ChatPrompt,
    Choice,
    Constraint,
    Delta,
    OutputOptions,
    SamplingOptions,
    SpeculationOptions,
    StartGeneration,
    StopOptions,
    TokenIds,
    Tool,
    ToolCall,
)
from tests.support.fake_runner import VOCAB_SIZE, FakeTokenizer, make_fake_model
from tests.support.indexed_runner import logprobs_of
from tests.support.service import generate, make_start, running_service, status_of, violated_fields

INFO = make_fake_model().info
NAN, INFINITY = math.nan, math.inf


def parsed(start: StartGeneration, model: ModelInfo = INFO, limits: Limits | None = None) -> Start:
    """`start` as a request of a Session."""
    return start_from_proto(start, model, limits or Limits(), seed=7, needs_label=True)


def chat(*messages: ChatMessage, **values: object) -> StartGeneration:
    return StartGeneration(request_id="a", chat=ChatPrompt(messages=messages, **values))  # type: ignore[arg-type]


def struct(**values: object) -> Struct:
    built = Struct()
    built.update(values)  # type: ignore[arg-type]
    return built


def nested(depth: int) -> list[object]:
    """That many lists, each but the last in another."""
    return [nested(depth - 1)] if depth > 1 else [1]


USER = ChatMessage(role="user", content="hi")

# One line per way in which a field can be wrong: the request, and the field that the refusal names.
BAD_FIELDS: list[tuple[StartGeneration, str]] = [
    (make_start("a", time_limit=Duration()), "time_limit"),
    (make_start("a", time_limit=Duration(seconds=-1, nanos=2_000_000_000)), "time_limit"),
    (make_start("a", time_limit=Duration(seconds=1, nanos=-1)), "time_limit"),
    (make_start("a", time_limit=Duration(seconds=-1)), "time_limit"),
    (make_start("a", time_limit=Duration(seconds=10**9)), "time_limit"),
    (make_start("a", constraint=Constraint(json_schema="")), "constraint.json_schema"),
    (make_start("a", constraint=Constraint(regex="")), "constraint.regex"),
    (make_start("a", constraint=Constraint(grammar="")), "constraint.grammar"),
    (make_start("a", constraint=Constraint(choice=Choice())), "constraint.choice"),
    (make_start("a", constraint=Constraint(choice=Choice(options=["a", ""]))), "constraint.choice"),
    (make_start("a", constraint=Constraint(regex="a" * (256 * 1024 + 1))), "constraint.regex"),
    (make_start("a", priority=101), "priority"),
    (make_start("a", priority=-101), "priority"),
    (make_start("a", cache=CacheOptions(salt="x" * 257)), "cache.salt"),
    (make_start("x" * 129), "request_id"),
    (make_start("a\n"), "request_id"),
    (make_start("é"), "request_id"),
    (StartGeneration(request_id="a"), "prompt"),
    (make_start("a", prompt=()), "token_ids"),
    (make_start("a", prompt=(VOCAB_SIZE,)), "token_ids"),
    (make_start("a", prompt=(0,) * 129), "token_ids"),
    (StartGeneration(request_id="a", text="x" * (2 * 2**20 + 1)), "text"),
    (StartGeneration(request_id="a", text="é" * (2**20 + 1)), "text"),
    (chat(), "chat.messages"),
    (chat(*[USER] * 1025), "chat.messages"),
    (chat(ChatMessage(content="hi")), "chat.messages[0].role"),
    (chat(ChatMessage(role="user", content="x" * (2 * 2**20))), "chat"),
    (chat(USER, tools=[Tool(name="t")] * 129), "chat.tools"),
    (chat(USER, template_variables=struct(x=[1, NAN])), "chat.template_variables.x[1]"),
    (chat(USER, tools=[Tool(name="t", parameters=struct(x=INFINITY))]), "chat.tools[0].parameters.x"),
    (
        chat(ChatMessage(role="assistant", tool_calls=[ToolCall(arguments=struct(x=NAN))])),
        "chat.messages[0].tool_calls[0].arguments.x",
    ),
    (chat(USER, template_variables=struct(x=nested(24))), "chat.template_variables"),
    (chat(USER, template_variables=struct(x=[None] * 16_384)), "chat.template_variables"),
    (
        chat(
            USER,
            template_variables=struct(x=[None] * 8192),
            tools=[Tool(name="t"), Tool(name="u", parameters=struct(x=[None] * 8192))],
        ),
        "chat.tools[1].parameters",
    ),
    (
        chat(ChatMessage(role="assistant", tool_calls=[ToolCall(arguments=struct(x=[0] * 9000))] * 2)),
        "chat.messages[0].tool_calls[1].arguments",
    ),
    (chat(ChatMessage(role="assistant", tool_calls=[ToolCall()] * 16_385)), "chat.messages"),
    (StartGeneration.FromString(make_start("a").SerializeToString() + b"\x9a\x06\x01x"), "#99"),
    (
        StartGeneration(
            request_id="a",
            token_ids=TokenIds(ids=[1]),
            stop=StopOptions.FromString(b"\x98\x06\x01"),
        ),
        "stop.#99",
    ),
    (chat(ChatMessage.FromString(USER.SerializeToString() + b"\x98\x06\x01")), "chat.messages[0].#99"),
]


@pytest.mark.parametrize(
    ("start", "field"), BAD_FIELDS, ids=[f"{field}-{i}" for i, (_, field) in enumerate(BAD_FIELDS)]
)
def test_a_bad_field_is_refused_by_name(start: StartGeneration, field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parsed(start)
    assert [violation.field for violation in refusal.value.violations] == [field]
    assert refusal.value.violations[0].description


def test_a_priority_above_the_operators_cap_is_refused_by_name() -> None:
    limits = Limits(max_priority=5)
    assert parsed(make_start("a", priority=5), limits=limits).priority == 5
    parsed(make_start("a", priority=-100), limits=limits)
    with pytest.raises(InvalidRequest, match=r"priority.*from -100 to 5, got 6"):
        parsed(make_start("a", priority=6), limits=limits)


async def test_each_bad_field_is_invalid_argument_to_its_sender_and_nobody_else() -> None:
    async with running_service() as service:
        for start, field in BAD_FIELDS:
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await generate(service, start)
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT, field
            assert violated_fields(status_of(refusal.value)) == [field]
        assert (await generate(service, make_start("good")))[-1].HasField("finished")


def test_all_that_is_wrong_is_told_at_once() -> None:
    start = make_start("\n", prompt=(VOCAB_SIZE,), n=3, time_limit=Duration())
    start.sampling.CopyFrom(SamplingOptions(temperature=NAN, top_p=0.0, best_of=2, logit_bias={999: 1.0}))
    start.stop.CopyFrom(StopOptions(max_tokens=0, token_ids=[VOCAB_SIZE], strings=[""]))
    start.output.logprobs = 65
    start.priority = 2**31 - 1
    with pytest.raises(InvalidRequest) as refusal:
        parsed(start)
    assert {violation.field for violation in refusal.value.violations} == {
        "request_id",
        "token_ids",
        "priority",
        "time_limit",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.best_of",
        "sampling.logit_bias",
        "stop.max_tokens",
        "stop.token_ids",
        "stop.strings",
        "output.logprobs",
    }


def test_json_may_nest_and_be_long_up_to_its_bounds() -> None:
    parsed(chat(USER, template_variables=struct(x=nested(23), y=[None] * 16_000)))


def test_values_that_ask_for_nothing_are_taken() -> None:
    start = make_start(
        "a",
        n=1,
        priority=0,
        constraint=Constraint(),
        cache=CacheOptions(salt="", bypass=False),
        speculation=SpeculationOptions(enabled=False, num_speculative_tokens=0),
        output=OutputOptions(echo=False),
    )
    start.sampling.MergeFrom(
        SamplingOptions(
            typical_p=1.0,
            frequency_penalty=0.0,
            presence_penalty=0.0,
            repetition_penalty=1.0,
            banned_token_ids=TokenIds(),
            best_of=1,
        )
    )
    start.stop.MergeFrom(StopOptions(min_tokens=0, include_stop=False))
    assert parsed(start).stop == StopConditions(max_tokens=8)
    assert parsed(start).sampling == SamplingParams(temperature=0.0, seed=7)


def test_what_a_request_says_about_speculation_arrives() -> None:
    said = SpeculationOptions(enabled=True, num_speculative_tokens=3)
    assert parsed(make_start("a", speculation=said)).speculation == SpeculationParams(True, 3)
    seeded = make_start("a", speculation=SpeculationOptions(num_speculative_tokens=0))
    seeded.sampling.seed = 0
    assert parsed(seeded).speculation == SpeculationParams(None, 0, has_own_seed=True)


def test_fields_that_are_not_set_take_the_defaults() -> None:
    start = parsed(StartGeneration(request_id="a", text="x"))
    assert start.sampling == SamplingParams(seed=7)
    assert start.stop == StopConditions()
    assert start.output == OutputParams(wants_text=True, skip_special_tokens=True, is_echoed=False)
    assert start.wants_token_ids
    assert (start.n, start.best_of, start.bad_words) == (1, 1, ())
    assert start.time_limit_s is None
    assert (start.cache_salt, start.uses_prefix_cache) == ("", True)


def test_fields_that_are_set_arrive() -> None:
    start = parsed(
        StartGeneration(
            request_id="a",
            token_ids=TokenIds(ids=[3, 4]),
            cache=CacheOptions(salt="pepper", bypass=True),
            time_limit=Duration(seconds=1, nanos=500_000_000),
            output=OutputOptions(text=False, token_ids=False, skip_special_tokens=False, echo=True),
            n=2,
        )
    )
    assert start.prompt == (3, 4)
    assert start.time_limit_s == 1.5
    assert (start.cache_salt, start.uses_prefix_cache) == ("pepper", False)
    assert start.output == OutputParams(wants_text=False, skip_special_tokens=False, is_echoed=True)
    assert not start.wants_token_ids
    assert (start.n, start.best_of) == (2, 2)


def test_a_conversation_arrives_with_whole_numbers_whole() -> None:
    prompt = ChatPrompt(
        messages=[
            ChatMessage(
                role="assistant",
                tool_calls=[ToolCall(id="1", name="add", arguments=struct(a=5, b=0.5, c=[None, True, "x"]))],
            ),
            ChatMessage(role="tool", content="5.5", tool_call_id="1", name="add"),
        ],
        tools=[Tool(name="add", description="adds", parameters=struct(type="object"))],
        add_generation_prompt=False,
        template_variables=struct(enable_thinking=False),
    )
    told = chat_from_proto(prompt)
    assert told.messages[0].tool_calls[0].arguments == {"a": 5, "b": 0.5, "c": [None, True, "x"]}
    assert isinstance(told.messages[0].tool_calls[0].arguments["a"], int)
    assert (told.messages[1].tool_call_id, told.messages[1].name) == ("1", "add")
    assert (told.tools[0].name, told.tools[0].parameters) == ("add", {"type": "object"})
    assert told.add_generation_prompt is False
    assert told.template_variables == {"enable_thinking": False}


def test_a_refusal_never_quotes_what_was_sent() -> None:
    secret = "tell-nobody"
    starts: list[Callable[[], StartGeneration]] = [
        lambda: make_start(f"{secret}\n"),
        lambda: make_start("a", cache=CacheOptions(salt=secret * 100)),
        lambda: make_start("a", stop=StopOptions(strings=[secret * 1000])),
        lambda: make_start("a", constraint=Constraint(regex=secret * 100_000)),
        lambda: make_start("a", sampling=SamplingOptions(bad_words=[secret * 1000])),
        lambda: StartGeneration(request_id="a", text=secret * 10**6),
    ]
    for start in starts:
        with pytest.raises(InvalidRequest) as refusal:
            parsed(start())
        assert secret not in str(refusal.value)


def test_an_end_carries_usage_times_and_the_matched_id() -> None:
    finished = finished_to_proto(
        FinishEvent(
            index=0,
            reason=FinishReason.STOP,
            matched_stop=0,
            usage=Usage(3, 4, num_cached_tokens=2, num_draft_tokens=6, num_accepted_draft_tokens=1),
            timings=Timings(0.25, 0.5, None, None),
            num_preemptions=6,
        )
    )
    assert finished.reason == FINISH_REASON_STOP
    assert finished.matched_stop.WhichOneof("kind") == "token_id"
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens, finished.usage.cached_tokens) == (
        3,
        4,
        2,
    )
    assert (finished.usage.draft_tokens_proposed, finished.usage.draft_tokens_accepted) == (6, 1)
    assert seconds(finished.timings.queued) == 0.25
    assert not finished.timings.HasField("decode")
    assert finished.preemptions == 6


def test_a_matched_text_is_told_as_a_text() -> None:
    event = FinishEvent(0, FinishReason.STOP, "END", Usage(1, 1), Timings(None, None, None, None), 0)
    assert finished_to_proto(event).matched_stop.text == "END"


def test_every_reason_has_its_word_on_the_wire() -> None:
    for reason in FinishReason:
        event = FinishEvent(0, reason, None, Usage(1, 1), Timings(None, None, None, None), 0)
        assert finished_to_proto(event).reason != 0


def test_a_delta_leaves_out_what_was_not_asked_for() -> None:
    event = TokenEvent(0, (1, 2), "ab", (logprobs_of(1, 0), logprobs_of(2, 0)))
    with_ids = parsed(make_start("a", output=OutputOptions(logprobs=0)))
    without = parsed(make_start("a", output=OutputOptions(token_ids=False)))
    told, text_alone = Delta(), Delta()
    delta_into_proto(event, with_ids, FakeTokenizer(), told)
    assert list(told.token_ids) == [1, 2]
    assert [entry.chosen.token_id for entry in told.logprobs] == [1, 2]
    delta_into_proto(event, without, FakeTokenizer(), text_alone)
    assert text_alone == Delta(text="ab")


def test_a_step_tells_its_rows() -> None:
    stats = StepStats(
        step=3,
        num_waiting=2,
        num_preemptions=1,
        blocks=BlockCounts(total=10, free=7, cached=1, live=2),
        num_kv_slots_allocated=8,
        num_kv_slots_used=6,
        schedule_s=0.001,
        execute_s=0.5,
        update_s=0.002,
        rows=(RowStats("1:a", 0, 0, 4, 0, False), RowStats("2:b", 0, 3, 0, 1, True)),
    )
    message = step_to_proto(stats, num_missed=5)
    assert (message.step, message.num_running, message.num_waiting, message.num_missed) == (3, 2, 2, 5)
    assert (message.prefill_tokens, message.decode_tokens, message.preemptions) == (4, 1, 1)
    assert [(row.request, row.slot, row.finished) for row in message.rows] == [
        ("1:a", 0, False),
        ("2:b", 3, True),
    ]
    assert message.blocks.total == 10
    assert seconds(message.execute_time) == 0.5


@pytest.mark.parametrize("value", [0.0, 0.1, 1.0, 1.9999999999, 123456.789])
def test_durations_keep_nanoseconds(value: float) -> None:
    assert seconds(duration(value)) == pytest.approx(value, abs=1e-9)
