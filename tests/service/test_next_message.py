"""What a Session has to tell at one moment comes in few messages, none of them too large."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from headrace.service.limits import Limits
from headrace.service.next_message import MAX_EVENTS_TOLD_AT_ONCE
from headrace.service.serving import Serving
from headrace.service.session import SessionRun
from headrace.v1.generation_pb2 import CancelGeneration, Delta, GenerationEvent, SessionRequest


async def messages_of(
    requests: Sequence[SessionRequest], *told: GenerationEvent
) -> list[list[GenerationEvent]]:
    """What a Session writes together: its answers to `requests`, and what it is made to tell before them."""

    async def incoming() -> AsyncIterator[SessionRequest]:
        for request in requests:
            yield request

    async with SessionRun(Serving(), Limits(), incoming(), lambda: None) as run:
        for event in told:
            run.tell(event)
        return [events async for events in run.messages()]


async def test_what_is_to_be_told_at_one_moment_comes_in_few_messages_and_in_order() -> None:
    cancels = [SessionRequest(cancel=CancelGeneration(request_id=f"r{i}")) for i in range(100)]
    messages = await messages_of(cancels)
    assert [len(events) for events in messages] == [MAX_EVENTS_TOLD_AT_ONCE, 100 - MAX_EVENTS_TOLD_AT_ONCE]
    assert [event.request_id for events in messages for event in events] == [f"r{i}" for i in range(100)]


async def test_a_message_that_is_large_takes_no_further_event() -> None:
    large = [GenerationEvent(request_id=f"r{i}", delta=Delta(text="x" * 40_000)) for i in range(5)]
    messages = await messages_of((), *large)
    assert [[event.request_id for event in events] for events in messages] == [
        ["r0", "r1"],
        ["r2", "r3"],
        ["r4"],
    ]
