"""One Session RPC: one task reads, one admits in the order of arrival, and the RPC's own task writes.

How a client tells events apart: an `error` event ends the request of its label, with these exceptions, told
by the `reason` of its google.rpc.ErrorInfo and always numbered `sequence` 0. DUPLICATE_REQUEST_ID, with
ALREADY_EXISTS, refuses a second `start` or `resume` under the label of a live request, which goes on.
UNKNOWN_REQUEST_ID (NOT_FOUND) and INVALID_ACTION (INVALID_ARGUMENT) answer every other action.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeAlias

from google.rpc import status_pb2

from headrace.engine import FieldViolation, UnreadPool
from headrace.service.admission import Encoded, admit, encode, parse
from headrace.service.auth import no_longer_welcome
from headrace.service.ended_labels import EndedLabels
from headrace.service.event_log import EventLog
from headrace.service.identity import current_caller
from headrace.service.limits import MAX_REQUEST_ID_LEN, Limits
from headrace.service.live import Live
from headrace.service.next_message import NextMessage
from headrace.service.resumable import CANCELLED_DETACHED
from headrace.service.serving import Serving, closed
from headrace.service.status import (
    RpcFailure,
    duplicate_request_id,
    invalid,
    invalid_action,
    resumed_elsewhere,
    slow_reader,
    unknown_request_id,
    unread_output,
)
from headrace.service.tasks import end, raise_failure
from headrace.service.telling import RPC_ENDED, Narrator, failed, log_end, told
from headrace.service.unsupported import unknown_fields
from headrace.v1.generation_pb2 import (
    AcknowledgeEvents,
    CancelGeneration,
    GenerationEvent,
    GrantCredit,
    ResumeGeneration,
    SessionRequest,
    StartGeneration,
)

_Named: TypeAlias = "CancelGeneration | GrantCredit | ResumeGeneration | AcknowledgeEvents"


class SessionRun:
    """The life of one Session, inside ``async with``; leaving it ends all of its requests but those that may
    be resumed. It obeys `headrace.service.resumable.Holder`.

    Args:
        serving: what answers.
        limits: bounds of the stream itself.
        requests: the client's messages.
        time_remaining: time that the RPC's deadline leaves, seconds; None for no deadline.
    """

    def __init__(
        self,
        serving: Serving,
        limits: Limits,
        requests: AsyncIterator[SessionRequest],
        time_remaining: Callable[[], float | None],
    ) -> None:
        self._serving = serving
        self._limits = limits
        self._requests = requests
        self._time_remaining = time_remaining
        self._caller = current_caller()
        self._resumables = serving.resumables
        self._live: dict[str, Live] = {}
        self._ended_labels = EndedLabels(limits.max_remembered_labels)
        # What has something to tell, and since when: whole requests, and answers that belong to none.
        self._ready: deque[tuple[float, Live | GenerationEvent]] = deque()
        self._unread = UnreadPool(limits.max_unread_bytes, self._has_too_much)
        self._cut_by: RpcFailure | None = None
        self._wake = asyncio.Event()
        self._has_room = asyncio.Event()
        self._admissions: asyncio.Queue[tuple[Live, asyncio.Task[Encoded], int]] = asyncio.Queue()
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
        self._let_go(RPC_ENDED)
        await end(*self._tasks, *self._encodings)
        # What leads back here is let go, or the call and all its memory would wait for the collector.
        self._tasks.clear()
        self._encodings.clear()
        self._unread.close()

    async def messages(self) -> AsyncGenerator[list[GenerationEvent], None]:
        """Everything that the client is told, until its half-close and the end of the last request.

        Raises:
            RpcFailure: INVALID_ARGUMENT, the client broke the protocol; UNAVAILABLE, the server goes down;
                RESOURCE_EXHAUSTED, the client reads too slowly.
        """
        message = NextMessage()
        with self._serving.on_close(self._wake.set):
            while True:
                while self._ready:
                    since_s, source = self._ready.popleft()
                    self._check_reader(since_s)
                    for event in self._taken(source):
                        message.add(event)
                        if message.is_full:
                            yield message.handed_over()
                    self._has_room.set()
                if message.events:
                    yield message.handed_over()
                    continue  # meanwhile there may be more
                if self._cut_by is not None:
                    raise self._cut_by
                raise_failure(self._tasks)
                if not self._live and self._tasks[0].done():
                    return
                if not self._live and self._serving.is_closed:
                    raise closed()
                await self._wake.wait()
                self._wake.clear()

    def _taken(self, source: Live | GenerationEvent) -> Iterator[GenerationEvent]:
        """One by one: who has much to tell lets others have their turn between two messages."""
        if isinstance(source, GenerationEvent):
            yield source
            return
        events, label = source.told(), source.parsed.label
        if source.is_ended and self._live.get(label) is source:
            # Forgotten before its end is sent: whoever has read the end may use the label again.
            self._remove(source)
        try:
            yield from events
            self._await_reader(source)
        finally:
            if source.is_ended:
                # Its end has been told of already, unless the stream broke before it was.
                log_end(source.parsed, RPC_ENDED)

    def _remove(self, live: Live) -> None:
        """Its end is being told."""
        label = live.parsed.label
        del self._live[label]
        self._ended_labels.add(label)
        if live.stream is not None:
            live.stream.set_listener(None)
        if (entry := self._resumables.of(live)) is not None:
            entry.release(self._limits.detach_grace_s, is_detached=False)

    def _let_go(self, outcome: str) -> None:
        """Nothing more is told here: what may be resumed waits for that, all else ends."""
        for live in self._live.values():
            live.stop_giving_up()
            if live.stream is not None:
                live.stream.count_in(None)
                live.stream.set_listener(None)
            entry = self._resumables.of(live)
            if entry is not None and live.is_begun and not self._serving.is_closed:
                entry.release(self._limits.detach_grace_s, is_detached=True)
                continue
            if entry is not None:
                self._resumables.forget(entry)
            live.end(outcome)
            live.is_ended = True
        self._live.clear()

    def _has_too_much(self) -> None:
        # This may be in the middle of the engine's round.
        asyncio.get_running_loop().call_soon(self._cut_off)

    def _cut_off(self) -> None:
        """Give up a reader at once for whom too much waits; he may be told of it much later."""
        if self._cut_by is None and self._live:
            self._cut_by = unread_output(self._limits.max_unread_bytes)
            self._serving.edge.metrics.slow_reader("bytes")
            self._let_go(f"{self._cut_by.code.name}/{self._cut_by.reason}")
            self._wake.set()

    def _check_reader(self, since_s: float) -> None:
        """A reader that takes little by little is cut as one that takes nothing: nothing waits for longer."""
        if self._cut_by is not None:
            raise self._cut_by
        if asyncio.get_running_loop().time() - since_s > self._limits.slow_reader_s:
            self._serving.edge.metrics.slow_reader("age")
            raise slow_reader("what is ready has not been read", self._limits.slow_reader_s, "read faster")

    async def _read(self) -> None:
        async for request in self._requests:
            # Who sends without reading is made to wait: what he has coming is kept for him, within bounds.
            while self._is_behind():
                self._has_room.clear()
                await self._has_room.wait()
            if self._cut_by is not None:
                return
            unknown = tuple(unknown_fields(request))
            match request.WhichOneof("action"):
                case "start":
                    self._start(request.start, unknown)
                case "cancel":
                    self._act(request.cancel, unknown, lambda action: self.cancel(action.request_id))
                case "grant_credit":
                    self._act(request.grant_credit, unknown, self._grant)
                case "resume":
                    self._act(request.resume, unknown, self._resume)
                case "acknowledge":
                    self._act(request.acknowledge, unknown, self._acknowledge)
                case _:
                    raise invalid(
                        *unknown,
                        FieldViolation(
                            "action",
                            "must be one of start, cancel, grant_credit, resume and acknowledge, got none",
                        ),
                    )

    def _act(self, action: _Named, unknown: tuple[FieldViolation, ...], act: Callable[[Any], None]) -> None:
        """Do what an action on a request says, or answer why not."""
        try:
            if unknown:
                raise invalid_action(*unknown)
            act(action)
        except RpcFailure as failure:
            self._answer(action.request_id, failure.to_status())

    def _start(self, start: StartGeneration, unknown: tuple[FieldViolation, ...]) -> None:
        label = start.request_id
        try:
            if label in self._live:
                raise duplicate_request_id()
            if unknown:
                raise invalid(*unknown)
            if start.detach:
                self._resumables.check(self._caller, label, self._limits)
            remaining_s = None if start.detach else self._time_remaining()
            parsed = parse(self._serving, start, remaining_s, needs_label=True)
        except Exception as error:
            self._answer(label, told(error).to_status())
            return
        # The prompt's text is let go as soon as it is encoded, however long the answer takes.
        credit = start.initial_credit if start.HasField("initial_credit") else None
        log = EventLog(self._limits.detach_buffer_bytes) if start.detach else None
        live = self._live[label] = Live(replace(parsed, start=replace(parsed.start, prompt=())), credit, log)
        if log is not None:
            self._resumables.add(self._caller, live, self)
        encoding = asyncio.create_task(encode(parsed))
        self._encodings.add(encoding)
        num_bytes = start.ByteSize()
        self._backlog_bytes += num_bytes
        self._admissions.put_nowait((live, encoding, num_bytes))

    def _is_behind(self) -> bool:
        num_items, limits = max(len(self._ready), self._admissions.qsize()), self._limits
        is_large = self._backlog_bytes > limits.max_session_backlog_bytes
        return is_large or num_items > limits.max_session_backlog

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
            self.tell(live)
            self._listen(live)

    def _grant(self, granted: GrantCredit) -> None:
        live = self._known(granted.request_id)
        if live is None:
            return
        if live.credit is None:
            raise invalid_action(FieldViolation("grant_credit", "is for a request with a limit of credit"))
        if granted.tokens == 0:
            raise invalid_action(FieldViolation("grant_credit.tokens", "must be at least 1"))
        live.grant(granted.tokens)
        self.tell(live)

    def _resume(self, resume: ResumeGeneration) -> None:
        label = resume.request_id
        if label in self._live:
            raise duplicate_request_id()
        if not self._caller.is_welcome():
            raise no_longer_welcome()
        self._serving.model()
        live = self._resumables.take_up(
            self._caller,
            label,
            resume.last_sequence if resume.HasField("last_sequence") else None,
            resume.credit if resume.HasField("credit") else None,
            self,
        )
        self._live[label] = live
        self.tell(live)
        self._listen(live)

    def _acknowledge(self, seen: AcknowledgeEvents) -> None:
        label = seen.request_id
        entry = self._resumables.find(self._caller, label)
        live = self._live.get(label) or (entry.live if entry is not None else self._known(label))
        if live is None:
            return
        if live.log is None:
            raise invalid_action(
                FieldViolation("acknowledge", "is for a request that was started with detach")
            )
        live.log.acknowledge(seen.sequence)
        if entry is not None and entry.live is live:
            entry.acknowledged()

    def _await_reader(self, live: Live) -> None:
        """What has more to tell goes on while it may; who makes no room for it for long is given up."""
        live.stop_giving_up()
        if not live.has_more or self._live.get(live.parsed.label) is not live:
            return
        if live.may_tell:
            self.tell(live)
        else:
            loop = asyncio.get_running_loop()
            live.giving_up = loop.call_later(self._limits.slow_reader_s, self._give_up, live)

    def _give_up(self, live: Live) -> None:
        if live.is_ended:
            return
        live.parsed.served.engine.abort(live.parsed.request_id)
        self._serving.edge.metrics.slow_reader("credit")
        live.failed(failed(live.parsed, live.starved(self._limits.slow_reader_s)))
        self.tell(live)

    def cancel(self, label: str) -> None:
        """Cancel a request: one of this stream, or one of the same client that may be resumed."""
        live = self._live.get(label)
        if live is not None:
            live.cancelled()
            self.tell(live)
            return
        entry = self._resumables.find(self._caller, label)
        if entry is None:
            self._known(label)
        elif entry.holder is not None:
            entry.holder.cancel(label)
        elif entry.is_detached:
            entry.end(CANCELLED_DETACHED)

    def lose(self, live: Live) -> None:
        """Another stream has taken a request of this one up."""
        label = live.parsed.label
        live.stop_giving_up()
        if self._live.get(label) is live:
            del self._live[label]
            self._ended_labels.add(label)
            self._answer(label, resumed_elsewhere().to_status())

    def _known(self, label: str) -> Live | None:
        """A request of this stream; None for one that has ended.

        Raises:
            RpcFailure: NOT_FOUND, it was never there.
        """
        live = self._live.get(label)
        if live is None and label not in self._ended_labels:
            raise unknown_request_id()
        return live

    def _listen(self, live: Live) -> None:
        if live.stream is not None:
            live.stream.count_in(self._unread)
            live.stream.set_listener(lambda _: self.tell(live))

    def _answer(self, label: str, status: status_pb2.Status) -> None:
        """Tell something that is no event of a live request."""
        self.tell(Narrator(label[:MAX_REQUEST_ID_LEN]).error(status))

    def tell(self, source: Live | GenerationEvent) -> None:
        """There may be something to tell."""
        self._ready.append((asyncio.get_running_loop().time(), source))
        self._wake.set()
