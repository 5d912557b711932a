"""Output slots: where the engine leaves what it made, and readers fetch it at their own pace."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

from headrace.engine.outputs import FailureEvent, FinishEvent, OutputEvent, StepStats, TokenEvent
from headrace.engine.sequence import RequestId

_MAX_STEPS_KEPT = 256
_EVENT_BYTES = 256
_TOKEN_BYTES = 40
_LOGPROB_BYTES = 160
"""What events take in memory, rounded up."""


class UnreadPool:
    """What waits in several output slots together.

    Args:
        max_bytes: more than that is too much.
        on_excess: called each time that it becomes too much; from inside the engine's round: be quick,
            don't raise.
    """

    def __init__(self, max_bytes: int, on_excess: Callable[[], None]) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._on_excess = on_excess

    def add(self, num_bytes: int) -> None:
        """So much more waits, or less."""
        was_excessive = self.num_bytes > self._max_bytes
        self.num_bytes += num_bytes
        if self.num_bytes > self._max_bytes and not was_excessive:
            self._on_excess()

    def close(self) -> None:
        """Whoever was to be called has gone, and is let go."""
        self._on_excess = lambda: None


class TokenStream:
    """The output slot of one request. The engine never waits for its reader: what is not fetched is joined.

    Read it with ``async for``, or with `set_listener` and `take` when one task serves many.

    Args:
        request_id: the request's.
        num_sequences: how many ends make it finished.
        max_unread_tokens: beyond so much that waits to be taken its request is to be paused; tokens, and
            logprobs where there are any. None for no bound.
        on_room: called once it has been paused and half of that, or less, waits.
    """

    def __init__(
        self,
        request_id: RequestId,
        num_sequences: int = 1,
        *,
        max_unread_tokens: int | None = None,
        on_room: Callable[[RequestId], None] | None = None,
    ) -> None:
        self.request_id = request_id
        self.has_failed = False
        self.num_unread_tokens = 0
        self.num_unread_bytes = 0
        self._max_unread_tokens = max_unread_tokens
        self._on_room = on_room
        self._is_paused = False
        self._pool: UnreadPool | None = None
        self._num_open = num_sequences
        self._slot: list[OutputEvent] = []
        self._awaited: asyncio.Future[None] | None = None
        self._listener: Callable[[TokenStream], None] | None = None
        self._is_joining = True

    @property
    def is_finished(self) -> bool:
        """Whether the last event has been put; it may still wait to be taken."""
        return self._num_open == 0

    def put(self, event: OutputEvent) -> None:
        """Add an event. For the engine alone."""
        was_empty = not self._slot
        self._slot.append(event)
        num_tokens, num_bytes = _size(event)
        self._count(num_tokens, num_bytes)
        if isinstance(event, FinishEvent):
            self._num_open -= 1
        elif isinstance(event, FailureEvent):
            self._num_open = 0
            self.has_failed = True
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)
        # Of a failure its reader wants to know even if he has no room for what stands before it.
        if (was_empty or self.has_failed) and self._listener is not None:
            self._listener(self)

    @property
    def is_overfull(self) -> bool:
        """Whether its request is to be paused, and isn't yet."""
        most = self._max_unread_tokens
        return most is not None and self.num_unread_tokens > most and not self._is_paused

    def pause(self) -> None:
        """Its request is paused, until enough has been taken. For the engine alone."""
        self._is_paused = True

    def count_in(self, pool: UnreadPool | None) -> None:
        """Let what waits here count among that of others, too; no more with None."""
        if self._pool is not None:
            self._pool.add(-self.num_unread_bytes)
        self._pool = pool
        if pool is not None:
            pool.add(self.num_unread_bytes)

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be taken."""
        return not self._slot

    def keep_apart(self) -> None:
        """Join nothing from now on, for a reader that takes a number of tokens at a time."""
        self._is_joining = False

    def take(self, most_tokens: int | None = None) -> list[OutputEvent]:
        """Fetch, without waiting, what there is since the last call; token events in a row are joined.

        Args:
            most_tokens: stop once so many tokens are fetched; those of one step come together, so there may
                be some more. Ends are no tokens. None fetches everything.
        """
        if most_tokens is None:
            events, self._slot = self._slot, []
            self._count(-self.num_unread_tokens, -self.num_unread_bytes)
            if self._is_joining and len(events) > 1:
                events = _joined(events)
        else:
            num_tokens = num_events = 0
            for event in self._slot:
                if isinstance(event, TokenEvent):
                    if num_tokens >= most_tokens:
                        break
                    num_tokens += len(event.token_ids)
                num_events += 1
            events, self._slot = self._slot[:num_events], self._slot[num_events:]
            for event in events:
                taken_tokens, taken_bytes = _size(event)
                self._count(-taken_tokens, -taken_bytes)
        self._tell_room()
        return events

    def _count(self, num_tokens: int, num_bytes: int) -> None:
        self.num_unread_tokens += num_tokens
        self.num_unread_bytes += num_bytes
        if self._pool is not None:
            self._pool.add(num_bytes)

    def _tell_room(self) -> None:
        most = self._max_unread_tokens
        if self._is_paused and most is not None and 2 * self.num_unread_tokens <= most:
            self._is_paused = False
            if self._on_room is not None and not self.is_finished:
                self._on_room(self.request_id)

    def set_listener(self, on_ready: Callable[[TokenStream], None] | None) -> None:
        """Call `on_ready` each time the empty slot gets something, when the request fails, and now if there
        is something already. None calls nobody any more.

        It is called on the event loop's thread from inside the engine's round: be quick, don't raise.
        """
        self._listener = on_ready
        if self._slot and on_ready is not None:
            on_ready(self)

    async def __aiter__(self) -> AsyncIterator[OutputEvent]:
        """Yield events until the last one, to one reader at a time.

        Raises:
            RuntimeError: another reader waits already.
        """
        while not self.is_finished or self._slot:
            if not self._slot:
                if self._awaited is not None and not self._awaited.done():
                    raise RuntimeError("a stream has one reader at a time, and another one waits")
                # For one reader a future does what an event does for many, in half the time.
                self._awaited = asyncio.get_running_loop().create_future()
                await self._awaited
            for event in self.take():
                yield event


def _joined(events: list[OutputEvent]) -> list[OutputEvent]:
    """The events, with each run of token events of one sequence as one."""
    # Not event by event as they come: what waits long would be copied each time.
    joined: list[OutputEvent] = []
    run: list[TokenEvent] = []
    for event in events:
        if run and not (isinstance(event, TokenEvent) and event.index == run[0].index):
            joined.append(TokenEvent.joined(run))
            run = []
        if isinstance(event, TokenEvent):
            run.append(event)
        else:
            joined.append(event)
    return [*joined, TokenEvent.joined(run)] if run else joined


def _size(event: OutputEvent) -> tuple[int, int]:
    """What an event counts that waits to be taken: tokens and logprobs; and about so many bytes."""
    if not isinstance(event, TokenEvent):
        return 0, _EVENT_BYTES
    num_tokens, num_logprobs = len(event.token_ids), 0
    for entries in (event.logprobs, event.prompt_logprobs):
        if entries:
            num_logprobs += sum(1 + len(entry.top) for entry in entries)
    num_bytes = _EVENT_BYTES + _TOKEN_BYTES * num_tokens + len(event.text) + _LOGPROB_BYTES * num_logprobs
    return num_tokens + num_logprobs, num_bytes


class StepWatch:
    """Follows the steps of an engine: ``async for missed, stats in watch``, inside ``async with watch``.

    Keeps the newest 256 steps for a reader that lags; `missed` counts those dropped just before `stats`.
    """

    def __init__(self, on_close: Callable[[StepWatch], None]) -> None:
        self._on_close = on_close
        self._steps: deque[StepStats] = deque()
        self._num_missed = 0
        self._ready = asyncio.Event()
        self._is_closed = False

    def put(self, stats: StepStats) -> None:
        """Add a step. For the engine alone."""
        # Only the oldest are dropped, so all that are missed lie just before the first that is kept.
        if len(self._steps) == _MAX_STEPS_KEPT:
            self._steps.popleft()
            self._num_missed += 1
        self._steps.append(stats)
        self._ready.set()

    def close(self) -> None:
        """End the iteration once what is kept has been read."""
        self._is_closed = True
        self._ready.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._on_close(self)

    async def __aiter__(self) -> AsyncIterator[tuple[int, StepStats]]:
        """Yield (steps missed just before, step)."""
        while self._steps or not self._is_closed:
            if not self._steps:
                self._ready.clear()
                await self._ready.wait()
                continue
            missed, self._num_missed = self._num_missed, 0
            yield missed, self._steps.popleft()
