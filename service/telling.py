"""From what the engine tells of a request to messages, and one line in the log when it is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count

import grpc
from google.rpc import status_pb2

from headrace.engine import FailureEvent, FinishEvent, OutputEvent, TokenEvent
from headrace.service.admission import Admitted, Parsed, admit, encode
from headrace.service.convert import delta_into_proto, finished_to_proto
from headrace.service.identity import Caller
from headrace.service.logprobs import pieces
from headrace.service.status import RpcFailure, failure_from
from headrace.service.telemetry import log, places_of
from headrace.service.tracing import RequestRecord
from headrace.v1 import generation_pb2

RPC_ENDED = "CANCELLED/RPC_ENDED"


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

    def delta(self, index: int) -> generation_pb2.GenerationEvent:
        """New output, to be filled in and then to be numbered."""
        # Field by field: to give them to the message as it is made takes twice as long.
        event = generation_pb2.GenerationEvent()
        event.request_id = self.label
        event.index = index
        return event

    def numbered(self, event: generation_pb2.GenerationEvent) -> generation_pb2.GenerationEvent:
        """The same event, as the next one."""
        event.sequence = next(self._sequence)
        return event

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
        finished: generation_pb2.Finished | None = None,
        error: status_pb2.Status | None = None,
    ) -> generation_pb2.GenerationEvent:
        return generation_pb2.GenerationEvent(
            request_id=self.label,
            index=index,
            sequence=next(self._sequence),
            accepted=accepted,
            finished=finished,
            error=error,
        )


class Teller:
    """Tells one request's events as messages, in order, and logs its end."""

    def __init__(self, parsed: Parsed) -> None:
        self._parsed = parsed
        self._narrator = Narrator(parsed.label)
        self._ends: list[FinishEvent] = []
        self._begun: set[int] = set()

    def accepted(self, admitted: Admitted) -> generation_pb2.GenerationEvent:
        """The request is queued."""
        return self._narrator.accepted(admitted.accepted)

    def messages(self, event: OutputEvent) -> Iterator[generation_pb2.GenerationEvent]:
        """What is to be said of `event`: nothing when nothing of it was asked for."""
        match event:
            case TokenEvent():
                self._count(event)
                start, tokenizer = self._parsed.start, self._parsed.served.engine.tokenizer
                for piece in pieces(event):
                    output = self._narrator.delta(event.index)
                    delta_into_proto(piece, start, tokenizer, output.delta)
                    if output.delta.ByteSize():
                        yield self._narrator.numbered(output)
            case FinishEvent():
                yield self._finished(event)
            case FailureEvent():
                yield self.failed(failed(self._parsed, event.error))

    def failed(self, failure: RpcFailure) -> generation_pb2.GenerationEvent:
        """The request's failure, which has been logged."""
        return self._narrator.error(failure.to_status())

    def _count(self, event: TokenEvent) -> None:
        if not event.token_ids:
            # Prompt logprobs may come in pieces, before the first token and the echo that comes with it.
            return
        progress, is_first = self._parsed.progress, event.index not in self._begun
        self._begun.add(event.index)
        is_echoed = is_first and self._parsed.start.output.is_echoed
        num_tokens = len(event.token_ids) - is_echoed * progress.num_prompt_tokens
        progress.num_told_tokens += num_tokens
        self._parsed.ticket.charge_up_to(progress.num_prompt_tokens + progress.num_told_tokens)
        self._parsed.edge.metrics.told(self._parsed.caller, num_tokens)

    def _finished(self, event: FinishEvent) -> generation_pb2.GenerationEvent:
        stop = event.matched_stop
        if isinstance(stop, int) and stop in self._parsed.special_stops:
            event = replace(event, matched_stop=self._parsed.special_stops[stop])
        self._ends.append(event)
        if len(self._ends) == self._parsed.start.n:
            outcomes = sorted({end.reason.name for end in self._ends})
            made = sum(end.usage.num_completion_tokens for end in self._ends)
            self._parsed.progress.num_told_tokens = made
            log_end(self._parsed, "+".join(outcomes), self._ends)
        return self._narrator.finished(event.index, finished_to_proto(event))


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
        log_end(parsed, RPC_ENDED)
        raise
    finally:
        log_end(parsed, "INTERNAL/NO_END")
        parsed.served.engine.abort(parsed.request_id)


def told(error: Exception, **context: str) -> RpcFailure:
    """What the sender is told of `error`; a fault of ours is logged.

    Args:
        context: what the log line says beside the fault.
    """
    failure = failure_from(error)
    if failure.code is grpc.StatusCode.INTERNAL:
        log.error("request fault", **context, **places_of(error))
    return failure


def failed(parsed: Parsed, error: Exception) -> RpcFailure:
    """What the sender of a request whose fields were in order is told of its failure, which is logged."""
    failure = told(error, request=parsed.request_id)
    log_end(parsed, f"{failure.code.name}/{failure.reason}")
    return failure


def log_end(parsed: Parsed, outcome: str, ends: Sequence[FinishEvent] = ()) -> None:
    """The one end of each request that came past its fields' check: its line in the log, its place in its
    client's account, its metrics, its trace. Only the first end counts.

    Args:
        outcome: finish reasons, or a gRPC code and a reason.
        ends: of its sequences, if it ended normally.
    """
    progress = parsed.progress
    if progress.is_over:
        return
    progress.is_over = True
    duration_s = time.monotonic() - parsed.arrival_s
    parsed.ticket.charge_up_to(progress.num_prompt_tokens + progress.num_told_tokens)
    parsed.ticket.close()
    parsed.caller.tally.add(progress.num_prompt_tokens, progress.num_told_tokens)
    log.info(
        "request ended",
        request=parsed.request_id,
        **_client_field(parsed.caller),
        outcome=outcome,
        prompt_tokens=progress.num_prompt_tokens,
        completion_tokens=progress.num_told_tokens,
        duration_ms=round(1e3 * duration_s, 1),
    )
    if progress.is_admitted:
        _record(parsed, outcome, ends, duration_s)


def _client_field(caller: Caller) -> dict[str, str]:
    return {"client": caller.name} if caller.name else {}


def _record(parsed: Parsed, outcome: str, ends: Sequence[FinishEvent], duration_s: float) -> None:
    code = None if ends else outcome.partition("/")[0]
    for end in ends:
        parsed.edge.metrics.sequence_ended(end, uses_prefix_cache=parsed.start.uses_prefix_cache)
    parsed.edge.metrics.request_ended(parsed.request_id, duration_s, code)
    parsed.edge.tracer.record(
        RequestRecord(
            request_id=parsed.request_id,
            model=parsed.served.name,
            traceparent=parsed.caller.traceparent,
            client=parsed.caller.name,
            ended_ns=time.time_ns(),
            duration_s=duration_s,
            timings=next((end.timings for end in ends if end.index == 0), None),
            outcome=outcome,
            is_failure=code not in (None, "CANCELLED"),
            num_prompt_tokens=parsed.progress.num_prompt_tokens,
            num_completion_tokens=parsed.progress.num_told_tokens,
            num_preemptions=sum(end.num_preemptions for end in ends),
        )
    )
