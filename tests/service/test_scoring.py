from __future__ import annotations

import math

import grpc
import pytest

from headrace.service.limits import Limits
from headrace.v1.generation_pb2 import TokenIds
from headrace.v1.model_pb2 import ScoreRequest
from tests.support.fake_runner import BOS, VOCAB_SIZE
from tests.support.indexed_runner import logprob_of, make_indexed_model
from tests.support.requests import make_config
from tests.support.service import running_service, status_of, violated_fields
from tests.support.step_gate import StepGate

IDS = TokenIds(ids=[5, 7, 9, 11])


async def test_each_token_but_the_first_is_scored_and_their_sum_is_told() -> None:
    model, _ = make_indexed_model()
    async with running_service(model) as service:
        by_ids = await service.model.Score(ScoreRequest(token_ids=IDS))
        by_text = await service.model.Score(ScoreRequest(text="hé"))
    assert [entry.chosen.token_id for entry in by_ids.tokens] == [7, 9, 11]
    assert by_ids.log_likelihood == math.fsum(map(logprob_of, (7, 9, 11)))
    assert not by_ids.tokens[0].top
    assert [entry.chosen.token_id for entry in by_text.tokens] == [*"hé".encode()]
    assert by_text.tokens[0].chosen.text == "h"
    assert BOS not in [entry.chosen.token_id for entry in by_text.tokens]


@pytest.mark.parametrize("num_context", [0, 1, 2, 3])
async def test_context_is_not_scored(num_context: int) -> None:
    model, _ = make_indexed_model()
    async with running_service(model) as service:
        told = await service.model.Score(ScoreRequest(token_ids=IDS, num_context_tokens=num_context))
    scored = [5, 7, 9, 11][max(1, num_context) :]
    assert [entry.chosen.token_id for entry in told.tokens] == scored
    assert told.log_likelihood == math.fsum(map(logprob_of, scored))


async def test_the_likeliest_tokens_are_told_when_asked_for() -> None:
    model, _ = make_indexed_model()
    async with running_service(model) as service:
        told = await service.model.Score(ScoreRequest(token_ids=IDS, logprobs=3))
    assert [[top.token_id for top in entry.top] for entry in told.tokens] == [[0, 1, 2]] * 3


async def test_a_text_computed_in_pieces_or_twice_is_scored_whole() -> None:
    ids = list(range(1, 60))
    model, _ = make_indexed_model()
    async with running_service(model, make_config(max_num_batched_tokens=16)) as service:
        for _ in range(2):
            told = await service.model.Score(ScoreRequest(token_ids=TokenIds(ids=ids)))
            assert [entry.chosen.token_id for entry in told.tokens] == ids[1:]
        assert service.engine.load().blocks.cached == 0


async def test_bad_fields_are_named_as_the_request_spells_them() -> None:
    model, _ = make_indexed_model(max_model_len=32)
    async with running_service(model, limits=Limits(max_text_bytes=40)) as service:
        for request, field in (
            (ScoreRequest(), "target"),
            (ScoreRequest(text=""), "text"),
            (ScoreRequest(text="x" * 41), "text"),
            (ScoreRequest(text="x" * 40), "text"),
            (ScoreRequest(token_ids=TokenIds()), "token_ids"),
            (ScoreRequest(token_ids=TokenIds(ids=[5])), "token_ids"),
            (ScoreRequest(token_ids=TokenIds(ids=[5, VOCAB_SIZE])), "token_ids"),
            (ScoreRequest(token_ids=TokenIds(ids=[5] * 33)), "token_ids"),
            (ScoreRequest(token_ids=IDS, num_context_tokens=4), "num_context_tokens"),
            (ScoreRequest(token_ids=IDS, num_context_tokens=2**32 - 1), "num_context_tokens"),
            (ScoreRequest(token_ids=IDS, logprobs=65), "logprobs"),
            (ScoreRequest.FromString(b"\x98\x06\x01"), "#99"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await service.model.Score(request)
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert violated_fields(status_of(refusal.value)) == [field]


async def test_a_text_that_can_not_possibly_fit_is_named_as_the_request_spells_it() -> None:
    model, _ = make_indexed_model(max_model_len=32)
    async with running_service(model) as service:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await service.model.Score(ScoreRequest(text="x" * 1000))
    assert violated_fields(status_of(refusal.value)) == ["text"]
    assert "1000 characters" in str(refusal.value.details())


@pytest.mark.parametrize("length", [31, 32])
async def test_a_text_may_fill_the_context_and_the_whole_pool(length: int) -> None:
    model, _ = make_indexed_model(max_model_len=32, num_blocks=32 // 4)
    ids = [5, *range(1, length)]
    async with running_service(model) as service:
        told = await service.model.Score(ScoreRequest(token_ids=TokenIds(ids=ids)))
        assert [entry.chosen.token_id for entry in told.tokens] == ids[1:]
        await service.engine.wait_idle()
        assert service.engine.load().totals.num_decode_tokens == 0


async def test_a_score_that_nobody_waits_for_is_not_computed() -> None:
    gate = StepGate()
    model, _ = make_indexed_model(before_step=gate, max_model_len=2048, num_blocks=1024)
    async with running_service(model, make_config(max_num_batched_tokens=64)) as service:
        call = service.model.Score(ScoreRequest(token_ids=TokenIds(ids=[5] * 2000)), timeout=0.05)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await call
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        gate.open()
        await service.engine.wait_idle()
        assert service.engine.load().totals.num_prefill_tokens < 2000


async def test_a_score_too_large_for_one_message_is_refused() -> None:
    model, _ = make_indexed_model()
    async with running_service(model, limits=Limits(max_message_bytes=3000)) as service:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await service.model.Score(ScoreRequest(token_ids=TokenIds(ids=[5] * 20), logprobs=60))
    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_another_model_is_not_found() -> None:
    async with running_service() as service:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await service.model.Score(ScoreRequest(model="other", text="hi"))
    assert refusal.value.code() is grpc.StatusCode.NOT_FOUND
