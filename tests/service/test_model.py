from __future__ import annotations

from collections.abc import Awaitable

import grpc
import pytest

from headrace.service.limits import Limits
from headrace.v1.generation_pb2 import ChatMessage, ChatPrompt
from headrace.v1.model_pb2 import (
    ApplyChatTemplateRequest,
    DetokenizeRequest,
    GetModelRequest,
    ListModelsRequest,
    TokenizeRequest,
)
from tests.support.fake_runner import BOS, EOS, VOCAB_SIZE, make_fake_model
from tests.support.service import running_service, status_of, violated_fields


async def test_the_model_describes_itself() -> None:
    async with running_service(make_fake_model(num_blocks=10, block_size=4, max_model_len=32)) as service:
        model = (await service.model.GetModel(GetModelRequest())).model
        (listed,) = (await service.model.ListModels(ListModelsRequest())).models
    assert listed == model
    assert (model.name, model.family, model.max_sequence_length) == ("fake", "fake", 32)
    assert (model.vocabulary_size, list(model.end_token_ids), model.bos_token_id) == (VOCAB_SIZE, [EOS], BOS)
    assert (model.kv_cache_tokens, model.block_size, model.has_chat_template) == (40, 4, True)
    assert model.default_sampling.temperature == 1.0
    assert not model.default_sampling.HasField("seed")


async def test_another_model_is_not_found() -> None:
    async with running_service() as service:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await service.model.GetModel(GetModelRequest(model="other"))
    assert refusal.value.code() is grpc.StatusCode.NOT_FOUND


async def test_text_becomes_ids_and_text_again() -> None:
    async with running_service() as service:
        with_special = await service.model.Tokenize(TokenizeRequest(text="hé", with_tokens=True))
        plain = await service.model.Tokenize(TokenizeRequest(text="hé", add_special_tokens=False))
        request = DetokenizeRequest(token_ids=with_special.token_ids)
        back = await service.model.Detokenize(request)
        request.skip_special_tokens = False
        shown = await service.model.Detokenize(request)
    assert list(with_special.token_ids) == [BOS, *"hé".encode()]
    assert list(with_special.tokens) == ["<s>", "<0x68>", "<0xC3>", "<0xA9>"]
    # Neither of the last two is a character.
    assert list(with_special.texts) == ["<s>", "h", "\ufffd", "\ufffd"]
    assert list(plain.token_ids) == list("hé".encode())
    assert not plain.tokens
    assert not plain.texts
    assert (back.text, shown.text) == ("hé", "<s>hé")


async def test_the_template_is_applied_as_generation_would() -> None:
    chat = ChatPrompt(messages=[ChatMessage(role="user", content="hi")])
    async with running_service() as service:
        applied = await service.model.ApplyChatTemplate(ApplyChatTemplateRequest(chat=chat))
        chat.add_generation_prompt = False
        closed = await service.model.ApplyChatTemplate(ApplyChatTemplateRequest(chat=chat))
    assert applied.text == "user: hi\nassistant: "
    assert list(applied.token_ids) == list(applied.text.encode())
    assert closed.text == "user: hi\n"


async def test_bad_fields_are_named() -> None:
    async with running_service(limits=Limits(max_text_bytes=3, max_detokenized_ids=2)) as service:
        calls: list[tuple[Awaitable[object], str]] = [
            (service.model.Tokenize(TokenizeRequest(text="four")), "text"),
            (service.model.Detokenize(DetokenizeRequest(token_ids=[VOCAB_SIZE])), "token_ids"),
            (service.model.Detokenize(DetokenizeRequest(token_ids=[1, 2, 3])), "token_ids"),
            (service.model.ApplyChatTemplate(ApplyChatTemplateRequest()), "chat.messages"),
            (service.model.GetModel(GetModelRequest.FromString(b"\x98\x06\x01")), "#99"),
        ]
        for call, field in calls:
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await call
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert violated_fields(status_of(refusal.value)) == [field]


async def test_a_conversation_that_can_not_possibly_fit_is_named_as_the_request_spells_it() -> None:
    chat = ChatPrompt(messages=[ChatMessage(role="user", content="x" * 1000)])
    async with running_service(make_fake_model(max_model_len=32)) as service:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await service.model.ApplyChatTemplate(ApplyChatTemplateRequest(chat=chat))
    assert violated_fields(status_of(refusal.value)) == ["chat"]


async def test_while_loading_there_is_no_model_to_describe() -> None:
    async with running_service(opens=False) as service:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await service.model.ListModels(ListModelsRequest())
    assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
