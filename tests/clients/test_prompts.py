"""A call's arguments become exactly the message that they say, and nothing that was not said."""

from __future__ import annotations

from typing import cast

import pytest
from google.protobuf import json_format

from headrace.clients import prompts
from headrace.clients.errors import InvalidArgument
from headrace.clients.prompts import Chat, ChatMessage, Prompt, RequestOptions, Tool, ToolCall
from headrace.v1 import generation_pb2 as pb


def start_message(prompt: Prompt, options: RequestOptions) -> pb.StartGeneration:
    """With the usual limit."""
    return prompts.start_message(prompt, options, max_bytes=2**20)


def test_nothing_is_set_that_was_not_given_but_the_label() -> None:
    start, another = start_message("hello", {}), start_message("hello", {})
    assert start == pb.StartGeneration(text="hello", request_id=start.request_id)
    assert start.request_id != another.request_id


def test_a_request_too_long_for_the_connection_is_refused_before_it_is_sent() -> None:
    with pytest.raises(InvalidArgument, match="up to 1000") as caught:
        prompts.start_message("x" * 1000, {}, max_bytes=1000)
    assert caught.value.violations[0].field == "prompt"
    assert prompts.start_message("x" * 800, {}, max_bytes=1000).text


def test_every_option_has_its_field() -> None:
    options: RequestOptions = {
        "request_id": "r",
        "model": "m",
        "n": 2,
        "priority": -1,
        "time_limit_s": 1.5,
        "temperature": 0.0,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.25,
        "typical_p": 0.75,
        "seed": 2**64 - 1,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {5: -1.0},
        "allowed_token_ids": [1, 2],
        "banned_token_ids": [],
        "bad_words": ["x"],
        "best_of": 3,
        "max_tokens": 5,
        "min_tokens": 1,
        "stop": ["\n", "end"],
        "stop_token_ids": [1, 2],
        "ignore_eos": False,
        "include_stop": True,
        "wants_text": False,
        "wants_token_ids": True,
        "logprobs": 0,
        "prompt_logprobs": 4,
        "echo": True,
        "skip_special_tokens": False,
        "json_object": True,
        "cache_salt": "tenant",
        "cache_bypass": False,
        "speculation": False,
        "num_speculative_tokens": 6,
        "detach": True,
    }
    constraints = {"json_schema", "regex", "grammar", "choice"}
    assert options.keys() | constraints == RequestOptions.__annotations__.keys()
    expected = pb.StartGeneration(
        request_id="r",
        model="m",
        n=2,
        priority=-1,
        text="p",
        sampling=pb.SamplingOptions(
            temperature=0.0,
            top_k=3,
            top_p=0.5,
            min_p=0.25,
            typical_p=0.75,
            seed=2**64 - 1,
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            repetition_penalty=1.5,
            logit_bias={5: -1.0},
            allowed_token_ids=pb.TokenIds(ids=[1, 2]),
            banned_token_ids=pb.TokenIds(),
            bad_words=["x"],
            best_of=3,
        ),
        stop=pb.StopOptions(
            max_tokens=5,
            min_tokens=1,
            strings=["\n", "end"],
            token_ids=[1, 2],
            ignore_eos=False,
            include_stop=True,
        ),
        output=pb.OutputOptions(
            text=False, token_ids=True, logprobs=0, prompt_logprobs=4, echo=True, skip_special_tokens=False
        ),
        constraint=pb.Constraint(json_object=True),
        cache=pb.CacheOptions(salt="tenant", bypass=False),
        speculation=pb.SpeculationOptions(enabled=False, num_speculative_tokens=6),
        detach=True,
    )
    expected.time_limit.FromMilliseconds(1500)
    assert start_message("p", options) == expected


@pytest.mark.parametrize(
    ("options", "constraint"),
    [
        ({"json_schema": "{}"}, pb.Constraint(json_schema="{}")),
        ({"regex": "a+"}, pb.Constraint(regex="a+")),
        ({"grammar": "root ::= x"}, pb.Constraint(grammar="root ::= x")),
        ({"choice": ["yes", "no"]}, pb.Constraint(choice=pb.Choice(options=["yes", "no"]))),
    ],
    ids=str,
)
def test_each_constraint_has_its_field(options: RequestOptions, constraint: pb.Constraint) -> None:
    assert start_message("p", options).constraint == constraint


def test_an_answer_has_one_form_at_most() -> None:
    with pytest.raises(InvalidArgument, match="one thing only, got json_schema and regex"):
        start_message("hi", {"json_schema": "{}", "regex": "a"})


@pytest.mark.parametrize("prompt", [[1, 2, 3], (1, 2, 3)], ids=type)
def test_token_ids_are_sent_as_they_are(prompt: Prompt) -> None:
    assert start_message(prompt, {}).token_ids.ids == [1, 2, 3]


def test_an_empty_list_is_an_empty_prompt_that_the_server_refuses() -> None:
    assert start_message([], {}).WhichOneof("prompt") == "token_ids"


def test_messages_become_a_chat() -> None:
    start = start_message([ChatMessage("system", "Be brief."), ChatMessage("user", "Hi")], {})
    assert [(message.role, message.content) for message in start.chat.messages] == [
        ("system", "Be brief."),
        ("user", "Hi"),
    ]
    assert start.chat.add_generation_prompt


def test_a_chat_carries_tools_and_variables() -> None:
    chat = Chat(
        [
            ChatMessage("assistant", "", tool_calls=(ToolCall("c1", "add", {"a": 1.0, "b": [True, None]}),)),
            ChatMessage("tool", "3", tool_call_id="c1", name="add"),
        ],
        tools=[Tool("add", "Adds.", {"type": "object"})],
        add_generation_prompt=False,
        template_variables={"enable_thinking": False},
    )
    prompt = start_message(chat, {}).chat
    arguments = json_format.MessageToDict(prompt.messages[0].tool_calls[0].arguments)
    assert arguments == {"a": 1.0, "b": [True, None]}
    assert (prompt.messages[1].tool_call_id, prompt.messages[1].name) == ("c1", "add")
    assert prompt.tools[0].parameters["type"] == "object"
    assert prompt.template_variables["enable_thinking"] is False
    assert not prompt.add_generation_prompt


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": -1}, "stop.max_tokens"),
        ({"top_k": 2**32}, "sampling.top_k"),
        ({"seed": -1}, "sampling.seed"),
        ({"temperature": "warm"}, "sampling.temperature"),
        ({"stop_token_ids": [-1]}, "stop.token_ids"),
        ({"time_limit_s": float("nan")}, "time_limit"),
        ({"time_limit_s": float("inf")}, "time_limit"),
        ({"request_id": 5}, "request_id"),
        ({"stop": "one text"}, "stop.strings"),
        ({"logit_bias": {-1: 1.0}}, "sampling.logit_bias"),
        ({"choice": [1]}, "constraint.choice.options"),
    ],
    ids=str,
)
def test_a_value_that_does_not_fit_names_its_field(options: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        start_message("p", cast("RequestOptions", options))
    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": -1}, "must be from 0 to 4294967295, got -1"),
        ({"seed": 2**64}, "must be from 0 to 18446744073709551615, got 18446744073709551616"),
        ({"priority": 2**31}, "must be from -2147483648 to 2147483647, got 2147483648"),
    ],
    ids=str,
)
def test_a_number_that_no_field_holds_is_refused_with_the_bounds(
    options: dict[str, object], said: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        start_message("p", cast("RequestOptions", options))
    assert [violation.description for violation in caught.value.violations] == [said]


def test_a_mistyped_option_is_no_option() -> None:
    with pytest.raises(TypeError, match="max_token"):
        start_message("p", cast("RequestOptions", {"max_token": 5}))


@pytest.mark.parametrize("prompt", [[1, -2], ["a", "b"], [ChatMessage("user", "x"), 3]], ids=str)
def test_a_prompt_of_another_kind_is_refused(prompt: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        start_message(cast("Prompt", prompt), {})
    assert caught.value.violations[0].field == "prompt"
