"""From a StartGeneration to a live request of the engine, and from its events to messages; for all RPCs."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import grpc
from google.rpc import status_pb2

from headrace.engine import (
    EngineDead,
    FailureEvent,
    FinishEvent,
    OutputEvent,
    Request,
    RequestId,
    TokenEvent,
    TokenStream,
)
from headrace.service.convert import (
    Start,
    delta_to_proto,
    finished_to_proto,
    sampling_to_proto,
    start_from_proto,
)
from headrace.service.serving import ServedModel, Serving
from headrace.service.status import RpcFailure, failure_from, unavailable
from headrace.service.telemetry import log, places_of
from headrace.v1 import generation_pb2

RPC_ENDED = "CANCELLED/RPC_ENDED"

# A client's label is no key: it need be unique within its RPC only. This number makes it one.
_numbers = count(1)


@dataclass(frozen=True, slots=True)
class Parsed:
    """A request whose fields are in order.

    Args:
        label: what its client calls it.
        deadline_s: monotonic moment past which it is ended, seconds.
    """

    label: str
    request_id: RequestId
    served: ServedModel
    start: Start
    arrival_s: float
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that the engine has queued."""

    stream: TokenStream
    accepted: generation_pb2.Accepted


@dataclass(slots=True)
class Narrator:
    """Numbers the events of one request and puts them in messages.

    Args:
        label: the client's.
    """

    label: str
    _sequence: count[int] = field(default_factory=count)

    def accepted(self, accepted: generation_pb2.Accepted) -> generation_pb2.GenerationEvent:
        """The request is queued."""
        return self._event(accepted=accepted)

    def delta(self, index: int, delta: generation_pb2.Delta) -> generation_pb2.GenerationEvent:
        """New output."""
        return self._event(index, delta=delta)

    def finished(self, index: int, finished: generation_pb2.Finished) -> generation_pb2.GenerationEvent:
        """A sequence's normal end."""
        return self._event(index, finished=finished)

    def error(self, status: status_pb2.Status) -> generation_pb2.GenerationEvent:
        """The request's failure."""
        return self._event(error=status)

    def _event(
        self,
        index: int = 0,
        *,
        accepted: generation_pb2.Accepted | None = None,
        delta: generation_pb2.Delta | None = None,
        finished: generation_pb2.Finished | None = None,
        error: status_pb2.Status | None = None,
    ) -> generation_pb2.GenerationEvent:
        return generation_pb2.GenerationEvent(
            request_id=self.label,
            index=index,
            sequence=next(self._sequence),
            accepted=accepted,
            delta=delta,
            finished=finished,
            error=error,
        )


def parse(
    serving: Serving, start: generation_pb2.StartGeneration, remaining_s: float | None, *, needs_label: bool
) -> Parsed:
    """Check a request's fields.

    Args:
        remaining_s: time that the RPC's deadline leaves, seconds; None for no deadline.
        needs_label: whether the client has to name it.

    Raises:
        RpcFailure: no model is served now, or not the one that it names.
        InvalidRequest: with everything that is wrong with it.
    """
    now_s = time.monotonic()
    served = serving.model()
    served.require(start.model)
    checked = start_from_proto(
        start, served.engine.info, served.limits, secrets.randbits(64), needs_label=needs_label
    )
    number = next(_numbers)
    label = checked.label or f"request-{number}"
    allowed_s = served.limits.max_request_s
    return Parsed(
        label=label,
        request_id=RequestId(f"{number}:{label}"),
        served=served,
        start=checked,
        arrival_s=now_s,
        deadline_s=now_s + (allowed_s if remaining_s is None else min(allowed_s, remaining_s)),
    )


async def encode(parsed: Parsed) -> tuple[int, ...]:
    """Token ids of its prompt, made off the event loop."""
    served = parsed.served
    return await served.texts.encode_prompt(served.engine.tokenizer, parsed.start.prompt)


def admit(parsed: Parsed, token_ids: tuple[int, ...]) -> Admitted:
    """Queue it.

    Raises:
        EngineError: see `AsyncEngine.submit`.
        RpcFailure: UNAVAILABLE, the engine has died before it came.
    """
    start, engine = parsed.start, parsed.served.engine
    limit_s = start.time_limit_s
    request = Request(
        request_id=parsed.request_id,
        prompt_token_ids=token_ids,
        sampling=start.sampling,
        stop=start.stop,
        output=start.output,
        # The engine counts from now on; the promise counts from arrival.
        time_limit_s=None if limit_s is None else max(1e-3, limit_s - (time.monotonic() - parsed.arrival_s)),
        deadline_s=parsed.deadline_s,
        isolation_key=start.cache_salt,
        uses_prefix_cache=start.uses_prefix_cache,
    )
    try:
        stream = engine.submit(request)
    except EngineDead as error:
        raise unavailable("ENGINE_DEAD", str(error), 1.0) from error
    accepted = generation_pb2.Accepted(
        prompt_tokens=len(token_ids),
        max_tokens=engine.max_tokens_for(request),
        sampling=sampling_to_proto(start.sampling),
        model=parsed.served.name,
    )
    return Admitted(stream, accepted)


async def encode_and_admit(parsed: Parsed) -> Admitted:
    """Encode and queue it.

    Raises:
        RpcFailure: what its sender is told; it has been logged.
    """
    try:
        return admit(parsed, await encode(parsed))
    except Exception as error:
        raise failed(parsed, error) from error


@contextmanager
def ended_with_its_rpc(parsed: Parsed) -> Iterator[None]:
    """However the block is left, the engine no longer works for this request."""
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        log_end(parsed, RPC_ENDED, 0, 0)
        raise
    finally:
        parsed.served.engine.abort(parsed.request_id)


def message_of(
    event: OutputEvent, parsed: Parsed, narrator: Narrator
) -> generation_pb2.GenerationEvent | None:
    """The message that tells `event`; None when nothing of it was asked for."""
    match event:
        case TokenEvent():
            delta = delta_to_proto(event, wants_token_ids=parsed.start.wants_token_ids)
            return narrator.delta(event.index, delta) if delta.text or delta.token_ids else None
        case FinishEvent():
            log_end(
                parsed, event.reason.name, event.usage.num_prompt_tokens, event.usage.num_completion_tokens
            )
            return narrator.finished(event.index, finished_to_proto(event))
        case FailureEvent():
            return narrator.error(failed(parsed, event.error).to_status())


def failed(parsed: Parsed, error: Exception) -> RpcFailure:
    """What the sender is told of a failure, which is logged."""
    failure = failure_from(error)
    if failure.code is grpc.StatusCode.INTERNAL:
        log.error("request fault", request=parsed.request_id, **places_of(error))
    log_end(parsed, f"{failure.code.name}/{failure.reason}", 0, 0)
    return failure


def log_end(parsed: Parsed, outcome: str, prompt_tokens: int, completion_tokens: int) -> None:
    """One line for each request that came past its fields' check."""
    log.info(
        "request ended",
        request=parsed.request_id,
        outcome=outcome,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        duration_ms=round(1e3 * (time.monotonic() - parsed.arrival_s), 1),
    )
