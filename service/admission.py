"""From a StartGeneration to a live request of the engine; for all RPCs."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count

from headrace.engine import (
    CompiledConstraint,
    EngineDead,
    FieldViolation,
    InvalidRequest,
    Request,
    RequestId,
    SamplingParams,
    TokenStream,
)
from headrace.service.auth import no_longer_welcome
from headrace.service.convert import Start, start_from_proto
from headrace.service.edge import Edge
from headrace.service.identity import Caller, current_caller
from headrace.service.limits import Limits
from headrace.service.options import sampling_to_proto
from headrace.service.quotas import Ticket
from headrace.service.serving import ServedModel, Serving
from headrace.service.status import failure_from, unavailable
from headrace.v1 import generation_pb2

# A client's label is no key: it need be unique within its RPC only. This number makes it one.
_numbers = count(1)


@dataclass(slots=True)
class Progress:
    """How far a request has come: what its log line says, however it ends.

    Args:
        num_told_tokens: made and fetched for its client; of several sequences together.
        is_admitted: whether the engine has queued it.
        is_over: whether its end has been told of.
    """

    num_prompt_tokens: int = 0
    num_told_tokens: int = 0
    is_admitted: bool = False
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Parsed:
    """A request whose fields are in order.

    Args:
        label: what its client calls it.
        special_stops: stop strings that are exactly a special token's text, by the id of that token.
        deadline_s: monotonic moment past which it is ended, seconds.
        caller: who asks.
        ticket: its place in its client's account.
    """

    label: str
    request_id: RequestId
    served: ServedModel
    start: Start
    special_stops: dict[int, str]
    arrival_s: float
    deadline_s: float
    caller: Caller
    edge: Edge
    ticket: Ticket
    progress: Progress = field(default_factory=Progress)


@dataclass(frozen=True, slots=True)
class Encoded:
    """The token ids of a request's texts, and its constraint, ready to be followed."""

    prompt: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...] = ()
    constraint: CompiledConstraint | None = None


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that the engine has queued."""

    stream: TokenStream
    accepted: generation_pb2.Accepted


@contextmanager
def counted_rejections(edge: Edge) -> Iterator[None]:
    """Count the request as rejected if the block fails."""
    try:
        yield
    except Exception as error:
        edge.metrics.rejected(failure_from(error).reason)
        raise


def parse(
    serving: Serving, start: generation_pb2.StartGeneration, remaining_s: float | None, *, needs_label: bool
) -> Parsed:
    """Check a request's fields.

    Args:
        remaining_s: time that the RPC's deadline leaves, seconds; None for no deadline.
        needs_label: whether the client has to name it.

    Raises:
        RpcFailure: no model is served now, or not the one that it names; its sender is no longer welcome, or
            has used up what he may have.
        InvalidRequest: with everything that is wrong with it.
    """
    with counted_rejections(serving.edge):
        return _parsed(serving, start, remaining_s, needs_label=needs_label)


def _parsed(
    serving: Serving, start: generation_pb2.StartGeneration, remaining_s: float | None, *, needs_label: bool
) -> Parsed:
    now_s, caller = time.monotonic(), current_caller()
    if not caller.is_welcome():
        raise no_longer_welcome()
    served = serving.model()
    served.require(start.model)
    checked = start_from_proto(
        start, served.engine.info, served.limits, secrets.randbits(64), needs_label=needs_label
    )
    special_ids = {text: served.engine.tokenizer.special_token_id(text) for text in checked.stop.strings}
    number = next(_numbers)
    label = checked.label or f"request-{number}"
    allowed_s = served.limits.max_request_s
    return Parsed(
        label=label,
        request_id=RequestId(f"{number}:{label}"),
        served=served,
        start=checked,
        special_stops={token_id: text for text, token_id in special_ids.items() if token_id is not None},
        arrival_s=now_s,
        deadline_s=now_s + (allowed_s if remaining_s is None else min(allowed_s, remaining_s)),
        caller=caller,
        edge=serving.edge,
        ticket=serving.edge.quotas.request(caller.account),
    )


async def encode(parsed: Parsed) -> Encoded:
    """Token ids of its texts, and its constraint in a form to follow, made off the event loop.

    Raises:
        InvalidRequest: a text or the constraint can't be taken.
        Overloaded: too many wait for the same.
    """
    with counted_rejections(parsed.edge):
        return await _encoded(parsed)


async def _encoded(parsed: Parsed) -> Encoded:
    served, start = parsed.served, parsed.start
    tokenizer = served.engine.tokenizer
    prompt = await served.texts.encode_prompt(tokenizer, start.prompt, served.max_prompt_tokens)
    bad_words = await served.texts.encode_bad_words(tokenizer, start.bad_words)
    constraint = None
    if start.constraint is not None:
        constraint = await served.engine.constraints.compile(start.constraint)
    return Encoded(prompt, bad_words, constraint)


def admit(parsed: Parsed, encoded: Encoded) -> Admitted:
    """Queue it.

    Raises:
        EngineError: see `AsyncEngine.submit`.
        InvalidRequest: it would have more logprobs than a server keeps for one request.
        RpcFailure: UNAVAILABLE, the engine has died before it came.
    """
    with counted_rejections(parsed.edge):
        return _admitted(parsed, encoded)


def _admitted(parsed: Parsed, encoded: Encoded) -> Admitted:
    start, engine = parsed.start, parsed.served.engine
    parsed.progress.num_prompt_tokens = len(encoded.prompt)
    limit_s = start.time_limit_s
    request = Request(
        request_id=parsed.request_id,
        prompt_token_ids=encoded.prompt,
        sampling=_with_bad_words(start.sampling, encoded.bad_words),
        stop=replace(start.stop, token_ids=start.stop.token_ids | parsed.special_stops.keys()),
        output=start.output,
        # The engine counts from now on; the promise counts from arrival.
        time_limit_s=None if limit_s is None else max(1e-3, limit_s - (time.monotonic() - parsed.arrival_s)),
        deadline_s=parsed.deadline_s,
        n=start.n,
        best_of=start.best_of,
        priority=start.priority,
        isolation_key=parsed.caller.isolation_key(start.cache_salt),
        client=parsed.caller.account,
        uses_prefix_cache=start.uses_prefix_cache,
        speculation=start.speculation,
        constraint=encoded.constraint,
    )
    max_tokens = engine.max_tokens_for(request)
    violations = tuple(_logprobs_violations(request, max_tokens, parsed.served.limits))
    if violations:
        raise InvalidRequest(*violations)
    try:
        stream = engine.submit(request)
    except EngineDead as error:
        raise unavailable("ENGINE_DEAD", str(error), 1.0) from error
    parsed.progress.is_admitted = True
    parsed.ticket.charge_up_to(len(encoded.prompt))
    parsed.edge.metrics.admitted(parsed.request_id, parsed.caller, len(encoded.prompt))
    accepted = generation_pb2.Accepted(
        prompt_tokens=len(encoded.prompt),
        max_tokens=max_tokens,
        sampling=sampling_to_proto(start.sampling, start.bad_words, start.best_of),
        model=parsed.served.name,
    )
    return Admitted(stream, accepted)


def _with_bad_words(sampling: SamplingParams, bad_words: tuple[tuple[int, ...], ...]) -> SamplingParams:
    return replace(sampling, bad_words=bad_words) if bad_words else sampling


def _logprobs_violations(request: Request, max_tokens: int, limits: Limits) -> Iterator[FieldViolation]:
    """Name what would make more logprobs than are kept: an answer may wait whole for its reader."""
    most, sampling = limits.max_request_logprobs, request.sampling
    # To choose the best ones, one logprob per token is kept though none is told.
    is_ranked = request.best_of > request.n
    num_top = 0 if is_ranked and sampling.num_logprobs is None else sampling.num_logprobs
    num_made = 0 if num_top is None else request.best_of * max(0, max_tokens) * (1 + num_top)
    num_read = 0
    if sampling.num_prompt_logprobs is not None:
        num_read = len(request.prompt_token_ids) * (1 + sampling.num_prompt_logprobs)
    if num_read > most:
        yield FieldViolation(
            "output.prompt_logprobs",
            f"would make {num_read} logprobs of {len(request.prompt_token_ids)} prompt tokens, "
            f"more than {most}: ask for fewer",
        )
    elif num_read + num_made > most:
        yield FieldViolation(
            "sampling.best_of" if sampling.num_logprobs is None else "output.logprobs",
            f"would make up to {num_made} logprobs of {request.best_of} sequences of up to {max_tokens} "
            f"tokens, more than {most - num_read}: ask for fewer, or set stop.max_tokens lower",
        )
