"""Servers that a load test can be run against without one: scripted answers, no network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from headrace.clients.bench_backend import Ask, Connection, End, Server, Tokens

Answering = Callable[[Ask], AsyncGenerator[Tokens | End]]


async def answer(ask: Ask) -> AsyncGenerator[Tokens | End]:
    """As many tokens as asked for, each one more than the last, one at a time."""
    last = 0 if isinstance(ask.prompt, str) else ask.prompt[-1]
    for number in range(1, ask.output_len + 1):
        await asyncio.sleep(0)
        yield Tokens(1, f" {number}" if isinstance(ask.prompt, str) else (last + number,))
    yield End(num_prompt_tokens=len(ask.prompt), num_tokens=ask.output_len, queued_s=0.25)


@dataclass
class ScriptedBackend:
    """Answers as `answering` does, and remembers what was asked.

    Args:
        tells_output: see `Backend`.
        most_open: most requests that were open at once.
    """

    answering: Answering = answer
    tells_output: bool = True
    asked: list[Ask] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def until_open(self, num: int) -> None:
        """Wait until so many requests are open at once."""
        while self.num_open < num:
            self._changed.clear()
            await self._changed.wait()

    async def describe(self) -> Server:
        """A server of a small vocabulary."""
        return Server("script", "nowhere", {"model": {"name": "scripted"}}, vocabulary_size=100)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        """Nothing has to be opened."""
        yield self

    async def ask(self, ask: Ask) -> AsyncGenerator[Tokens | End]:
        """Answer one request."""
        self.asked.append(ask)
        self.num_open += 1
        self._changed.set()
        self.most_open = max(self.most_open, self.num_open)
        try:
            async for part in self.answering(ask):
                yield part
        finally:
            self.num_open -= 1
