"""Text work (encode, decode, render) off the event loop: a few threads, a bounded line before them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from headrace.engine import Chat, Overloaded, Tokenizer
from headrace.service.convert import Prompt
from headrace.service.limits import Limits

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
        self._num_pending += 1
        self._pending_size += size
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            self._num_pending -= 1
            self._pending_size -= size

    async def encode_prompt(self, tokenizer: Tokenizer, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt of any kind.

        Raises:
            Overloaded, NoChatTemplate, InvalidRequest: see `run` and `Tokenizer`.
        """
        match prompt:
            case str():
                return await self.run(len(prompt), lambda: tuple(tokenizer.encode(prompt)))
            case Chat():
                return (await self.render(tokenizer, prompt))[1]
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

    async def render(self, tokenizer: Tokenizer, chat: Chat) -> tuple[str, tuple[int, ...]]:
        """The text of a conversation and its token ids."""

        def work() -> tuple[str, tuple[int, ...]]:
            text = tokenizer.render_chat(chat)
            return text, tuple(tokenizer.encode_chat(text))

        return await self.run(sum(len(message.content) for message in chat.messages), work)

    def close(self) -> None:
        """Take no more; what has not begun is dropped."""
        self._executor.shutdown(wait=False, cancel_futures=True)
