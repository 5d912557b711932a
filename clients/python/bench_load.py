"""Sends a workload and watches: in a closed loop of fixed concurrency, or in an open one at given times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from headrace.clients.bench_backend import Ask, Connection, End, RequestFailedError, Tokens
from headrace.clients.bench_stats import RequestRecord
from headrace.clients.bench_workload import Conversation, TextOrIds, Turn, Workload, joined

INTERRUPTED = "INTERRUPTED"
TIMEOUT = "TIMEOUT"
EARLIER_TURN_FAILED = "EARLIER_TURN_FAILED"


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a workload is sent. At least one of `num_conversations` and `duration_s` ends it.

    Args:
        arrivals: seconds at which conversations are due (open loop); None: a closed loop.
        concurrency: closed loop: so many conversations at a time, the next one when one is over. Open loop:
            at most so many requests at a time, and who has to wait for a place has the wait in his latency.
        duration_s: no conversation begins later than this; those that run are finished.
        timeout_s: a request that takes longer from when it was sent is given up, and failed.
    """

    arrivals: Iterator[float] | None = None
    concurrency: int | None = None
    num_conversations: int | None = None
    duration_s: float | None = None
    is_length_forced: bool = True
    timeout_s: float | None = None


@dataclass(slots=True)
class Counts:
    """How a run stands: conversations that are over; requests that are due, are held back until fewer are
    open, are over, have failed; tokens."""

    num_conversations_over: int = 0
    num_begun: int = 0
    num_held: int = 0
    num_over: int = 0
    num_failed: int = 0
    num_tokens: int = 0


class LoadRun:
    """One run.

    Args:
        clock: seconds, from anywhere.
    """

    def __init__(
        self,
        connection: Connection,
        workload: Workload,
        options: LoadOptions,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if options.arrivals is None and options.concurrency is None:
            raise ValueError("a closed loop needs its concurrency")
        if options.num_conversations is None and options.duration_s is None:
            raise ValueError("a run needs an end: a number of conversations, or a time")
        self.records: list[RequestRecord] = []
        self.counts = Counts()
        self._connection = connection
        self._workload = workload
        self._options = options
        self._clock = clock
        self._began_s = 0.0
        self._next_number = 0
        is_capped = options.arrivals is not None and options.concurrency is not None
        self._places = asyncio.Semaphore(options.concurrency or 1) if is_capped else None

    @property
    def now_s(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._began_s

    async def run(self) -> None:
        """Send everything and wait until all of it is over. Cancelled, it leaves open requests as
        INTERRUPTED."""
        self._began_s = self._clock()
        async with asyncio.TaskGroup() as tasks:
            if self._options.arrivals is None:
                for _ in range(self._options.concurrency or 1):
                    tasks.create_task(self._work())
            else:
                await self._send_when_due(self._options.arrivals, tasks)

    async def _work(self) -> None:
        due_s = 0.0
        while (conversation := self._take(due_s)) is not None:
            await self._converse(conversation, due_s)
            due_s = self.now_s

    async def _send_when_due(self, arrivals: Iterator[float], tasks: asyncio.TaskGroup) -> None:
        for due_s in arrivals:
            if (conversation := self._take(due_s)) is None:
                return
            await asyncio.sleep(max(0.0, due_s - self.now_s))
            tasks.create_task(self._converse(conversation, due_s))

    def _take(self, due_s: float) -> Conversation | None:
        """The next conversation, if it still belongs to the run."""
        limit, duration_s = self._options.num_conversations, self._options.duration_s
        if (limit is not None and self._next_number >= limit) or (
            duration_s is not None and due_s >= duration_s
        ):
            return None
        self._next_number += 1
        return self._workload.conversation(self._next_number - 1)

    async def _converse(self, conversation: Conversation, due_s: float) -> None:
        said: TextOrIds | None = None
        failed = False
        for turn in conversation.turns:
            prompt = turn.prompt if said is None else joined(said, turn.prompt)
            record = self._new_record(prompt, turn, due_s)
            if failed:
                record.error, record.message = EARLIER_TURN_FAILED, "never sent: the turn before it failed"
                record.end_s = due_s
                self._count_end(record)
                continue
            output = await self._request(prompt, turn, record)
            failed = record.error is not None
            said = prompt if output is None else joined(prompt, output)
            due_s = self.now_s
        self.counts.num_conversations_over += 1

    def _new_record(self, prompt: TextOrIds, turn: Turn, due_s: float) -> RequestRecord:
        record = RequestRecord(len(self.records), turn.output_len, due_s)
        if not isinstance(prompt, str):
            record.num_prompt_tokens = len(prompt)
        self.records.append(record)
        self.counts.num_begun += 1
        return record

    async def _request(self, prompt: TextOrIds, turn: Turn, record: RequestRecord) -> TextOrIds | None:
        """Send one request; what it made, where the server tells it as the prompt was."""
        output: TextOrIds | None = None
        ask = Ask(prompt, turn.output_len, self._options.is_length_forced)
        try:
            async with AsyncExitStack() as stack:
                if self._places is not None:
                    self.counts.num_held += 1
                    try:
                        await stack.enter_async_context(self._places)
                    finally:
                        self.counts.num_held -= 1
                await stack.enter_async_context(asyncio.timeout(self._options.timeout_s))
                record.sent_s = self.now_s
                parts = await stack.enter_async_context(aclosing(self._connection.ask(ask)))
                async for part in parts:
                    if isinstance(part, End):
                        self._note_end(record, part)
                    else:
                        record.arrivals.append((self.now_s, part.count))
                        self.counts.num_tokens += part.count
                        output = _with(output, part)
        except RequestFailedError as error:
            record.error, record.message = error.code, error.message
        except TimeoutError:
            record.error, record.message = TIMEOUT, f"took longer than {self._options.timeout_s:g} s"
        except asyncio.CancelledError:
            record.error, record.message = INTERRUPTED, "the run was ended"
            raise
        finally:
            record.end_s = self.now_s
            self._count_end(record)
        return output

    def _count_end(self, record: RequestRecord) -> None:
        self.counts.num_over += 1
        self.counts.num_failed += record.error is not None

    def _note_end(self, record: RequestRecord, end: End) -> None:
        if end.num_prompt_tokens is not None:
            record.num_prompt_tokens = end.num_prompt_tokens
        record.num_cached_tokens = end.num_cached_tokens
        record.queued_s = end.queued_s
        record.num_preemptions = end.num_preemptions
        if end.num_tokens is not None:
            reconcile(record, end.num_tokens)


def _with(output: TextOrIds | None, part: Tokens) -> TextOrIds | None:
    if part.output is None or output is None:
        return part.output
    if isinstance(output, str) and isinstance(part.output, str):
        return output + part.output
    return joined(output, part.output)


def reconcile(record: RequestRecord, num_tokens: int) -> None:
    """Make the arrivals add up to what the server says it made, where chunks had to be counted.

    What is missing came with the last chunk; what is too much were chunks at the end that held no token.
    """
    surplus = record.num_tokens - num_tokens
    if surplus < 0 and record.arrivals:
        time_s, count = record.arrivals[-1]
        record.arrivals[-1] = (time_s, count - surplus)
    while surplus > 0 and record.arrivals:
        time_s, count = record.arrivals.pop()
        if count > surplus:
            record.arrivals.append((time_s, count - surplus))
        surplus -= min(count, surplus)
