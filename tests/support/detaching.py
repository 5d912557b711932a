"""A service, a request that may be resumed, and a stream that breaks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.rpc import code_pb2

from headrace.engine import LoadedModel
from headrace.v1.generation_pb2 import FINISH_REASON_LENGTH, GenerationEvent
from tests.support.fake_runner import expected_output, make_fake_model
from tests.support.service import (
    PROMPT,
    RawSession,
    RunningService,
    ids_of,
    make_start,
    reason_of,
    until,
)

LONG = 600
BOUNDED: dict[str, Any] = {"max_unread_tokens": 32, "paused_hold_s": 1000.0}


def long_model(**options: object) -> LoadedModel:
    return make_fake_model(max_model_len=4096, num_blocks=2048, **options)  # type: ignore[arg-type]


async def begun(
    service: RunningService, label: str = "a", num_events: int = 2, **fields: object
) -> RawSession:
    """A stream on which a request that may be resumed has been told so many events."""
    session = RawSession(service.generation)
    await session.start(make_start(label, **{"max_tokens": LONG, "detach": True, **fields}))  # type: ignore[arg-type]
    for _ in range(num_events):
        await session.next()
    return session


async def broken(service: RunningService, session: RawSession) -> None:
    """Break a stream, and wait until the server has noticed."""
    session.call.cancel()
    await until(lambda: service.serving.resumables.num_detached > 0)


def check_whole(events: Sequence[GenerationEvent], max_tokens: int = LONG) -> None:
    """All events of a request, each once, and the tokens of an unbroken run."""
    assert [event.sequence for event in events] == list(range(len(events)))
    assert ids_of(events) == expected_output(PROMPT, max_tokens)
    assert events[-1].finished.reason == FINISH_REASON_LENGTH
    assert events[-1].finished.usage.completion_tokens == max_tokens


async def refusal_of(session: RawSession, label: str) -> tuple[int, str]:
    """The next event, which refuses something about a label."""
    event = await session.next()
    assert (event.request_id, event.sequence) == (label, 0)
    return event.error.code, reason_of(event.error)


GONE = (code_pb2.NOT_FOUND, "NOT_RESUMABLE")
