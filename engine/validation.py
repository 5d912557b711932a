"""What a request must satisfy before it is queued, checked on token ids: in O(its size), before any work."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from headrace.engine.config import CacheLayout, ModelInfo, Speculation, SpeculationConfig
from headrace.engine.errors import FieldViolation, InvalidRequest
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sequence import Request

MAX_SEQUENCES = 128
"""Most sequences that one request may make."""
MAX_PRIORITY = 100
"""Highest priority; the lowest is as far below 0."""


def max_tokens_for(request: Request, info: ModelInfo, layout: CacheLayout) -> int:
    """Most tokens that `request` may make: its own cap, or what context and KV pool leave to its prompt."""
    room = layout.longest(info.max_model_len) - len(request.prompt_token_ids)
    return room if request.stop.max_tokens is None else min(room, request.stop.max_tokens)


def check_request(
    request: Request,
    info: ModelInfo,
    layout: CacheLayout,
    speculation: SpeculationConfig = SpeculationConfig(),  # noqa: B008 - frozen
) -> None:
    """Refuse what can never be served.

    Args:
        speculation: who proposes tokens on this server.

    Raises:
        InvalidRequest: naming every field that is wrong, and the limit that it breaks.
    """
    violations = [*_prompt_violations(request, info, layout), *_max_tokens_violations(request)]
    violations += _stop_violations(request, info)
    limit = request.time_limit_s
    if limit is not None and not (math.isfinite(limit) and limit > 0):
        violations.append(FieldViolation("time_limit", f"must be a positive time, got {limit} s"))
    if not -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
        wanted = f"must be from {-MAX_PRIORITY} to {MAX_PRIORITY}"
        violations.append(FieldViolation("priority", f"{wanted}, got {request.priority}"))
    violations += _count_violations(request)
    violations += _sampling_violations(request.sampling, info.vocab_size)
    violations += _constraint_violations(request, info)
    violations += _speculation_violations(request, speculation)
    if violations:
        raise InvalidRequest(*violations)


def _prompt_violations(request: Request, info: ModelInfo, layout: CacheLayout) -> Iterator[FieldViolation]:
    num_prompt = len(request.prompt_token_ids)
    if num_prompt == 0:
        yield FieldViolation("prompt", "must hold at least one token, got none")
        return
    foreign = _first_foreign(request.prompt_token_ids, info.vocab_size)
    if foreign is not None:
        yield FieldViolation(
            "prompt.token_ids",
            f"must be from 0 to {info.vocab_size - 1}, the model's vocabulary, got {foreign}",
        )
    asked = request.stop.max_tokens
    # Of one that leaves its most open, the least has to fit.
    total = num_prompt + (max(1, request.stop.min_tokens) if asked is None else max(asked, 0))
    for limit, name in (
        (info.max_model_len, "the model's context"),
        (layout.num_tokens, "the whole KV pool of this server"),
    ):
        if total > limit:
            field = "stop.min_tokens" if asked is None else "stop.max_tokens"
            if num_prompt >= limit:
                field = "prompt"
            yield FieldViolation(
                field,
                f"{num_prompt} prompt tokens and {total - num_prompt} to make are {total}, "
                f"more than {name} holds: {limit} tokens",
            )
            return


def _max_tokens_violations(request: Request) -> Iterator[FieldViolation]:
    asked = request.stop.max_tokens
    if asked is None or asked >= 1:
        return
    if asked < 0 or request.sampling.num_prompt_logprobs is None:
        yield FieldViolation(
            "stop.max_tokens", f"must be at least 1, or 0 to have prompt logprobs alone, got {asked}"
        )
    elif request.best_of > 1:
        yield FieldViolation("stop.max_tokens", f"must be at least 1 for {request.best_of} sequences, got 0")
    elif request.output.is_echoed:
        yield FieldViolation("stop.max_tokens", "must be at least 1 with echo, which begins an output, got 0")


def _stop_violations(request: Request, info: ModelInfo) -> Iterator[FieldViolation]:
    if not all(request.stop.strings):
        yield FieldViolation("stop.strings", "must not hold an empty text: it would end every output at once")
    foreign = _first_foreign(request.stop.token_ids, info.vocab_size)
    if foreign is not None:
        yield FieldViolation(
            "stop.token_ids",
            f"must be from 0 to {info.vocab_size - 1}, the model's vocabulary, got {foreign}",
        )


def _count_violations(request: Request) -> Iterator[FieldViolation]:
    if not 1 <= request.n <= MAX_SEQUENCES:
        yield FieldViolation("n", f"must be from 1 to {MAX_SEQUENCES}, got {request.n}")
    elif not request.n <= request.best_of <= MAX_SEQUENCES:
        wanted = f"must be from n={request.n} to {MAX_SEQUENCES}"
        yield FieldViolation("sampling.best_of", f"{wanted}, got {request.best_of}")
    num_min, num_max = request.stop.min_tokens, request.stop.max_tokens
    if num_min < 0 or (num_max is not None and num_min > num_max):
        yield FieldViolation("stop.min_tokens", f"must be from 0 to max_tokens={num_max}, got {num_min}")


def _sampling_violations(sampling: SamplingParams, vocab_size: int) -> Iterator[FieldViolation]:
    for name, token_ids in (
        ("sampling.logit_bias", (token_id for token_id, _ in sampling.logit_bias)),
        ("sampling.allowed_token_ids", sampling.allowed_token_ids or ()),
        ("sampling.banned_token_ids", sampling.banned_token_ids),
        ("sampling.bad_words", (token_id for word in sampling.bad_words for token_id in word)),
    ):
        foreign = _first_foreign(token_ids, vocab_size)
        if foreign is not None:
            yield FieldViolation(
                name, f"must be from 0 to {vocab_size - 1}, the model's vocabulary, got {foreign}"
            )
    if len(sampling.banned_token_ids) >= vocab_size:
        yield FieldViolation("sampling.banned_token_ids", "leaves no token that could be drawn")


def _constraint_violations(request: Request, info: ModelInfo) -> Iterator[FieldViolation]:
    if request.constraint is None:
        return
    if request.stop.ignore_eos:
        reason = "can't be set with a constraint: its text ends where it is complete, by an end id"
        yield FieldViolation("stop.ignore_eos", reason)
    elif not info.eos_token_ids and not request.stop.token_ids:
        reason = "must name an id that ends a constrained text, for the model declares none"
        yield FieldViolation("stop.token_ids", reason)


def _speculation_violations(request: Request, config: SpeculationConfig) -> Iterator[FieldViolation]:
    wanted, most = request.speculation, config.max_speculative_tokens
    if wanted.num_tokens is not None and not 0 <= wanted.num_tokens <= most:
        yield FieldViolation(
            "speculation.num_speculative_tokens",
            f"must be from 0 to {most}, the most that this server proposes per step, got {wanted.num_tokens}",
        )
    elif wanted.is_enabled is False and wanted.num_tokens:
        yield FieldViolation(
            "speculation.num_speculative_tokens",
            f"must be 0 or left out where speculation is not enabled, got {wanted.num_tokens}",
        )
    elif wanted.is_demanded and config.kind is Speculation.NONE:
        name = "enabled" if wanted.is_enabled else "num_speculative_tokens"
        yield FieldViolation(
            f"speculation.{name}", "this server does not speculate: leave it out, or have it started so"
        )


def _first_foreign(token_ids: Iterable[int], vocab_size: int) -> int | None:
    return next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
