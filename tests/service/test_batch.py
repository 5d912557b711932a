"""What a Session has to tell at one moment comes in few messages, none of them too large."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from headrace.service.batch import MAX_EVENTS_TOLD_AT_ONCE
from headrace.service.limits import Limits
from headrace.service.serving import Serving
from headrace.service.session import SessionRun
from headrace.v1.generation_pb2 import CancelGeneration, Delta, GenerationEvent, SessionRequest


async def batches_of(
    messages: Sequence[SessionRequest], *told: GenerationEvent
) -> list[list[GenerationEvent]]:
    """What a Session writes together: its answers to `messages`, and what it is made to tell before them."""

    async def incoming() -> AsyncIterator[SessionRequest]:
        for message in messages:
            yield message

    async with SessionRun(Serving(), Limits(), incoming(), lambda: None) as run:
        for event in told:
            run.tell(event)
        return [batch async for batch in run.batches()]


async def test_what_is_to_be_told_at_one_moment_comes_in_few_messages_and_in_order() -> None:
    cancels = [SessionRequest(cancel=CancelGeneration(request_id=f"r{i}")) for i in range(100)]
    batches = await batches_of(cancels)
    assert [len(batch) for batch in batches] == [MAX_EVENTS_TOLD_AT_ONCE, 100 - MAX_EVENTS_TOLD_AT_ONCE]
    assert [event.request_id for batch in batches for event in batch] == [f"r{i}" for i in range(100)]


async def test_a_message_that_is_large_takes_no_further_event() -> None:
    large = [GenerationEvent(request_id=f"r{i}", delta=Delta(text="x" * 40_000)) for i in range(5)]
    batches = await batches_of((), *large)
    assert [[event.request_id for event in batch] for batch in batches] == [
        ["r0", "r1"],
        ["r2", "r3"],
        ["r4"],
    ]
