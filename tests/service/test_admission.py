"""What the engine gets of a request that came over the wire."""

from __future__ import annotations

import grpc
import pytest

from headrace.engine import SamplingParams
from headrace.service.limits import Limits
from headrace.v1.generation_pb2 import OutputOptions, SamplingOptions, StartGeneration, TokenIds
from tests.support.fake_runner import FakeTokenizer
from tests.support.indexed_runner import make_indexed_model
from tests.support.service import generate, make_start, running_service, status_of, violated_fields

EVERYTHING = SamplingOptions(
    temperature=0.5,
    top_k=9,
    top_p=0.75,
    min_p=0.125,
    typical_p=0.875,
    seed=11,
    frequency_penalty=0.5,
    presence_penalty=-0.25,
    repetition_penalty=1.5,
    logit_bias={5: -1.5, 3: 2.0},
    allowed_token_ids=TokenIds(ids=[97, 98]),
    banned_token_ids=TokenIds(ids=[99]),
    bad_words=["no", "go"],
    best_of=3,
)


async def test_every_sampling_value_reaches_the_engine_and_is_told_back() -> None:
    model, runner = make_indexed_model()
    start = make_start(n=2, output=OutputOptions(logprobs=4, prompt_logprobs=2))
    start.sampling.CopyFrom(EVERYTHING)
    async with running_service(model) as service:
        accepted = (await generate(service, start))[0].accepted
    (sampling,) = {row.sampling for plan in runner.plans for row in plan.rows}
    assert sampling == SamplingParams(
        temperature=0.5,
        top_k=9,
        top_p=0.75,
        min_p=0.125,
        typical_p=0.875,
        seed=11,
        frequency_penalty=0.5,
        presence_penalty=-0.25,
        repetition_penalty=1.5,
        logit_bias=((3, 2.0), (5, -1.5)),
        allowed_token_ids=frozenset({97, 98}),
        banned_token_ids=frozenset({99}),
        bad_words=(tuple(b"no"), tuple(b" no"), tuple(b"go"), tuple(b" go")),
        num_logprobs=4,
        num_prompt_logprobs=2,
    )
    assert {row.index for plan in runner.plans for row in plan.rows} == {0, 1, 2}
    assert accepted.sampling == EVERYTHING


class SpacelessTokenizer(FakeTokenizer):
    """Puts a space before every text itself, and knows no blank text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return super().encode(
            f" {text.strip()}" if text.strip() else "", add_special_tokens=add_special_tokens
        )


async def test_a_bad_word_that_is_encoded_alike_both_ways_is_one() -> None:
    model, runner = make_indexed_model(tokenizer=SpacelessTokenizer())
    async with running_service(model) as service:
        await generate(service, make_start(sampling=SamplingOptions(bad_words=["no"])))
    assert runner.plans[0].rows[0].sampling.bad_words == (tuple(b" no"),)


async def test_a_bad_word_without_any_token_is_refused() -> None:
    model, _ = make_indexed_model(tokenizer=SpacelessTokenizer())
    async with running_service(model) as service:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await generate(service, make_start(sampling=SamplingOptions(bad_words=["  "])))
    assert violated_fields(status_of(refusal.value)) == ["sampling.bad_words"]


# What would be made of it, and the field that is to blame; `make_start` asks for 8 tokens after 4.
TOO_MANY_LOGPROBS: list[tuple[StartGeneration, str]] = [
    (make_start(output=OutputOptions(logprobs=12)), "output.logprobs"),
    (make_start(n=5, output=OutputOptions(logprobs=2)), "output.logprobs"),
    (make_start(max_tokens=None, output=OutputOptions(logprobs=0)), "output.logprobs"),
    (make_start(sampling=SamplingOptions(best_of=13)), "sampling.best_of"),
    (make_start(output=OutputOptions(prompt_logprobs=25)), "output.prompt_logprobs"),
    (make_start(output=OutputOptions(prompt_logprobs=20, logprobs=2)), "output.logprobs"),
]


async def test_one_request_has_so_many_logprobs_and_no_more() -> None:
    model, _ = make_indexed_model()
    async with running_service(model, limits=Limits(max_request_logprobs=100)) as service:
        for start, field in TOO_MANY_LOGPROBS:
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await generate(service, start)
            assert violated_fields(status_of(refusal.value)) == [field]
        for start in (
            make_start(output=OutputOptions(logprobs=11)),
            make_start(n=12, output=OutputOptions(logprobs=0)),
            make_start(sampling=SamplingOptions(best_of=12)),
            make_start(output=OutputOptions(prompt_logprobs=24)),
            make_start(output=OutputOptions(prompt_logprobs=20, logprobs=1)),
            make_start(n=100),
        ):
            assert (await generate(service, start))[-1].HasField("finished")
