from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from headrace.engine import Chat, ChatMessage, InvalidRequest, NoChatTemplate, Overloaded, Tool, ToolCall
from headrace.service.limits import Limits
from headrace.service.text import TextWorkers
from tests.support.fake_runner import BOS, FakeTokenizer
from tests.support.service import until


@pytest.fixture
def workers() -> Iterator[TextWorkers]:
    made = TextWorkers(1, Limits(max_pending_texts=2, max_pending_text_bytes=100))
    yield made
    made.close()


async def test_work_is_done_in_another_thread(workers: TextWorkers) -> None:
    assert await workers.run(1, threading.get_ident) != threading.get_ident()


async def test_prompts_of_every_kind_become_ids(workers: TextWorkers) -> None:
    tokenizer = FakeTokenizer()
    chat = Chat((ChatMessage("user", "hi"),))
    assert await workers.encode_prompt(tokenizer, "hi", 100) == (BOS, *b"hi")
    assert await workers.encode_prompt(tokenizer, (1, 2), 100) == (1, 2)
    assert await workers.encode_prompt(tokenizer, chat, 100) == tuple(b"user: hi\nassistant: ")


async def test_a_tokenizers_complaint_reaches_the_caller(workers: TextWorkers) -> None:
    with pytest.raises(NoChatTemplate):
        await workers.render(FakeTokenizer(has_chat_template=False), Chat((ChatMessage("user", "hi"),)), 100)


@pytest.mark.parametrize(("sizes", "last"), [((1, 1), 1), ((60,), 60)])
async def test_beyond_the_bound_is_overload_and_room_comes_back(
    workers: TextWorkers, sizes: tuple[int, ...], last: int
) -> None:
    gate = threading.Event()
    held = [asyncio.create_task(workers.run(size, lambda: gate.wait(15))) for size in sizes]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await workers.run(last, lambda: None)
    gate.set()
    assert await asyncio.gather(*held) == [True] * len(sizes)
    assert await workers.run(last, lambda: "room") == "room"


async def test_work_that_is_given_up_frees_its_room(workers: TextWorkers) -> None:
    gate = threading.Event()
    held = [asyncio.create_task(workers.run(1, lambda: gate.wait(15))) for _ in range(2)]
    await asyncio.sleep(0)
    held[1].cancel()
    await asyncio.wait(held[1:])
    waiting = asyncio.create_task(workers.run(1, lambda: "room"))
    gate.set()
    assert await waiting == "room"
    assert await held[0]


class Desk:
    """Pieces of work that last until they are told to end, and how much several of them had together."""

    def __init__(self) -> None:
        self.most_shared = 0
        self.begun: list[int] = []
        self._sizes: list[int] = []
        self._lock = threading.Lock()
        self._ended = threading.Semaphore(0)

    def work(self, size: int) -> Callable[[], int]:
        def done() -> int:
            with self._lock:
                self._sizes.append(size)
                self.begun.append(size)
                if len(self._sizes) > 1:
                    self.most_shared = max(self.most_shared, sum(self._sizes))
            assert self._ended.acquire(timeout=60)
            with self._lock:
                self._sizes.remove(size)
            return size

        return done

    def end(self, number: int = 1) -> None:
        self._ended.release(number)


async def test_threads_work_on_no_more_at_once_than_one_longest_text_and_in_turn() -> None:
    workers, desk = TextWorkers(4, Limits(max_text_bytes=100)), Desk()
    sizes = (40, 60, 100, 1, 2, 400, 3)
    try:
        waiting = [asyncio.create_task(workers.run(size, desk.work(size))) for size in sizes]
        await until(lambda: len(desk.begun) >= 2)
        # Whoever gives up gives up his answer: what a thread has begun takes its memory to the end.
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        assert desk.begun == [40, 60]
        desk.end(len(sizes))
        assert await asyncio.gather(*waiting[1:]) == list(sizes[1:])
    finally:
        workers.close()
    assert desk.most_shared <= 100, "a text that is longer has the desk for itself"
    assert [size for size in desk.begun if size >= 100] == [100, 400]


@pytest.mark.parametrize(
    "chat",
    [
        Chat((ChatMessage("user", "x" * 100),)),
        Chat((ChatMessage("user", ""),), tools=(Tool("t", "x" * 100, {}),)),
        Chat((ChatMessage("user", ""),), tools=(Tool("t", "", {"a": ["x" * 50, {"b": "y" * 50}]}),)),
        Chat((ChatMessage("user", ""),), template_variables={"a": {"b" * 100: None}}),
        Chat((ChatMessage("assistant", "", (ToolCall("1", "t", {"a": [0.0] * 100}),)),)),
    ],
    ids=["message", "tool", "parameters", "template variables", "tool call"],
)
async def test_all_of_a_conversation_counts_for_the_bound_of_what_waits(
    workers: TextWorkers, chat: Chat
) -> None:
    with pytest.raises(Overloaded):
        await workers.render(FakeTokenizer(), chat, 1_000_000)


async def test_a_conversation_that_becomes_too_long_a_text_is_refused() -> None:
    chat = Chat((ChatMessage("user", "hi"),))
    size = len("user: hi\nassistant: ")
    for most_given, is_taken in ((size // 4, True), (size // 4 - 1, False)):
        limits = Limits(max_text_bytes=most_given)
        workers = TextWorkers(1, limits)
        try:
            if is_taken:
                assert (await workers.render(FakeTokenizer(), chat, 1_000_000))[1]
                continue
            with pytest.raises(
                InvalidRequest, match=f"makes {size} bytes of it, at most {limits.max_rendered_bytes}"
            ):
                await workers.render(FakeTokenizer(), chat, 1_000_000)
        finally:
            workers.close()
