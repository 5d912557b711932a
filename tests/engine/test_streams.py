import asyncio

import pytest

from headrace.engine.errors import EngineError
from headrace.engine.outputs import (
    FailureEvent,
    FinishEvent,
    FinishReason,
    Timings,
    TokenEvent,
    TokenLogprob,
    TokenLogprobs,
    Usage,
)
from headrace.engine.sequence import RequestId
from headrace.engine.streams import TokenStream, UnreadPool

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


async def test_a_second_reader_is_refused_and_the_first_gets_everything():
    stream = make_stream()
    first = asyncio.ensure_future(anext(aiter(stream)))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="one reader at a time"):
        await anext(aiter(stream))
    stream.put(END)
    assert await first == END


async def test_who_gave_up_waiting_leaves_the_stream_to_another_reader():
    stream = make_stream()
    first = asyncio.ensure_future(anext(aiter(stream)))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait({first})
    stream.put(END)
    assert [event async for event in stream] == [END]


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


async def test_a_failure_is_told_at_once_whatever_waits_before_it():
    stream, calls = make_stream(), []
    stream.set_listener(calls.append)
    stream.put(TokenEvent(0, (1,), "a"))
    stream.put(FailureEvent(EngineError("it broke")))
    assert len(calls) == 2
    assert stream.has_failed


async def test_a_slot_that_is_too_full_asks_for_a_pause_once_and_tells_when_half_of_it_is_left():
    told: list[str] = []
    stream = TokenStream(RequestId("r"), max_unread_tokens=4, on_room=told.append)
    for token_id in range(4):
        stream.put(TokenEvent(0, (token_id,), "x"))
    asks = [stream.is_overfull]
    stream.put(TokenEvent(0, (4,), "x"))
    asks.append(stream.is_overfull)
    stream.pause()
    asks.append(stream.is_overfull)
    assert asks == [False, True, False]
    stream.take(2)
    assert (told, stream.num_unread_tokens) == ([], 3)
    stream.take(1)
    assert (told, stream.num_unread_tokens) == (["r"], 2)
    stream.take()
    assert (told, stream.num_unread_tokens, stream.num_unread_bytes) == (["r"], 0, 0)


async def test_logprobs_fill_a_slot_as_tokens_do():
    stream = TokenStream(RequestId("r"), max_unread_tokens=10)
    top = TokenLogprobs(TokenLogprob(1, -1.0, 1), (TokenLogprob(1, -1.0, 1),) * 4)
    stream.put(TokenEvent(0, (1,), "a", (top,), (top,)))
    assert stream.num_unread_tokens == 1 + 5 + 5
    assert stream.is_overfull


async def test_nothing_goes_on_for_a_request_that_is_over():
    told: list[str] = []
    stream = TokenStream(RequestId("r"), max_unread_tokens=1, on_room=told.append)
    stream.put(TokenEvent(0, (1, 2), "a"))
    stream.pause()
    stream.put(END)
    stream.take()
    assert told == []


async def test_slots_that_are_counted_together_are_too_much_together_and_are_told_so_once():
    told: list[int] = []
    pool = UnreadPool(1000, lambda: told.append(pool.num_bytes))
    one, other = make_stream(), make_stream()
    one.put(TokenEvent(0, (1,), "a"))
    for stream in (one, other):
        stream.count_in(pool)
    while not told:
        other.put(TokenEvent(0, (1,), "a"))
    other.put(TokenEvent(0, (1,), "a"))
    assert len(told) == 1
    assert pool.num_bytes == one.num_unread_bytes + other.num_unread_bytes > 1000
    one.take()
    other.count_in(None)
    assert pool.num_bytes == 0
    other.take()
    assert pool.num_bytes == 0
