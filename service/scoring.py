"""How likely a model finds a given text: a request that makes no token and tells of its prompt."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.engine import FailureEvent, FieldViolation, InvalidRequest
from headrace.service.admission import Parsed, parse
from headrace.service.serving import ServedModel, Serving
from headrace.service.status import RpcFailure, invalid, require_fits
from headrace.service.telling import Teller, encode_and_admit, ended_with_its_rpc, failed
from headrace.service.violations import text_violations
from headrace.v1 import generation_pb2, model_pb2


async def score(
    serving: Serving, served: ServedModel, request: model_pb2.ScoreRequest, remaining_s: float | None
) -> model_pb2.ScoreResponse:
    """Log-likelihood of the request's text.

    Args:
        remaining_s: time that the RPC's deadline leaves, seconds; None for no deadline.

    Raises:
        InvalidRequest, RpcFailure: what its sender is told.
    """
    with _in_words_of(request):
        token_ids = await _token_ids(served, request)
    start = generation_pb2.StartGeneration(
        model=request.model,
        token_ids=generation_pb2.TokenIds(ids=token_ids),
        sampling=generation_pb2.SamplingOptions(temperature=0.0),
        stop=generation_pb2.StopOptions(max_tokens=0),
        output=generation_pb2.OutputOptions(text=False, token_ids=False, prompt_logprobs=request.logprobs),
        cache=generation_pb2.CacheOptions(bypass=True),
    )
    with _in_words_of(request):
        parsed = parse(serving, start, remaining_s, needs_label=False)
        with ended_with_its_rpc(parsed):
            response = await _scored(parsed, num_unscored=max(0, request.num_context_tokens - 1))
    require_fits(
        response, served.limits.max_message_bytes, "ask for fewer logprobs, or score the text in parts"
    )
    return response


async def _token_ids(served: ServedModel, request: model_pb2.ScoreRequest) -> tuple[int, ...]:
    target = request.WhichOneof("target")
    if target is None:
        raise InvalidRequest.of("target", "one of text and token_ids is required, got none")
    violations = tuple(text_violations("text", request.text, served.limits))
    if violations:
        raise InvalidRequest(*violations)
    prompt = request.text if target == "text" else tuple(request.token_ids.ids)
    most_tokens = served.max_prompt_tokens
    token_ids = await served.texts.encode_prompt(served.engine.tokenizer, prompt, most_tokens)
    if len(token_ids) < 2:
        raise InvalidRequest.of(
            target, f"must be at least 2 tokens, got {len(token_ids)}: the first one is never scored"
        )
    if request.num_context_tokens >= len(token_ids):
        raise InvalidRequest.of(
            "num_context_tokens",
            f"must be below the {len(token_ids)} tokens of the text, got {request.num_context_tokens}",
        )
    return token_ids


async def _scored(parsed: Parsed, num_unscored: int) -> model_pb2.ScoreResponse:
    """Run the request and gather what it tells of its prompt.

    Args:
        num_unscored: how many of the tokens that could be scored are not.
    """
    teller = Teller(parsed)
    admitted = await encode_and_admit(parsed)
    response = model_pb2.ScoreResponse()
    async for event in admitted.stream:
        if isinstance(event, FailureEvent):
            raise failed(parsed, event.error)
        for message in teller.messages(event):
            response.tokens.extend(message.delta.prompt_logprobs)
            # Between many logprobs and more of them, others have their turn.
            await asyncio.sleep(0)
    del response.tokens[:num_unscored]
    response.log_likelihood = math.fsum(entry.chosen.logprob for entry in response.tokens)
    return response


@contextmanager
def _in_words_of(request: model_pb2.ScoreRequest) -> Iterator[None]:
    """Refusals name the fields of `request`, which is sent on as a request for text."""
    target = request.WhichOneof("target") or "target"
    paths = {"prompt": target, "token_ids": target, "output.prompt_logprobs": "logprobs"}

    def told(violations: tuple[FieldViolation, ...]) -> RpcFailure:
        return invalid(*(FieldViolation(paths.get(v.field, v.field), v.description) for v in violations))

    try:
        yield
    except InvalidRequest as error:
        raise told(error.violations) from error
    except RpcFailure as error:
        if not error.violations:
            raise
        raise told(error.violations) from error
