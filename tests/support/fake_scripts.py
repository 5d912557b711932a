"""Scripts for the fake server: what happens to one request, step by step.

A script may wait for anything in between:

    async def script(start):
        yield Accept()
        yield Say("Hello")
        await gate.wait()
        yield Fail(status_of(StatusCode.INTERNAL, "broken"))

A script that ends by itself finishes with LENGTH whatever sequence is not finished yet.
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
    """One token of one sequence; its logprobs, where they are asked for, are a function of its id."""

    text: str
    token_id: int = 7
    index: int = 0


@dataclass(frozen=True)
class Finish:
    """One sequence ends normally; of its tokens, `num_accepted` were drafts."""

    reason: generation_pb2.FinishReason = generation_pb2.FINISH_REASON_STOP
    index: int = 0
    num_proposed: int = 0
    num_accepted: int = 0


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


async def says_and_hangs(start: generation_pb2.StartGeneration) -> AsyncIterator[Step]:
    """Say "one", and then nothing for ever."""
    yield Accept()
    yield Say("one")
    await asyncio.Event().wait()


class HangsAfter:
    """Says three tokens to each request; once more than `num_requests` have begun, none ends any more.

    Args:
        num_requests: how many may end.
    """

    def __init__(self, num_requests: int) -> None:
        self.hangs = asyncio.Event()
        self._num_left = num_requests

    async def __call__(self, start: generation_pb2.StartGeneration) -> AsyncIterator[Step]:
        self._num_left -= 1
        yield Accept()
        for _ in range(3):
            yield Say("x")
            await asyncio.sleep(0)
        if self._num_left < 0:
            self.hangs.set()
            await asyncio.Event().wait()


async def echo(start: generation_pb2.StartGeneration) -> AsyncIterator[Step]:
    """The default script: the words of the prompt, over and over, `max_tokens` of them.

    Each sequence begins one word later than the one before it.
    """
    words = (start.chat.messages[-1].content if start.HasField("chat") else start.text).split() or ["none"]
    num_tokens = start.stop.max_tokens or len(words)
    yield Accept(len(words))
    for position in range(num_tokens):
        for index in range(num_sequences(start)):
            yield Say(f"{words[(position + index) % len(words)]} ", position, index)
        await asyncio.sleep(0)
    is_cut = start.stop.HasField("max_tokens")
    reason = generation_pb2.FINISH_REASON_LENGTH if is_cut else generation_pb2.FINISH_REASON_STOP
    for index in range(num_sequences(start)):
        yield Finish(reason, index)


async def echo_once(start: generation_pb2.StartGeneration) -> AsyncIterator[Step]:
    """The words of the prompt once, however many are allowed: an answer that comes to its end."""
    allowed = generation_pb2.StartGeneration()
    allowed.CopyFrom(start)
    allowed.stop.ClearField("max_tokens")
    async for step in echo(allowed):
        yield step


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


def num_sequences(start: generation_pb2.StartGeneration) -> int:
    """How many sequences a request has."""
    return start.n if start.HasField("n") else 1


def logprobs_of(token_id: int, num_top: int) -> generation_pb2.TokenLogprobs:
    """A token's logprobs: the smaller its id, the likelier it is."""

    def entry(some_id: int) -> generation_pb2.TokenLogprob:
        return generation_pb2.TokenLogprob(
            token_id=some_id, logprob=-some_id / 4, rank=some_id + 1, text=f"#{some_id}"
        )

    return generation_pb2.TokenLogprobs(chosen=entry(token_id), top=[entry(i) for i in range(num_top)])


async def events_of(
    script: Script, start: generation_pb2.StartGeneration
) -> AsyncIterator[generation_pb2.GenerationEvent | Fail]:
    """The numbered events that a script's steps are on the wire."""
    sequence = num_prompt_tokens = 0
    open_ones = dict.fromkeys(range(num_sequences(start)), 0)

    def event(
        index: int = 0,
        *,
        accepted: generation_pb2.Accepted | None = None,
        delta: generation_pb2.Delta | None = None,
        finished: generation_pb2.Finished | None = None,
    ) -> generation_pb2.GenerationEvent:
        return generation_pb2.GenerationEvent(
            request_id=start.request_id,
            index=index,
            sequence=sequence,
            accepted=accepted,
            delta=delta,
            finished=finished,
        )

    def finish(end: Finish) -> generation_pb2.GenerationEvent:
        usage = generation_pb2.Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=open_ones.pop(end.index),
            draft_tokens_proposed=end.num_proposed,
            draft_tokens_accepted=end.num_accepted,
        )
        timings = generation_pb2.Timings(time_to_first_token=Duration(nanos=5_000_000))
        finished = generation_pb2.Finished(reason=end.reason, usage=usage, timings=timings)
        return event(end.index, finished=finished)

    async for step in script(start):
        match step:
            case Accept():
                num_prompt_tokens = step.num_prompt_tokens
                yield event(accepted=_accepted(start, num_prompt_tokens))
            case Say():
                is_first = step.index == 0 and open_ones[0] == 0
                open_ones[step.index] += 1
                yield event(step.index, delta=_delta(start, step, num_prompt_tokens if is_first else 0))
            case Finish():
                yield finish(step)
            case Fail():
                yield step
                return
            case Skip():
                pass
        sequence += 1
    for index in list(open_ones):
        yield finish(Finish(generation_pb2.FINISH_REASON_LENGTH, index))
        sequence += 1


def _accepted(start: generation_pb2.StartGeneration, num_prompt_tokens: int) -> generation_pb2.Accepted:
    accepted = generation_pb2.Accepted(
        prompt_tokens=num_prompt_tokens, max_tokens=start.stop.max_tokens or 99, model="fake"
    )
    accepted.sampling.CopyFrom(generation_pb2.SamplingOptions(temperature=0.0, top_p=1.0, seed=0))
    accepted.sampling.MergeFrom(start.sampling)
    return accepted


def _delta(start: generation_pb2.StartGeneration, step: Say, num_prompt_tokens: int) -> generation_pb2.Delta:
    """What is said of a token; the prompt's logprobs come with the first."""
    delta = generation_pb2.Delta(text=step.text, token_ids=[step.token_id])
    if start.output.HasField("logprobs"):
        delta.logprobs.append(logprobs_of(step.token_id, start.output.logprobs))
    if start.output.HasField("prompt_logprobs"):
        told = range(1, num_prompt_tokens)
        delta.prompt_logprobs.extend(logprobs_of(i, start.output.prompt_logprobs) for i in told)
    return delta
