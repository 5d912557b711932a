"""GenerationService: each RPC is a translation, and its clean-up is unconditional."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from google.protobuf.message import Message

from headrace.engine import FailureEvent, FieldViolation, FinishEvent, TokenEvent
from headrace.service.admission import (
    Narrator,
    encode_and_admit,
    ended_with_its_rpc,
    failed,
    log_end,
    message_of,
    parse,
)
from headrace.service.convert import finished_to_proto
from headrace.service.interceptors import Context
from headrace.service.limits import Limits
from headrace.service.serving import Serving
from headrace.service.session import SessionRun
from headrace.service.status import invalid
from headrace.v1 import generation_pb2, generation_pb2_grpc


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Text generation over the served model."""

    def __init__(self, serving: Serving, limits: Limits) -> None:
        self._serving = serving
        self._limits = limits

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """One request, streamed."""
        _require_start(request)
        parsed = parse(self._serving, request.start, context.time_remaining(), needs_label=False)
        narrator = Narrator(parsed.label)
        with ended_with_its_rpc(parsed):
            admitted = await encode_and_admit(parsed)
            yield generation_pb2.GenerateResponse(event=narrator.accepted(admitted.accepted))
            async for event in admitted.stream:
                if isinstance(event, FailureEvent):
                    raise failed(parsed, event.error)
                message = message_of(event, parsed, narrator)
                if message is not None:
                    yield generation_pb2.GenerateResponse(event=message)

    async def GenerateOnce(
        self, request: generation_pb2.GenerateOnceRequest, context: Context
    ) -> generation_pb2.GenerateOnceResponse:
        """One request, answered whole."""
        _require_start(request)
        parsed = parse(self._serving, request.start, context.time_remaining(), needs_label=False)
        completion = generation_pb2.Completion()
        texts: list[str] = []
        with ended_with_its_rpc(parsed):
            admitted = await encode_and_admit(parsed)
            async for event in admitted.stream:
                match event:
                    case TokenEvent():
                        texts.append(event.text)
                        completion.token_ids.extend(event.token_ids if parsed.start.wants_token_ids else ())
                    case FinishEvent(usage=usage):
                        log_end(
                            parsed, event.reason.name, usage.num_prompt_tokens, usage.num_completion_tokens
                        )
                        completion.finished.CopyFrom(finished_to_proto(event))
                    case FailureEvent():
                        raise failed(parsed, event.error)
        completion.text = "".join(texts)
        return generation_pb2.GenerateOnceResponse(
            request_id=parsed.label, accepted=admitted.accepted, completions=[completion]
        )

    async def Session(
        self, request_iterator: AsyncIterator[generation_pb2.SessionRequest], context: Context
    ) -> AsyncIterator[generation_pb2.SessionResponse]:
        """Many requests over one stream."""
        async with (
            SessionRun(self._serving, self._limits, request_iterator, context.time_remaining) as session,
            aclosing(session.events()) as events,
        ):
            async for event in events:
                yield generation_pb2.SessionResponse(event=event)


def _require_start(request: Message) -> None:
    if not request.HasField("start"):
        raise invalid(FieldViolation("start", "is required"))
