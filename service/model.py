"""ModelService: what is served, and its text side without generation."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import Message

from headrace.engine import FieldViolation, InvalidRequest
from headrace.service.convert import chat_from_proto
from headrace.service.interceptors import Context
from headrace.service.logprobs import text_of
from headrace.service.options import default_sampling, default_sampling_to_proto
from headrace.service.scoring import score
from headrace.service.serving import ServedModel, Serving
from headrace.service.status import require_fits
from headrace.service.violations import chat_violations, num_bytes, text_violations, token_id_violations
from headrace.v1 import model_pb2, model_pb2_grpc

Answer = TypeVar("Answer", bound=Message)


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """Describes the served model and works on text as generation would."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def GetModel(
        self, request: model_pb2.GetModelRequest, context: Context
    ) -> model_pb2.GetModelResponse:
        """Describe one model."""
        return model_pb2.GetModelResponse(model=_model_to_proto(self._served(request.model)))

    async def ListModels(
        self, request: model_pb2.ListModelsRequest, context: Context
    ) -> model_pb2.ListModelsResponse:
        """Describe all."""
        return model_pb2.ListModelsResponse(models=[_model_to_proto(self._serving.model())])

    async def Tokenize(
        self, request: model_pb2.TokenizeRequest, context: Context
    ) -> model_pb2.TokenizeResponse:
        """Text to ids."""
        served = self._served(request.model)
        _refuse(*text_violations("text", request.text, served.limits))
        adds_special = not request.HasField("add_special_tokens") or request.add_special_tokens
        tokenizer = served.engine.tokenizer

        def work() -> model_pb2.TokenizeResponse:
            ids = tokenizer.encode(request.text, add_special_tokens=adds_special)
            answer = model_pb2.TokenizeResponse(token_ids=ids)
            if request.with_tokens:
                answer.tokens.extend(tokenizer.spellings(ids))
                answer.texts.extend(text_of(token_id, tokenizer) for token_id in ids)
            return answer

        told = await served.texts.run(num_bytes(request.text), work)
        return _fitting(told, served, "send the text in parts, or ask for ids without tokens")

    async def Detokenize(
        self, request: model_pb2.DetokenizeRequest, context: Context
    ) -> model_pb2.DetokenizeResponse:
        """Ids to text."""
        served = self._served(request.model)
        limit = served.limits.max_detokenized_ids
        if len(request.token_ids) > limit:
            raise InvalidRequest.of(
                "token_ids", f"must hold at most {limit} ids, got {len(request.token_ids)}"
            )
        _refuse(*token_id_violations("token_ids", request.token_ids, served.engine.info))
        skips_special = not request.HasField("skip_special_tokens") or request.skip_special_tokens
        tokenizer = served.engine.tokenizer

        def work() -> model_pb2.DetokenizeResponse:
            text = tokenizer.decode(list(request.token_ids), skip_special_tokens=skips_special)
            return model_pb2.DetokenizeResponse(text=text)

        told = await served.texts.run(len(request.token_ids), work)
        return _fitting(told, served, "send the ids in parts")

    async def ApplyChatTemplate(
        self, request: model_pb2.ApplyChatTemplateRequest, context: Context
    ) -> model_pb2.ApplyChatTemplateResponse:
        """The prompt that generation would make of a conversation."""
        served = self._served(request.model)
        _refuse(*chat_violations(request.chat, served.limits))
        chat, most_tokens = chat_from_proto(request.chat), served.max_prompt_tokens
        text, ids = await served.texts.render(served.engine.tokenizer, chat, most_tokens)
        rendered = model_pb2.ApplyChatTemplateResponse(text=text, token_ids=ids)
        return _fitting(rendered, served, "leave out early messages")

    async def Score(self, request: model_pb2.ScoreRequest, context: Context) -> model_pb2.ScoreResponse:
        """Log-likelihood of a text."""
        return await score(self._serving, self._served(request.model), request, context.time_remaining())

    def _served(self, name: str) -> ServedModel:
        served = self._serving.model()
        served.require(name)
        return served


def _refuse(*violations: FieldViolation) -> None:
    if violations:
        raise InvalidRequest(*violations)


def _fitting(answer: Answer, served: ServedModel, advice: str) -> Answer:
    require_fits(answer, served.limits.max_message_bytes, advice)
    return answer


def _model_to_proto(served: ServedModel) -> model_pb2.Model:
    engine, info = served.engine, served.engine.info
    return model_pb2.Model(
        name=served.name,
        family=info.family,
        max_sequence_length=info.max_model_len,
        vocabulary_size=info.vocab_size,
        end_token_ids=sorted(info.eos_token_ids),
        bos_token_id=info.bos_token_id,
        dtype=info.dtype,
        num_parameters=info.num_parameters,
        has_chat_template=engine.tokenizer.has_chat_template,
        default_sampling=default_sampling_to_proto(default_sampling(info)),
        kv_cache_tokens=engine.layout.num_tokens,
        block_size=engine.layout.block_size,
    )
