"""One Session RPC: one task reads, one admits in the order of arrival, and the RPC's own task writes.

How a client tells events apart: an `error` event ends the request of its label, with these exceptions, told
by the `reason` of its google.rpc.ErrorInfo and always numbered `sequence` 0. DUPLICATE_REQUEST_ID, with
ALREADY_EXISTS, refuses a second `start` under the label of a live request, which goes on.
UNKNOWN_REQUEST_ID (NOT_FOUND) and INVALID_ACTION (INVALID_ARGUMENT) answer a `cancel` or a `grant_credit`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Self

from google.rpc import status_pb2

from headrace.engine import (
    FieldViolation,
    FinishEvent,
    FinishReason,
    OutputEvent,
    Timings,
    TokenStream,
    Usage,
)
from headrace.service.admission import Admitted, Encoded, Parsed, admit, encode, parse
from headrace.service.limits import MAX_REQUEST_ID_LEN, Limits
from headrace.service.serving import Serving, closed
from headrace.service.status import (
    RpcFailure,
    duplicate_request_id,
    invalid,
    invalid_action,
    slow_reader,
    unknown_request_id,
)
from headrace.service.telling import RPC_ENDED, Narrator, Teller, failed, log_end, told
from headrace.service.unsupported import unknown_fields
from headrace.v1.generation_pb2 import GenerationEvent, GrantCredit, SessionRequest, StartGeneration

_MAX_CREDIT = 2**32


class _Live:
    """A request of the stream that has not ended for its client.

    Args:
        credit: tokens that it may be told before more are granted; None for no limit.
    """

    def __init__(self, parsed: Parsed, credit: int | None) -> None:
        self.parsed = parsed
        self.credit = credit
        self.giving_up: asyncio.TimerHandle | None = None
        self.teller = Teller(parsed)
        self.stream: TokenStream | None = None
        self.is_ended = False
        self._unsent: list[GenerationEvent] = []
        self._unseen_ends: list[FinishEvent] = []

    def admitted(self, admitted: Admitted) -> None:
        """The engine has queued it."""
        self.stream = admitted.stream
        if self.credit is not None:
            self.stream.keep_apart()
        self._unsent.append(self.teller.accepted(admitted))

    def failed(self, failure: RpcFailure) -> None:
        """It ends before the engine has seen it, or whatever the engine still has to tell of it."""
        self.is_ended = True
        self.stream = None
        self._unsent.append(self.teller.failed(failure))

    def cancelled(self) -> None:
        """It is cancelled before the engine has seen it."""
        self.is_ended = True
        self._unseen_ends = [_cancelled_unseen(index) for index in range(self.parsed.start.n)]

    def take(self) -> tuple[list[GenerationEvent], list[OutputEvent]]:
        """Everything to be told about it now: messages, and after them events that are none yet."""
        messages, self._unsent = self._unsent, []
        events: list[OutputEvent] = [*self._unseen_ends]
        self._unseen_ends.clear()
        if self.stream is not None:
            events += self.stream.take(None if self.credit is None else max(0, self.credit))
            self.is_ended = self.stream.is_finished and self.stream.is_empty
        return messages, events

    def spend(self, num_tokens: int) -> None:
        """So many tokens have been told."""
        if self.credit is not None:
            self.credit -= num_tokens

    def grant(self, num_tokens: int) -> None:
        """So many more may be told."""
        if self.credit is not None:
            self.credit = min(_MAX_CREDIT, self.credit + num_tokens)

    @property
    def has_more(self) -> bool:
        """Whether something waits to be told."""
        return self.stream is not None and not self.stream.is_empty


def _cancelled_unseen(index: int) -> FinishEvent:
    return FinishEvent(
        index=index,
        reason=FinishReason.CANCELLED,
        matched_stop=None,
        usage=Usage(num_prompt_tokens=0, num_completion_tokens=0),
        timings=Timings(None, None, None, None),
        num_preemptions=0,
    )


class SessionRun:
    """The life of one Session, inside ``async with``; leaving it ends all of its requests.

    Args:
        serving: what answers.
        limits: bounds of the stream itself.
        messages: the client's.
        time_remaining: time that the RPC's deadline leaves, seconds; None for no deadline.
    """

    def __init__(
        self,
        serving: Serving,
        limits: Limits,
        messages: AsyncIterator[SessionRequest],
        time_remaining: Callable[[], float | None],
    ) -> None:
        self._serving = serving
        self._limits = limits
        self._messages = messages
        self._time_remaining = time_remaining
        self._live: dict[str, _Live] = {}
        self._ended_labels: OrderedDict[str, None] = OrderedDict()
        # What has something to tell, in order: whole requests, and answers that belong to none.
        self._ready: deque[_Live | GenerationEvent] = deque()
        self._wake = asyncio.Event()
        self._has_room = asyncio.Event()
        self._admissions: asyncio.Queue[tuple[_Live, asyncio.Task[Encoded], int]] = asyncio.Queue()
        self._backlog_bytes = 0
        self._encodings: set[asyncio.Task[Encoded]] = set()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._admit_in_order())]
        for task in self._tasks:
            task.add_done_callback(lambda _: self._wake.set())
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # The engine first: whatever becomes of the tasks, its slots and blocks are given back.
        for live in self._live.values():
            log_end(live.parsed, RPC_ENDED)
            live.parsed.served.engine.abort(live.parsed.request_id)
            if live.giving_up is not None:
                live.giving_up.cancel()
        tasks = [*self._tasks, *self._encodings]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def events(self) -> AsyncGenerator[GenerationEvent, None]:
        """Everything that the client is told, until its half-close and the end of the last request.

        Raises:
            RpcFailure: INVALID_ARGUMENT, the client broke the protocol; UNAVAILABLE, the server goes down.
        """
        reader, admitter = self._tasks
        with self._serving.on_close(self._wake.set):
            while True:
                while self._ready:
                    for event in self._taken(self._ready.popleft()):
                        yield event
                    self._has_room.set()
                if admitter.done():
                    admitter.result()
                if reader.done():
                    reader.result()
                if not self._live and reader.done():
                    return
                if not self._live and self._serving.is_closed:
                    raise closed()
                await self._wake.wait()
                self._wake.clear()

    def _taken(self, source: _Live | GenerationEvent) -> Iterator[GenerationEvent]:
        """One by one: who has much to tell lets others have their turn between two messages."""
        if isinstance(source, GenerationEvent):
            yield source
            return
        messages, events = source.take()
        label, progress = source.parsed.label, source.parsed.progress
        num_told = progress.num_told_tokens
        if source.is_ended and self._live.get(label) is source:
            # Forgotten before its end is sent: whoever has read the end may use the label again.
            del self._live[label]
            self._ended_labels[label] = None
            self._ended_labels.move_to_end(label)
            while len(self._ended_labels) > self._limits.max_remembered_labels:
                self._ended_labels.popitem(last=False)
        try:
            yield from messages
            for event in events:
                yield from source.teller.messages(event)
            source.spend(progress.num_told_tokens - num_told)
            self._await_credit(source)
        finally:
            if source.is_ended:
                # Its end has been told of already, unless the stream broke before it was.
                log_end(source.parsed, RPC_ENDED)

    async def _read(self) -> None:
        async for message in self._messages:
            # Who sends without reading is made to wait: what he has coming is kept for him, within bounds.
            while self._is_behind():
                self._has_room.clear()
                await self._has_room.wait()
            unknown = tuple(unknown_fields(message))
            match message.WhichOneof("action"):
                case "start":
                    self._start(message.start, unknown)
                case "cancel" if unknown:
                    self._answer(message.cancel.request_id, invalid_action(*unknown).to_status())
                case "grant_credit" if unknown:
                    self._answer(message.grant_credit.request_id, invalid_action(*unknown).to_status())
                case "cancel":
                    self._cancel(message.cancel.request_id)
                case "grant_credit":
                    self._grant(message.grant_credit)
                case _:
                    raise invalid(
                        *unknown,
                        FieldViolation(
                            "action", "one of start, cancel and grant_credit is required, got none"
                        ),
                    )

    def _start(self, start: StartGeneration, unknown: tuple[FieldViolation, ...]) -> None:
        label = start.request_id
        if label in self._live:
            self._answer(label, duplicate_request_id().to_status())
            return
        if unknown:
            self._answer(label, invalid(*unknown).to_status())
            return
        try:
            parsed = parse(self._serving, start, self._time_remaining(), needs_label=True)
        except Exception as error:
            self._answer(label, told(error).to_status())
            return
        # The prompt's text is let go as soon as it is encoded, however long the answer takes.
        credit = start.initial_credit if start.HasField("initial_credit") else None
        live = self._live[label] = _Live(replace(parsed, start=replace(parsed.start, prompt=())), credit)
        encoding = asyncio.create_task(encode(parsed))
        self._encodings.add(encoding)
        num_bytes = start.ByteSize()
        self._backlog_bytes += num_bytes
        self._admissions.put_nowait((live, encoding, num_bytes))

    def _is_behind(self) -> bool:
        limits = self._limits
        num_items = max(len(self._ready), self._admissions.qsize())
        return (
            num_items > limits.max_session_backlog or self._backlog_bytes > limits.max_session_backlog_bytes
        )

    async def _admit_in_order(self) -> None:
        while True:
            live, encoding, num_bytes = await self._admissions.get()
            await asyncio.wait({encoding})
            self._encodings.discard(encoding)
            self._backlog_bytes -= num_bytes
            self._has_room.set()
            if live.is_ended or encoding.cancelled():
                continue
            try:
                live.admitted(admit(live.parsed, encoding.result()))
            except Exception as error:
                live.failed(failed(live.parsed, error))
            self._tell(live)
            if live.stream is not None:
                live.stream.set_listener(self._teller_of(live))

    def _grant(self, granted: GrantCredit) -> None:
        label = granted.request_id
        live = self._live.get(label)
        if live is None:
            if label not in self._ended_labels:
                self._answer(label, unknown_request_id().to_status())
        elif live.credit is None:
            needed = "is for a request with a limit: set initial_credit in its start"
            self._answer(label, invalid_action(FieldViolation("grant_credit", needed)).to_status())
        elif granted.tokens == 0:
            problem = FieldViolation("grant_credit.tokens", "must be at least 1")
            self._answer(label, invalid_action(problem).to_status())
        else:
            live.grant(granted.tokens)
            self._tell(live)

    def _await_credit(self, live: _Live) -> None:
        """What has more to tell goes on while it may; who grants nothing for long is given up."""
        if live.giving_up is not None:
            live.giving_up.cancel()
            live.giving_up = None
        if live.credit is None or not live.has_more:
            return
        if live.credit > 0:
            self._tell(live)
        else:
            loop = asyncio.get_running_loop()
            live.giving_up = loop.call_later(self._limits.slow_reader_s, self._give_up, live)

    def _give_up(self, live: _Live) -> None:
        if live.is_ended:
            return
        live.parsed.served.engine.abort(live.parsed.request_id)
        failure = slow_reader("no credit has been granted", self._limits.slow_reader_s)
        live.failed(failed(live.parsed, failure))
        self._tell(live)

    def _cancel(self, label: str) -> None:
        live = self._live.get(label)
        if live is None:
            if label not in self._ended_labels:
                self._answer(label, unknown_request_id().to_status())
        elif live.stream is not None:
            live.parsed.served.engine.abort(live.parsed.request_id)
            # What it has made is told with its end; nobody has to grant for that.
            live.credit = None
            self._tell(live)
        elif not live.is_ended:
            live.cancelled()
            self._tell(live)

    def _answer(self, label: str, status: status_pb2.Status) -> None:
        """Tell something that is no event of a live request."""
        self._tell(Narrator(label[:MAX_REQUEST_ID_LEN]).error(status))

    def _teller_of(self, live: _Live) -> Callable[[TokenStream], None]:
        return lambda _: self._tell(live)

    def _tell(self, source: _Live | GenerationEvent) -> None:
        self._ready.append(source)
        self._wake.set()
