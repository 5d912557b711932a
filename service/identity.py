"""Who calls: what the gate found out, for whatever is done on behalf of the caller.

It travels in a context variable, which the tasks of an RPC inherit: `headrace.service.gate` alone sets it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum

_NAME = re.compile(r"[\x20-\x7e]{1,256}")


class Role(StrEnum):
    """What a client may do."""

    GENERATE = "generate"
    """Everything on the callers' port."""
    CONTROL = "control"
    """Everything on the operator's port."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A client that has shown who it is.

    Args:
        name: stable for as long as the client is the same one; never a secret; see `is_valid_name`.
    """

    name: str
    roles: frozenset[Role]


def is_valid_name(name: str) -> bool:
    """Whether `name` is 1 to 256 printable ASCII characters."""
    return _NAME.fullmatch(name) is not None


@dataclass(slots=True)
class Tally:
    """Tokens of the requests of one RPC that are over."""

    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0

    def add(self, num_prompt_tokens: int, num_completion_tokens: int) -> None:
        """One more is over."""
        self.num_prompt_tokens += num_prompt_tokens
        self.num_completion_tokens += num_completion_tokens


@dataclass(frozen=True, slots=True)
class Caller:
    """The peer of an RPC.

    Args:
        identity: None where nobody has to show who he is.
        host: the peer's address without its port: it stands for the client that has no name.
        traceparent: the caller's place in a trace, as W3C Trace Context writes it; empty for none.
        is_welcome: whether the credentials that let it in still would: asked before each request of a stream.
        tally: what its requests have used, for the access log.
    """

    identity: Identity | None = None
    host: str = ""
    traceparent: str = ""
    is_welcome: Callable[[], bool] = lambda: True
    tally: Tally = field(default_factory=Tally)

    @property
    def name(self) -> str:
        """The client's name; empty for one that has none."""
        return "" if self.identity is None else self.identity.name

    @property
    def account(self) -> str:
        """What quotas and fair shares are counted by."""
        return self.name or f"host {self.host}"

    def isolation_key(self, salt: str) -> str:
        """KV is shared only between requests of equal keys: those of one client, and of equal salt."""
        # No name holds a NUL, so no two pairs make the same key.
        return salt if self.identity is None else f"{self.name}\0{salt}"


_caller: ContextVar[Caller | None] = ContextVar("headrace_caller", default=None)


def current_caller() -> Caller:
    """The peer of the RPC that this code runs for."""
    return _caller.get() or Caller()


@contextmanager
def acting_for(caller: Caller) -> Iterator[None]:
    """Within the block `current_caller` is this one."""
    token = _caller.set(caller)
    try:
        yield
    finally:
        _caller.reset(token)
