"""Text work (encode, decode, render) off the event loop: a few threads, a bounded line before them.

To encode a text takes a hundred times its size in memory. However many threads there are, and whatever is
given up meanwhile, they work on no more at once than one text of the longest kind.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from headrace.engine import Chat, InvalidRequest, LibraryPanic, Overloaded, Tokenizer
from headrace.service.convert import Prompt
from headrace.service.limits import Limits
from headrace.service.long_prompts import refuse_hopeless
from headrace.service.violations import num_bytes

T = TypeVar("T")

_RETRY_AFTER_S = 1.0


class TextWorkers:
    """Runs tokenizer calls in its own threads.

    Args:
        num_threads: most texts that are worked on at once.
        limits: how many, and how much, may wait.
    """

    def __init__(self, num_threads: int, limits: Limits) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="headrace-text")
        self._limits = limits
        self._desk = _Desk(limits.max_text_bytes)
        self._num_pending = 0
        self._pending_size = 0

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Do `work` in a thread.

        Args:
            size: bytes (or ids) that it has to go through, for the bound.

        Raises:
            Overloaded: too much waits already.
            Exception: what `work` raises.
        """
        if (
            self._num_pending >= self._limits.max_pending_texts
            or self._pending_size + size > self._limits.max_pending_text_bytes
        ):
            raise Overloaded(
                f"{self._num_pending} texts of {self._pending_size} bytes wait to be encoded", _RETRY_AFTER_S
            )

        def worked_on() -> T:
            with self._desk.room_for(size):
                return _contained(work)

        self._num_pending += 1
        self._pending_size += size
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, worked_on)
        finally:
            self._num_pending -= 1
            self._pending_size -= size

    async def encode_prompt(self, tokenizer: Tokenizer, prompt: Prompt, most_tokens: int) -> tuple[int, ...]:
        """Token ids of a prompt of any kind.

        Args:
            most_tokens: that a prompt may have; who has far more is refused early.

        Raises:
            Overloaded, NoChatTemplate, InvalidRequest: see `run`, `Tokenizer` and `refuse_hopeless`.
        """
        match prompt:
            case str():

                def work() -> tuple[int, ...]:
                    refuse_hopeless(prompt, most_tokens, tokenizer)
                    return tuple(tokenizer.encode(prompt))

                return await self.run(num_bytes(prompt), work)
            case Chat():
                # As the engine calls it, which counts the tokens of what passes.
                return (await self.render(tokenizer, prompt, most_tokens, "prompt"))[1]
            case _:
                return prompt

    async def encode_bad_words(
        self, tokenizer: Tokenizer, texts: tuple[str, ...]
    ) -> tuple[tuple[int, ...], ...]:
        """The runs of ids that spell the texts, each as it is written and with a space before it.

        Raises:
            Overloaded: see `run`.
        """
        if not texts:
            return ()

        def work() -> tuple[tuple[int, ...], ...]:
            spellings = (spelling for text in texts for spelling in (text, f" {text}"))
            runs = (tuple(tokenizer.encode(spelling, add_special_tokens=False)) for spelling in spellings)
            return tuple(dict.fromkeys(runs))

        return await self.run(sum(map(len, texts)), work)

    async def render(
        self, tokenizer: Tokenizer, chat: Chat, most_tokens: int, field: str = "chat"
    ) -> tuple[str, tuple[int, ...]]:
        """The text of a conversation and its token ids.

        Args:
            most_tokens: that a prompt may have; who has far more is refused early.
            field: what the request calls it when it is so long.

        Raises:
            Overloaded, NoChatTemplate, InvalidRequest: see `run`, `Tokenizer` and `refuse_hopeless`; or the
                text is too long.
        """
        most = self._limits.max_rendered_bytes

        def work() -> tuple[str, tuple[int, ...]]:
            text = tokenizer.render_chat(chat)
            size = num_bytes(text)
            if size > most:
                raise InvalidRequest.of(
                    "chat",
                    f"the model's chat template makes {size} bytes of it, at most {most} are taken: send "
                    "less, tools and template variables included",
                )
            refuse_hopeless(text, most_tokens, tokenizer, field)
            return text, tuple(tokenizer.encode_chat(text))

        return await self.run(_size_of_chat(chat), work)

    def close(self) -> None:
        """Take no more; what has not begun is dropped."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class _Desk:
    """What threads work on at once, in the order in which they come.

    Args:
        most: bytes; what is more has the desk for itself.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken = 0
        self._line: deque[object] = deque()
        self._has_changed = threading.Condition()

    @contextmanager
    def room_for(self, size: int) -> Iterator[None]:
        """Wait until there is room, and have it within the block."""
        place = object()

        def is_next() -> bool:
            return self._line[0] is place and (not self._taken or self._taken + size <= self._most)

        with self._has_changed:
            self._line.append(place)
            self._has_changed.wait_for(is_next)
            self._line.popleft()
            self._taken += size
            self._has_changed.notify_all()
        try:
            yield
        finally:
            with self._has_changed:
                self._taken -= size
                self._has_changed.notify_all()


def _contained(work: Callable[[], T]) -> T:
    """Do `work`; what is no `Exception` becomes one, else a tokenizer's panic would pass every handler of
    ours and leave its caller without an answer.

    Raises:
        LibraryPanic: in place of it.
    """
    try:
        return work()
    except Exception:
        raise
    except BaseException as fault:
        raise LibraryPanic(type(fault).__name__) from fault


def _size_of_chat(chat: Chat) -> int:
    """Characters of all that a template may write, and one for each JSON value."""
    messages = sum(
        len(message.content) + sum(_size_of_json(call.arguments) for call in message.tool_calls)
        for message in chat.messages
    )
    tools = sum(len(tool.description) + _size_of_json(tool.parameters) for tool in chat.tools)
    return messages + tools + _size_of_json(chat.template_variables)


def _size_of_json(value: object) -> int:
    match value:
        case str():
            return 1 + len(value)
        case Mapping():
            return 1 + sum(len(key) + _size_of_json(each) for key, each in value.items())
        case list() | tuple():
            return 1 + sum(map(_size_of_json, value))
        case _:
            return 1
