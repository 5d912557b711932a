"""GenerationService: each RPC is a translation, and its clean-up is unconditional."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from google.protobuf.message import Message

from headrace.engine import FailureEvent, FieldViolation
from headrace.service.admission import parse
from headrace.service.interceptors import Context
from headrace.service.limits import Limits
from headrace.service.serving import Serving
from headrace.service.session import SessionRun
from headrace.service.status import invalid, require_fits
from headrace.service.telling import Teller, encode_and_admit, ended_with_its_rpc, failed
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
        teller = Teller(parsed)
        with ended_with_its_rpc(parsed):
            admitted = await encode_and_admit(parsed)
            yield generation_pb2.GenerateResponse(event=teller.accepted(admitted))
            async for event in admitted.stream:
                if isinstance(event, FailureEvent):
                    raise failed(parsed, event.error)
                for message in teller.messages(event):
                    yield generation_pb2.GenerateResponse(event=message)

    async def GenerateOnce(
        self, request: generation_pb2.GenerateOnceRequest, context: Context
    ) -> generation_pb2.GenerateOnceResponse:
        """One request, answered whole."""
        _require_start(request)
        parsed = parse(self._serving, request.start, context.time_remaining(), needs_label=False)
        teller = Teller(parsed)
        completions = _Completions()
        with ended_with_its_rpc(parsed):
            admitted = await encode_and_admit(parsed)
            async for event in admitted.stream:
                if isinstance(event, FailureEvent):
                    raise failed(parsed, event.error)
                for message in teller.messages(event):
                    completions.add(message)
                    # Between many logprobs and more of them, others have their turn.
                    await asyncio.sleep(0)
        response = generation_pb2.GenerateOnceResponse(
            request_id=parsed.label, accepted=admitted.accepted, completions=completions.whole()
        )
        advice = "ask for fewer logprobs or tokens, or have the answer streamed by Generate"
        require_fits(response, self._limits.max_message_bytes, advice)
        return response

    async def Session(
        self, request_iterator: AsyncIterator[generation_pb2.SessionRequest], context: Context
    ) -> AsyncIterator[generation_pb2.SessionResponse]:
        """Many requests over one stream."""
        async with (
            SessionRun(self._serving, self._limits, request_iterator, context.time_remaining) as session,
            aclosing(session.messages()) as messages,
        ):
            async for events in messages:
                yield generation_pb2.SessionResponse(events=events)


class _Completions:
    """Puts the deltas of each sequence together again: whole is what streamed says."""

    def __init__(self) -> None:
        self._completions: dict[int, generation_pb2.Completion] = {}
        self._texts: dict[int, list[str]] = {}

    def add(self, event: generation_pb2.GenerationEvent) -> None:
        """Take a delta or an end."""
        index = event.index
        completion = self._completions.setdefault(index, generation_pb2.Completion(index=index))
        if event.HasField("finished"):
            completion.finished.CopyFrom(event.finished)
            return
        delta = event.delta
        self._texts.setdefault(index, []).append(delta.text)
        completion.token_ids.extend(delta.token_ids)
        completion.logprobs.extend(delta.logprobs)
        completion.prompt_logprobs.extend(delta.prompt_logprobs)

    def whole(self) -> list[generation_pb2.Completion]:
        """All of them, by index."""
        for index, texts in self._texts.items():
            self._completions[index].text = "".join(texts)
        return [self._completions[index] for index in sorted(self._completions)]


def _require_start(request: Message) -> None:
    if not request.HasField("start"):
        raise invalid(FieldViolation("start", "is required"))
