"""Requests that outlive their streams: who may take them up again, and until when."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from headrace.service.identity import Caller
from headrace.service.limits import Limits
from headrace.service.status import not_offered, not_resumable, resumable_id_in_use, too_many_resumable

if TYPE_CHECKING:
    # What is live knows its served model, which is kept where these are.
    from headrace.service.live import Live

EXPIRED = "CANCELLED/DETACH_EXPIRED"
CANCELLED_DETACHED = "CANCELLED/CANCELLED"
GOING_DOWN = "UNAVAILABLE/SHUTTING_DOWN"

_Key = tuple[str, str, str]


class Holder(Protocol):
    """A stream that requests are told on."""

    def lose(self, live: Live) -> None:
        """Another stream has taken a request up."""
        ...

    def cancel(self, label: str) -> None:
        """Cancel a request that it holds."""
        ...

    def tell(self, source: Live) -> None:
        """There may be room for more of a request."""
        ...


class Resumable:
    """A request that may be resumed.

    Args:
        home: where it is found.
        key: as what.
        live: the request.
        holder: the stream that it is told on; None for none.
    """

    def __init__(self, home: Resumables, key: _Key, live: Live, holder: Holder) -> None:
        self._home = home
        self._forgetting: asyncio.TimerHandle | None = None
        self.key = key
        self.live = live
        self.holder: Holder | None = holder
        self.is_detached = False
        """Whether its stream has broken, and nobody has resumed it yet."""

    def release(self, grace_s: float, *, is_detached: bool) -> None:
        """No stream holds it from now on; unless it is taken up, it ends and is forgotten after the grace.

        Args:
            is_detached: whether its stream has broken, rather than told it to its end.
        """
        self.hold(None)
        self.is_detached = is_detached
        self._forgetting = asyncio.get_running_loop().call_later(grace_s, self.end, EXPIRED)

    def hold(self, holder: Holder | None) -> None:
        """It is told on another stream, or on none; nothing ends it by itself."""
        self.holder, self.is_detached = holder, False
        if self._forgetting is not None:
            self._forgetting.cancel()
            self._forgetting = None

    def acknowledged(self) -> None:
        """Its client has seen something: all of it, or so much that there may be room for more."""
        if self.live.is_over:
            self._home.forget(self)
        elif self.holder is not None:
            self.holder.tell(self.live)

    def end(self, outcome: str) -> None:
        """End it, for no stream holds it, and forget it."""
        self._home.forget(self)
        self.live.end(outcome)


class Resumables:
    """All of one server. A client finds its own alone."""

    def __init__(self) -> None:
        self._entries: dict[_Key, Resumable] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_detached(self) -> int:
        """How many no stream holds, because theirs has broken."""
        return sum(entry.is_detached for entry in self._entries.values())

    def check(self, caller: Caller, label: str, limits: Limits) -> None:
        """Whether a client may have another one under this label.

        Raises:
            RpcFailure: ALREADY_EXISTS, it has one; RESOURCE_EXHAUSTED, there are too many.
        """
        known = self._entries.get(_key(caller, label))
        if known is not None and not known.live.is_ended:
            raise resumable_id_in_use()
        if limits.max_resumable == 0:
            raise not_offered("detach (--max-resumable is 0)")
        if known is None and len(self._entries) >= limits.max_resumable:
            # Those that have been told to their end may be forgotten early, the eldest first.
            told = next((each for each in self._entries.values() if _is_told(each)), None)
            if told is None:
                raise too_many_resumable(limits.max_resumable)
            self.forget(told)

    def add(self, caller: Caller, live: Live, holder: Holder) -> None:
        """Take in a request for which `check` has just passed."""
        key = _key(caller, live.parsed.label)
        known = self._entries.get(key)
        if known is not None:
            self.forget(known)
        self._entries[key] = Resumable(self, key, live, holder)

    def find(self, caller: Caller, label: str) -> Resumable | None:
        """A client's own request of this label."""
        return self._entries.get(_key(caller, label))

    def of(self, live: Live) -> Resumable | None:
        """The one that a stream holds as `live`, if it may be resumed."""
        entry = None if live.log is None else self.find(live.parsed.caller, live.parsed.label)
        return entry if entry is not None and entry.live is live else None

    def take_up(
        self, caller: Caller, label: str, last_sequence: int | None, credit: int | None, holder: Holder
    ) -> Live:
        """Let `holder` have a request of the client's.

        Raises:
            RpcFailure: NOT_FOUND, there is none to be resumed; INVALID_ARGUMENT, not from there on.
        """
        entry = self.find(caller, label)
        if entry is not None and not entry.live.is_begun:
            # Nobody has heard of it yet: to start it anew loses nothing.
            if entry.holder is not None:
                entry.holder.cancel(label)
            self.forget(entry)
            entry = None
        if entry is None:
            raise not_resumable()
        before = entry.live
        entry.live = before.taken_up(last_sequence, credit)
        if entry.holder is not None:
            entry.holder.lose(before)
        entry.hold(holder)
        self._changed.set()
        if entry.live.is_over and not entry.live.has_resent:
            self.forget(entry)
            raise not_resumable()
        return entry.live

    def forget(self, entry: Resumable) -> None:
        """It can't be resumed any more."""
        entry.hold(None)
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
        self._changed.set()

    def close(self) -> None:
        """End those that no stream holds."""
        for entry in list(self._entries.values()):
            if entry.holder is None:
                entry.end(GOING_DOWN)

    async def until_none_is_detached(self) -> None:
        """Wait until each has been resumed, or has expired."""
        while self.num_detached:
            self._changed.clear()
            await self._changed.wait()


def _is_told(entry: Resumable) -> bool:
    return entry.holder is None and not entry.is_detached


def _key(caller: Caller, label: str) -> _Key:
    """Nobody's name is another's address."""
    return caller.name, "" if caller.name else caller.host, label
