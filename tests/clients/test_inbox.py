"""A reader gets everything, in order, in as few pieces as it was slow."""

from __future__ import annotations

import asyncio

import pytest

from headrace.clients.errors import Unavailable
from headrace.clients.events import (
    Accepted,
    Delta,
    Event,
    Finished,
    FinishReason,
    Sampling,
    Timings,
    TokenLogprob,
    TokenLogprobs,
    Usage,
)
from headrace.clients.inbox import Inbox

ACCEPTED = Accepted(1, 9, Sampling(0.0, 0, 1.0, 0.0, 0), "m")
FINISHED = Finished(FinishReason.LENGTH, Usage(1, 3), Timings(None, None, None, None))


async def take_all(inbox: Inbox) -> list[Event]:
    taken = []
    while (event := await inbox.take()) is not None:
        taken.append(event)
    return taken


async def test_deltas_that_wait_are_joined_and_nothing_else_is() -> None:
    inbox = Inbox()
    for event in (
        ACCEPTED,
        Delta("a", (1,)),
        Delta("b", (2,)),
        Delta("x", (9,), 1),
        Delta("c", (3,)),
        FINISHED,
    ):
        inbox.put(event)
    inbox.end()
    assert await take_all(inbox) == [
        ACCEPTED,
        Delta("ab", (1, 2)),
        Delta("x", (9,), 1),
        Delta("c", (3,)),
        FINISHED,
    ]


def test_joined_deltas_keep_their_logprobs() -> None:
    one, two = (TokenLogprobs(TokenLogprob(token_id, -0.5, 1, "x")) for token_id in (1, 2))
    joined = Delta.joined([Delta("a", (1,), 3, (one,), (two,)), Delta("b", (2,), 3, (two,))])
    assert joined == Delta("ab", (1, 2), 3, (one, two), (two,))


async def test_a_reader_that_keeps_up_sees_every_delta() -> None:
    inbox = Inbox()
    reading = asyncio.create_task(take_all(inbox))
    for text in "abc":
        inbox.put(Delta(text, (ord(text),)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    inbox.end()
    assert await reading == [Delta(text, (ord(text),)) for text in "abc"]


async def test_an_error_comes_behind_what_arrived_before_it_and_the_first_end_counts() -> None:
    inbox = Inbox()
    inbox.put(Delta("a", (1,)))
    inbox.end(Unavailable("gone"))
    inbox.end()
    assert await inbox.take() == Delta("a", (1,))
    for _ in range(2):
        with pytest.raises(Unavailable, match="gone"):
            await inbox.take()


async def test_what_nobody_reads_is_forgotten() -> None:
    inbox = Inbox()
    inbox.put(Delta("a", (1,)))
    inbox.discard()
    inbox.put(Delta("b", (2,)))
    inbox.end()
    assert await take_all(inbox) == []
