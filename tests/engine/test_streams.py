import asyncio

from headrace.engine.outputs import (
    FinishEvent,
    FinishReason,
    Timings,
    TokenEvent,
    TokenLogprob,
    TokenLogprobs,
    Usage,
)
from headrace.engine.sequence import RequestId
from headrace.engine.streams import TokenStream

END = FinishEvent(0, FinishReason.STOP, None, Usage(1, 1), Timings(None, None, None, None), 0)


def make_stream() -> TokenStream:
    return TokenStream(RequestId("r"))


async def test_neighbouring_token_events_of_one_index_are_joined():
    stream = make_stream()
    for event in (TokenEvent(0, (1,), "a"), TokenEvent(0, (2, 3), "b"), TokenEvent(1, (4,), "c"), END):
        stream.put(event)
    assert stream.take() == [TokenEvent(0, (1, 2, 3), "ab"), TokenEvent(1, (4,), "c"), END]
    assert stream.take() == []


async def test_joining_keeps_everything_in_order_however_much_waits():
    stream = make_stream()
    top = tuple(TokenLogprobs(TokenLogprob(i, -1.0, 1), ()) for i in range(3))
    stream.put(TokenEvent(0, (0,), "a", top[:1], top[1:]))
    for i in range(1, 3):
        stream.put(TokenEvent(0, (i,), "b", top[i : i + 1]))
    assert stream.take() == [TokenEvent(0, (0, 1, 2), "abb", top, top[1:])]


async def test_what_was_taken_is_never_joined_with_what_follows():
    stream = make_stream()
    stream.put(TokenEvent(0, (1,), "a"))
    taken = stream.take()
    stream.put(TokenEvent(0, (2,), "b"))
    assert taken == [TokenEvent(0, (1,), "a")]
    assert stream.take() == [TokenEvent(0, (2,), "b")]


async def test_iteration_ends_behind_the_last_event():
    stream = make_stream()

    async def feed():
        for token_id in range(3):
            stream.put(TokenEvent(0, (token_id,), "x"))
            await asyncio.sleep(0)
        stream.put(END)

    feeding = asyncio.create_task(feed())
    events = [event async for event in stream]
    await feeding
    assert events[-1] == END
    assert [i for event in events[:-1] for i in event.token_ids] == [0, 1, 2]
    assert stream.is_finished


async def test_iterating_a_stream_that_has_ended_and_was_read_ends_at_once():
    stream = make_stream()
    stream.put(END)
    assert [event async for event in stream] == [END]
    assert [event async for event in stream] == []


async def test_a_listener_is_called_once_per_filling_of_the_slot():
    stream, calls = make_stream(), []
    stream.put(TokenEvent(0, (1,), "a"))
    stream.set_listener(calls.append)
    assert calls == [stream], "what was there already is told at once"
    stream.put(TokenEvent(0, (2,), "b"))
    assert len(calls) == 1
    stream.take()
    stream.put(END)
    assert len(calls) == 2
