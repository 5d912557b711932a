"""Scripts for the fake server: what happens to one request, step by step.

A script may wait for anything in between:

    async def script(start):
        yield Accept()
        yield Say("Hello")
        await gate.wait()
        yield Fail(status_of(StatusCode.INTERNAL, "broken"))

A script that ends by itself finishes the request with LENGTH.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from headrace.v1 import generation_pb2


@dataclass(frozen=True)
class Accept:
    """The request is queued."""

    num_prompt_tokens: int = 3


@dataclass(frozen=True)
class Say:
    """One token."""

    text: str
    token_id: int = 7


@dataclass(frozen=True)
class Finish:
    """The request ends normally."""

    reason: generation_pb2.FinishReason = generation_pb2.FINISH_REASON_STOP


@dataclass(frozen=True)
class Fail:
    """The request fails; with `breaks_stream`, so does the whole Session."""

    status: status_pb2.Status
    breaks_stream: bool = False


@dataclass(frozen=True)
class Skip:
    """An event gets lost: the next one's number is one too high."""


Step = Accept | Say | Finish | Fail | Skip
Script = Callable[[generation_pb2.StartGeneration], AsyncIterator[Step]]


def status_of(code: grpc.StatusCode, message: str, *details: Message) -> status_pb2.Status:
    """A google.rpc.Status with details."""
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        status.details.add().Pack(detail)
    return status


def retry_info(seconds: float) -> error_details_pb2.RetryInfo:
    """When to try again."""
    delay = Duration()
    delay.FromNanoseconds(round(seconds * 1e9))
    return error_details_pb2.RetryInfo(retry_delay=delay)


def bad_request(**descriptions: str) -> error_details_pb2.BadRequest:
    """Field violations; a double underscore in a name stands for the dot."""
    return error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(field=name.replace("__", "."), description=text)
            for name, text in descriptions.items()
        ]
    )


def says(*texts: str) -> Script:
    """A script: accepted, then these texts, one token each."""

    async def script(start: generation_pb2.StartGeneration) -> AsyncIterator[Step]:
        yield Accept()
        for text in texts:
            yield Say(text)

    return script


def fails(code: grpc.StatusCode, message: str = "no", *details: Message) -> Script:
    """A script: refused before anything else."""

    async def script(start: generation_pb2.StartGeneration) -> AsyncIterator[Step]:
        yield Fail(status_of(code, message, *details))

    return script


async def echo(start: generation_pb2.StartGeneration) -> AsyncIterator[Step]:
    """The default script: the words of the prompt, over and over, `max_tokens` of them."""
    words = (start.chat.messages[-1].content if start.HasField("chat") else start.text).split() or ["none"]
    num_tokens = start.stop.max_tokens or len(words)
    yield Accept(len(words))
    for position in range(num_tokens):
        yield Say(f"{words[position % len(words)]} ", position)
        await asyncio.sleep(0)
    yield Finish(
        generation_pb2.FINISH_REASON_LENGTH
        if start.stop.HasField("max_tokens")
        else generation_pb2.FINISH_REASON_STOP
    )


class Gate:
    """Scripts that say "first " and then wait until the test lets them go on."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    def says(self, *texts: str) -> Script:
        """Goes on with these texts."""

        async def script(start: generation_pb2.StartGeneration) -> AsyncIterator[Step]:
            yield Accept()
            yield Say("first ")
            await self.opened.wait()
            for text in texts:
                yield Say(text)

        return script

    def breaks(self) -> Script:
        """Goes on by breaking the stream."""

        async def script(start: generation_pb2.StartGeneration) -> AsyncIterator[Step]:
            yield Accept()
            yield Say("first ")
            await self.opened.wait()
            yield Fail(status_of(grpc.StatusCode.UNAVAILABLE, "connection lost"), breaks_stream=True)

        return script


async def events_of(
    script: Script, start: generation_pb2.StartGeneration
) -> AsyncIterator[generation_pb2.GenerationEvent | Fail]:
    """The numbered events that a script's steps are on the wire."""
    sequence = num_prompt_tokens = num_tokens = 0

    def event(
        *,
        accepted: generation_pb2.Accepted | None = None,
        delta: generation_pb2.Delta | None = None,
        finished: generation_pb2.Finished | None = None,
    ) -> generation_pb2.GenerationEvent:
        return generation_pb2.GenerationEvent(
            request_id=start.request_id, sequence=sequence, accepted=accepted, delta=delta, finished=finished
        )

    def finish(reason: generation_pb2.FinishReason) -> generation_pb2.GenerationEvent:
        usage = generation_pb2.Usage(prompt_tokens=num_prompt_tokens, completion_tokens=num_tokens)
        timings = generation_pb2.Timings(time_to_first_token=Duration(nanos=5_000_000))
        return event(finished=generation_pb2.Finished(reason=reason, usage=usage, timings=timings))

    async for step in script(start):
        match step:
            case Accept():
                num_prompt_tokens = step.num_prompt_tokens
                yield event(
                    accepted=generation_pb2.Accepted(
                        prompt_tokens=num_prompt_tokens,
                        max_tokens=start.stop.max_tokens or 99,
                        sampling=generation_pb2.SamplingOptions(
                            temperature=start.sampling.temperature, top_p=1.0, seed=start.sampling.seed
                        ),
                        model="fake",
                    )
                )
            case Say():
                num_tokens += 1
                yield event(delta=generation_pb2.Delta(text=step.text, token_ids=[step.token_id]))
            case Finish():
                yield finish(step.reason)
                return
            case Fail():
                yield step
                return
            case Skip():
                pass
        sequence += 1
    yield finish(generation_pb2.FINISH_REASON_LENGTH)
