from __future__ import annotations

import math

import pytest

from headrace.clients.errors import InvalidArgument
from headrace.clients.prompts import RequestOptions, start_message
from headrace.clients.request_rules import check_options
from headrace.engine import InvalidRequest
from headrace.service.convert import start_from_proto
from headrace.service.limits import Limits
from tests.support.fake_runner import make_fake_model
from tests.support.programs import run_headrace

# What is asked for, and the field that both sides refuse.
BAD: list[tuple[RequestOptions, str]] = [
    ({"temperature": 9999}, "sampling.temperature"),
    ({"temperature": -0.5}, "sampling.temperature"),
    ({"temperature": math.nan}, "sampling.temperature"),
    ({"temperature": math.inf}, "sampling.temperature"),
    ({"top_p": 0.0}, "sampling.top_p"),
    ({"top_p": 1.5}, "sampling.top_p"),
    ({"min_p": -0.5}, "sampling.min_p"),
    ({"min_p": 1.5}, "sampling.min_p"),
    ({"typical_p": 0.0}, "sampling.typical_p"),
    ({"typical_p": 1.5}, "sampling.typical_p"),
    ({"frequency_penalty": -2.5}, "sampling.frequency_penalty"),
    ({"frequency_penalty": 2.5}, "sampling.frequency_penalty"),
    ({"presence_penalty": -2.5}, "sampling.presence_penalty"),
    ({"presence_penalty": 2.5}, "sampling.presence_penalty"),
    ({"repetition_penalty": 0.0}, "sampling.repetition_penalty"),
    ({"repetition_penalty": 10.5}, "sampling.repetition_penalty"),
    ({"logit_bias": {1: 100.5}}, "sampling.logit_bias"),
    ({"logit_bias": {1: -math.inf}}, "sampling.logit_bias"),
    ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "sampling.logit_bias"),
    ({"allowed_token_ids": [1] * 16_385}, "sampling.allowed_token_ids"),
    ({"banned_token_ids": [1] * 16_385}, "sampling.banned_token_ids"),
    ({"bad_words": ["x"] * 129}, "sampling.bad_words"),
    ({"bad_words": ["é" * 129]}, "sampling.bad_words"),
    ({"bad_words": [""]}, "sampling.bad_words"),
    ({"stop": ["x"] * 33}, "stop.strings"),
    ({"stop": ["é" * 513]}, "stop.strings"),
    ({"stop": [""]}, "stop.strings"),
    ({"stop_token_ids": [1] * 257}, "stop.token_ids"),
    ({"logprobs": 65}, "output.logprobs"),
    ({"prompt_logprobs": 65}, "output.prompt_logprobs"),
    ({"priority": 101}, "priority"),
    ({"priority": -101}, "priority"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"best_of": 129}, "sampling.best_of"),
    ({"n": 3, "best_of": 2}, "sampling.best_of"),
    ({"max_tokens": 0}, "stop.max_tokens"),
    ({"max_tokens": 4, "min_tokens": 5}, "stop.min_tokens"),
]
# What both take, at the very bounds.
GOOD: list[RequestOptions] = [
    {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "typical_p": 1, "seed": 0},
    {
        "temperature": 100,
        "top_k": 2**32 - 1,
        "top_p": 0.001,
        "min_p": 1,
        "typical_p": 0.001,
        "seed": 2**64 - 1,
    },
    {"frequency_penalty": -2, "presence_penalty": -2, "repetition_penalty": 0.001},
    {"frequency_penalty": 2, "presence_penalty": 2, "repetition_penalty": 10},
    {"logit_bias": {1: -100, 2: 100}, "allowed_token_ids": [1] * 16_384, "banned_token_ids": [2] * 16_384},
    {"bad_words": ["x" * 256] * 128, "stop": ["x" * 1024] * 32, "stop_token_ids": [1] * 256},
    {"logprobs": 0, "prompt_logprobs": 64, "max_tokens": 0, "priority": -100},
    {"logprobs": 64, "prompt_logprobs": 0, "priority": 100, "n": 128, "best_of": 128},
    {
        "max_tokens": 5,
        "min_tokens": 5,
        "time_limit_s": 0.001,
        "speculation": False,
        "num_speculative_tokens": 0,
    },
]


def server_refusal(options: RequestOptions) -> list[tuple[str, str]]:
    """What the server says of a request, by fields."""
    start = start_message([1, 2], options, 2**30)
    try:
        start_from_proto(start, make_fake_model().info, Limits(), seed=7, needs_label=True)
    except InvalidRequest as refusal:
        return [(violation.field, violation.description) for violation in refusal.violations]
    return []


@pytest.mark.parametrize(("options", "field"), BAD, ids=lambda part: str(part)[:40])
def test_what_the_server_refuses_is_refused_before_in_the_same_words(
    options: RequestOptions, field: str
) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        check_options(options)
    told = [(violation.field, violation.description) for violation in refusal.value.violations]
    assert [name for name, _ in told] == [field]
    by_the_server = server_refusal(options)
    assert {name for name, _ in by_the_server} == {field}
    # Of a number the server knows what float32 makes of it.
    assert told[0][1].partition(", got")[0] == by_the_server[0][1].partition(", got")[0]


@pytest.mark.parametrize("options", GOOD, ids=lambda part: str(part)[:40])
def test_the_bounds_themselves_are_good_on_both_sides(options: RequestOptions) -> None:
    check_options(options)
    assert server_refusal(options) == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"top_k": -1}, "sampling.top_k: must be 0 (off) or a positive number, got -1"),
        ({"seed": 2**64}, "sampling.seed: must be from 0 to 2**64 - 1"),
        ({"min_tokens": -1}, "stop.min_tokens: must be 0 or a positive number, got -1"),
        ({"max_tokens": -1}, "stop.max_tokens: must be at least 1, got -1"),
        ({"max_tokens": 2**32}, "stop.max_tokens: must be from 0 to 4294967295"),
        ({"time_limit_s": 0.0}, "time_limit: must be above 0, got 0.0"),
        ({"time_limit_s": math.nan}, "time_limit: must be above 0, got nan"),
        ({"logit_bias": {-1: 0.0}}, "sampling.logit_bias: a token id must be 0 or a positive number, got -1"),
        ({"stop_token_ids": [3, -2]}, "stop.token_ids: a token id must be 0 or a positive number, got -2"),
        (
            {"speculation": False, "num_speculative_tokens": 2},
            "speculation.num_speculative_tokens: must be 0",
        ),
        ({"json_object": True, "regex": "a"}, "constraint: can be one thing only"),
        ({"stop": ["\udcff"]}, "stop.strings: can't be"),
        ({"temperature": -1, "top_p": 2}, "got -1; sampling.top_p: must be above 0"),
    ],
    ids=lambda part: str(part)[:40],
)
def test_what_the_protocol_can_not_say_is_refused_too(options: RequestOptions, told: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        check_options(options)
    assert told in refusal.value.message


@pytest.mark.parametrize("command", ["chat", "generate hi", "bench"])
async def test_a_command_says_what_is_allowed_before_it_asks_anybody(command: str) -> None:
    # Nobody is there to be asked.
    outcome = await run_headrace(*command.split(), "-t", "127.0.0.1:1", "--temperature", "9999")
    assert outcome.status == 2
    assert outcome.err == "headrace: --temperature: must be a finite number from 0 to 100, got 9999.0\n"
