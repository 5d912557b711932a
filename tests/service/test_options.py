from __future__ import annotations

import math
from dataclasses import replace

import grpc
import pytest

from headrace.engine import InvalidRequest, SamplingParams, StopConditions
from headrace.service.convert import Start, start_from_proto
from headrace.service.limits import Limits
from headrace.service.options import default_sampling_to_proto, sampling_to_proto
from headrace.v1.generation_pb2 import (
    OutputOptions,
    SamplingOptions,
    StartGeneration,
    StopOptions,
    TokenIds,
)
from tests.support.fake_runner import VOCAB_SIZE, make_fake_model
from tests.support.service import generate, make_start, running_service, status_of, violated_fields

INFO = make_fake_model().info
NAN, INFINITY = math.nan, math.inf


def parsed(start: StartGeneration) -> Start:
    return start_from_proto(start, INFO, Limits(), seed=7, needs_label=True)


def sampling(**values: object) -> StartGeneration:
    return make_start("a", sampling=SamplingOptions(**values))  # type: ignore[arg-type]


def stop(**values: object) -> StartGeneration:
    return make_start("a", max_tokens=None, stop=StopOptions(**values))  # type: ignore[arg-type]


def output(**values: object) -> StartGeneration:
    return make_start("a", output=OutputOptions(**values))  # type: ignore[arg-type]


def counts(n: int | None, best_of: int | None = None) -> StartGeneration:
    return make_start("a", n=n, sampling=SamplingOptions(best_of=best_of))


FOREIGN = TokenIds(ids=[5, VOCAB_SIZE])
TOO_MANY = TokenIds(ids=[5] * 16_385)

# One line per way in which an option can be wrong: the request, and the field that the refusal names.
BAD_OPTIONS: list[tuple[StartGeneration, str]] = [
    (sampling(temperature=-0.1), "sampling.temperature"),
    (sampling(temperature=100.5), "sampling.temperature"),
    (sampling(temperature=NAN), "sampling.temperature"),
    (sampling(temperature=INFINITY), "sampling.temperature"),
    (sampling(temperature=-INFINITY), "sampling.temperature"),
    (sampling(top_p=0.0), "sampling.top_p"),
    (sampling(top_p=1.5), "sampling.top_p"),
    (sampling(top_p=NAN), "sampling.top_p"),
    (sampling(top_p=INFINITY), "sampling.top_p"),
    (sampling(min_p=-0.5), "sampling.min_p"),
    (sampling(min_p=1.5), "sampling.min_p"),
    (sampling(min_p=NAN), "sampling.min_p"),
    (sampling(typical_p=0.0), "sampling.typical_p"),
    (sampling(typical_p=1.5), "sampling.typical_p"),
    (sampling(typical_p=NAN), "sampling.typical_p"),
    (sampling(frequency_penalty=2.5), "sampling.frequency_penalty"),
    (sampling(frequency_penalty=NAN), "sampling.frequency_penalty"),
    (sampling(presence_penalty=-2.5), "sampling.presence_penalty"),
    (sampling(presence_penalty=INFINITY), "sampling.presence_penalty"),
    (sampling(repetition_penalty=0.0), "sampling.repetition_penalty"),
    (sampling(repetition_penalty=-1.0), "sampling.repetition_penalty"),
    (sampling(repetition_penalty=10.5), "sampling.repetition_penalty"),
    (sampling(repetition_penalty=NAN), "sampling.repetition_penalty"),
    (sampling(logit_bias={VOCAB_SIZE: 1.0}), "sampling.logit_bias"),
    (sampling(logit_bias={2**32 - 1: 1.0}), "sampling.logit_bias"),
    (sampling(logit_bias={5: NAN}), "sampling.logit_bias"),
    (sampling(logit_bias={5: -INFINITY}), "sampling.logit_bias"),
    (sampling(logit_bias={5: 100.5}), "sampling.logit_bias"),
    (sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), "sampling.logit_bias"),
    (sampling(allowed_token_ids=TokenIds()), "sampling.allowed_token_ids"),
    (sampling(allowed_token_ids=FOREIGN), "sampling.allowed_token_ids"),
    (sampling(allowed_token_ids=TOO_MANY), "sampling.allowed_token_ids"),
    (
        sampling(allowed_token_ids=TokenIds(ids=[5]), banned_token_ids=TokenIds(ids=[4, 5])),
        "sampling.allowed_token_ids",
    ),
    (sampling(banned_token_ids=FOREIGN), "sampling.banned_token_ids"),
    (sampling(banned_token_ids=TOO_MANY), "sampling.banned_token_ids"),
    (sampling(bad_words=["x"] * 129), "sampling.bad_words"),
    (sampling(bad_words=["good", "x" * 257]), "sampling.bad_words"),
    (sampling(bad_words=["good", "é" * 129]), "sampling.bad_words"),
    (sampling(bad_words=["good", ""]), "sampling.bad_words"),
    (counts(None, 0), "sampling.best_of"),
    (counts(3, 2), "sampling.best_of"),
    (counts(3, 129), "sampling.best_of"),
    (counts(3, 2**32 - 1), "sampling.best_of"),
    (counts(0), "n"),
    (counts(129), "n"),
    (counts(129, 128), "n"),
    (counts(2**32 - 1), "n"),
    (stop(max_tokens=0), "stop.max_tokens"),
    (make_start("a", max_tokens=0, output=OutputOptions(logprobs=0)), "stop.max_tokens"),
    (stop(max_tokens=8, min_tokens=9), "stop.min_tokens"),
    (stop(min_tokens=129), "stop.min_tokens"),
    (stop(min_tokens=2**32 - 1), "stop.min_tokens"),
    (stop(strings=["x"] * 33), "stop.strings"),
    (stop(strings=["good", "x" * 1025]), "stop.strings"),
    (stop(strings=["good", "é" * 513]), "stop.strings"),
    (stop(strings=[""]), "stop.strings"),
    (stop(strings=["x" * 10_000] * 1000), "stop.strings"),
    (stop(token_ids=[VOCAB_SIZE]), "stop.token_ids"),
    (stop(token_ids=[2**32 - 1]), "stop.token_ids"),
    (stop(token_ids=range(257)), "stop.token_ids"),
    (output(logprobs=65), "output.logprobs"),
    (output(logprobs=VOCAB_SIZE), "output.logprobs"),
    (output(logprobs=2**32 - 1), "output.logprobs"),
    (output(prompt_logprobs=65), "output.prompt_logprobs"),
    (output(prompt_logprobs=2**32 - 1), "output.prompt_logprobs"),
]


@pytest.mark.parametrize(
    ("start", "field"), BAD_OPTIONS, ids=[f"{field}-{i}" for i, (_, field) in enumerate(BAD_OPTIONS)]
)
def test_a_bad_option_is_refused_by_name(start: StartGeneration, field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parsed(start)
    assert [violation.field for violation in refusal.value.violations] == [field]
    assert refusal.value.violations[0].description


async def test_each_bad_option_is_invalid_argument_to_its_sender_and_nobody_else() -> None:
    async with running_service() as service:
        for start, field in BAD_OPTIONS:
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await generate(service, start)
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT, field
            assert violated_fields(status_of(refusal.value)) == [field]
        assert (await generate(service, make_start("good")))[-1].HasField("finished")


# One line per option at the border of what is taken: what the engine gets.
TAKEN: list[tuple[SamplingOptions, SamplingParams]] = [
    (SamplingOptions(), SamplingParams()),
    (SamplingOptions(temperature=100.0, top_k=2**32 - 1), SamplingParams(temperature=100.0, top_k=2**32 - 1)),
    (SamplingOptions(top_p=1.0, min_p=1.0), SamplingParams(min_p=1.0)),
    (SamplingOptions(typical_p=0.25), SamplingParams(typical_p=0.25)),
    (SamplingOptions(frequency_penalty=2.0), SamplingParams(frequency_penalty=2.0)),
    (SamplingOptions(presence_penalty=-2.0), SamplingParams(presence_penalty=-2.0)),
    (SamplingOptions(repetition_penalty=10.0), SamplingParams(repetition_penalty=10.0)),
    (
        SamplingOptions(logit_bias={VOCAB_SIZE - 1: -100.0, 0: 100.0}),
        SamplingParams(logit_bias=((0, 100.0), (VOCAB_SIZE - 1, -100.0))),
    ),
    (
        SamplingOptions(allowed_token_ids=TokenIds(ids=[7, 5, 7])),
        SamplingParams(allowed_token_ids=frozenset({5, 7})),
    ),
    (
        SamplingOptions(banned_token_ids=TokenIds(ids=[0, VOCAB_SIZE - 1])),
        SamplingParams(banned_token_ids=frozenset({0, VOCAB_SIZE - 1})),
    ),
]


@pytest.mark.parametrize(("options", "params"), TAKEN, ids=range(len(TAKEN)))
def test_a_good_option_arrives_and_is_told_back(options: SamplingOptions, params: SamplingParams) -> None:
    options.seed = 2**64 - 1
    start = parsed(StartGeneration(request_id="a", text="x", sampling=options))
    assert start.sampling == replace(params, seed=2**64 - 1)
    told = sampling_to_proto(start.sampling, ("never",), best_of=3)
    assert list(told.bad_words) == ["never"]
    assert told.best_of == 3
    # Whoever sends what was told asks for the same.
    again = parsed(StartGeneration(request_id="a", text="x", sampling=told, n=3))
    assert (again.sampling, again.bad_words, again.best_of) == (start.sampling, ("never",), 3)


def test_logprobs_are_asked_for_by_their_presence() -> None:
    assert parsed(output()).sampling.num_logprobs is None
    none_beside = parsed(output(logprobs=0, prompt_logprobs=0)).sampling
    assert (none_beside.num_logprobs, none_beside.num_prompt_logprobs) == (0, 0)
    most = parsed(output(logprobs=64, prompt_logprobs=64)).sampling
    assert (most.num_logprobs, most.num_prompt_logprobs) == (64, 64)


@pytest.mark.parametrize(
    ("n", "best_of", "expected"),
    [(None, None, (1, 1)), (3, None, (3, 3)), (None, 4, (1, 4)), (2, 128, (2, 128))],
)
def test_as_many_are_made_as_are_told_unless_more_are_asked_for(
    n: int | None, best_of: int | None, expected: tuple[int, int]
) -> None:
    start = parsed(counts(n, best_of))
    assert (start.n, start.best_of) == expected


def test_ends_arrive() -> None:
    given = stop(
        max_tokens=3, min_tokens=3, token_ids=[5, 5, 6], ignore_eos=True, strings=["x"], include_stop=True
    )
    assert parsed(given).stop == StopConditions(3, frozenset({5, 6}), True, ("x",), True, 3)
    assert parsed(stop(min_tokens=128)).stop == StopConditions(min_tokens=128)


def test_a_default_has_neither_a_seed_nor_a_number_of_sequences() -> None:
    default = default_sampling_to_proto(SamplingParams())
    assert (default.temperature, default.top_p, default.typical_p, default.repetition_penalty) == (1, 1, 1, 1)
    assert not default.HasField("seed")
    assert not default.HasField("best_of")
