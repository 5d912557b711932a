"""A request of a Session that has not ended for its client."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator

from headrace.engine import FinishEvent, FinishReason, OutputEvent, Timings, TokenStream, Usage
from headrace.service.admission import Admitted, Parsed
from headrace.service.event_log import EventLog
from headrace.service.status import RpcFailure, slow_reader
from headrace.service.telling import Teller, log_end
from headrace.v1.generation_pb2 import GenerationEvent

MAX_CREDIT = 2**32


class Live:
    """What it has made, and how much of that may be told.

    Args:
        credit: tokens that it may be told before more are granted; None for no limit.
        log: what it was told, where it may be resumed.
    """

    def __init__(self, parsed: Parsed, credit: int | None, log: EventLog | None = None) -> None:
        self.parsed = parsed
        self.credit = credit
        self.log = log
        self.giving_up: asyncio.TimerHandle | None = None
        self.stream: TokenStream | None = None
        self.is_ended = False
        self._teller = Teller(parsed)
        self._is_unbounded = False
        self._unsent: list[GenerationEvent] = []
        self._unseen_ends: list[FinishEvent] = []
        self._resent: list[GenerationEvent] = []

    def admitted(self, admitted: Admitted) -> None:
        """The engine has queued it."""
        self.stream = admitted.stream
        if self.credit is not None:
            self.stream.keep_apart()
        self._unsent.append(self._teller.accepted(admitted))

    def failed(self, failure: RpcFailure) -> None:
        """It ends before the engine has seen it, or whatever the engine still has to tell of it."""
        self.is_ended = True
        if self.stream is not None:
            self.stream.count_in(None)
        self.stream = None
        self._unsent.append(self._teller.failed(failure))

    def starved(self, waited_s: float) -> RpcFailure:
        """What its client is told who has made no room for more for so long."""
        if self.log is not None and self.log.is_full:
            return slow_reader("nothing has been acknowledged", waited_s, "acknowledge sooner")
        return slow_reader("no credit has been granted", waited_s, "grant credit sooner")

    def stop_giving_up(self) -> None:
        """Its client has done something, or has gone."""
        if self.giving_up is not None:
            self.giving_up.cancel()
            self.giving_up = None

    def cancelled(self) -> None:
        """It is cancelled: what it has made is told with its end, and nobody has to grant for that."""
        if self.stream is not None:
            self.parsed.served.engine.abort(self.parsed.request_id)
            self._is_unbounded = True
        elif not self.is_ended:
            self.is_ended = True
            self._unseen_ends = [_cancelled_unseen(index) for index in range(self.parsed.start.n)]

    def told(self) -> Iterator[GenerationEvent]:
        """Everything to be told about it now. As soon as it is called `is_ended` says whether the end is
        among it."""
        messages, self._unsent = self._unsent, []
        events: list[OutputEvent] = [*self._unseen_ends]
        self._unseen_ends.clear()
        if self.stream is not None:
            events += self.stream.take(self._most_tokens)
            self.is_ended = self.stream.is_finished and self.stream.is_empty
        new = self._spoken(messages, events)
        if self.log is None:
            return new
        resent, self._resent = self._resent, []
        # At once: whatever becomes of the stream between two of them, none may be lost.
        return iter([*resent, *map(self.log.add, new)])

    def end(self, outcome: str) -> None:
        """Nobody waits for it any more.

        Args:
            outcome: what the log says of it, unless it has ended already.
        """
        log_end(self.parsed, outcome)
        self.parsed.served.engine.abort(self.parsed.request_id)
        if self.stream is not None:
            self.stream.take()

    def _spoken(
        self, messages: list[GenerationEvent], events: list[OutputEvent]
    ) -> Iterator[GenerationEvent]:
        progress = self.parsed.progress
        num_told = progress.num_told_tokens
        yield from messages
        for event in events:
            yield from self._teller.messages(event)
        if self.credit is not None:
            self.credit -= progress.num_told_tokens - num_told

    def grant(self, num_tokens: int) -> None:
        """So many more may be told."""
        if self.credit is not None:
            self.credit = min(MAX_CREDIT, self.credit + num_tokens)

    def taken_up(self, last_sequence: int | None, credit: int | None) -> Live:
        """The same for another stream, which it is told on from now on; here nothing more is.

        Args:
            last_sequence: number of the last event that need not be sent again.

        Raises:
            RpcFailure: INVALID_ARGUMENT, what comes behind that is not there; nothing has changed.
        """
        if self.log is None:
            raise AssertionError("only what has a log can be resumed")
        resent = self.log.after(last_sequence)
        if last_sequence is not None:
            self.log.acknowledge(last_sequence)
        self._resent = resent
        other = copy.copy(self)
        other.credit, other.giving_up = credit, None
        if other.stream is not None and credit is not None:
            other.stream.keep_apart()
        self.stream = None
        self._unsent, self._unseen_ends, self._resent = [], [], []
        return other

    @property
    def may_tell(self) -> bool:
        """Whether its client has room for more."""
        return self._most_tokens != 0

    @property
    def has_more(self) -> bool:
        """Whether something waits to be told."""
        return self.stream is not None and not self.stream.is_empty

    @property
    def is_begun(self) -> bool:
        """Whether its client has been told, or is about to be told, anything of it."""
        return self.stream is not None or self.is_ended

    @property
    def has_resent(self) -> bool:
        """Whether something is to be sent again."""
        return bool(self._resent)

    @property
    def is_over(self) -> bool:
        """Whether its end has been told, and nobody will ask for it again."""
        return self.is_ended and not (self._unsent or self._unseen_ends or self.has_more) and self._is_seen

    @property
    def _is_seen(self) -> bool:
        return self.log is None or self.log.is_empty

    @property
    def _most_tokens(self) -> int | None:
        if self._is_unbounded or (self.stream is not None and self.stream.has_failed):
            return None
        if self.log is not None and self.log.is_full:
            return 0
        return None if self.credit is None else max(0, self.credit)


def _cancelled_unseen(index: int) -> FinishEvent:
    return FinishEvent(
        index=index,
        reason=FinishReason.CANCELLED,
        matched_stop=None,
        usage=Usage(num_prompt_tokens=0, num_completion_tokens=0),
        timings=Timings(None, None, None, None),
        num_preemptions=0,
    )
