"""What the servicers stand on: nothing while the model loads, then one served model, then nothing again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from headrace.engine import AsyncEngine
from headrace.service.edge import Edge
from headrace.service.limits import Limits
from headrace.service.resumable import Resumables
from headrace.service.status import RpcFailure, unavailable, unknown_model
from headrace.service.text import TextWorkers


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that answers.

    Args:
        name: what clients call it.
        opened_s: monotonic moment from which on it answers, seconds.
    """

    name: str
    engine: AsyncEngine
    texts: TextWorkers
    limits: Limits
    opened_s: float = field(default_factory=time.monotonic)

    @property
    def uptime_s(self) -> float:
        """For how long it has answered, seconds."""
        return time.monotonic() - self.opened_s

    @property
    def max_prompt_tokens(self) -> int:
        """Most tokens that a prompt may have."""
        return self.engine.layout.longest(self.engine.info.max_model_len)

    def require(self, name: str) -> None:
        """Check the model that a request names.

        Raises:
            RpcFailure: NOT_FOUND; an empty name means the default.
        """
        if name not in ("", self.name):
            raise unknown_model(name, self.name)


class Serving:
    """Holds the served model for as long as there is one.

    Args:
        edge: quotas, metrics and traces of what is served.

    `resumables` are the requests that outlive their streams.
    """

    def __init__(self, edge: Edge | None = None) -> None:
        self.edge = edge or Edge()
        self.resumables = Resumables()
        self._served: ServedModel | None = None
        self._is_closed = False
        self._listeners: set[Callable[[], None]] = set()

    @property
    def is_closed(self) -> bool:
        """Whether no request will ever be answered again: streams that wait for one may end."""
        return self._is_closed

    @property
    def served(self) -> ServedModel | None:
        """The served model, if there is one now."""
        return None if self._is_closed else self._served

    def open(self, served: ServedModel) -> None:
        """Begin to answer."""
        self.edge.metrics.opened(served.name)
        self._served = served

    def close(self) -> None:
        """Stop answering, for good."""
        self._is_closed = True
        self.resumables.close()
        for listener in tuple(self._listeners):
            listener()

    def model(self) -> ServedModel:
        """The served model.

        Raises:
            RpcFailure: UNAVAILABLE, the model is still loading or the server is going down.
        """
        if self._is_closed:
            raise closed()
        if self._served is None:
            raise unavailable("LOADING", "the model is still loading", 1.0)
        return self._served

    @contextmanager
    def on_close(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener` if it is closed within the block."""
        self._listeners.add(listener)
        try:
            yield
        finally:
            self._listeners.discard(listener)


def closed() -> RpcFailure:
    """The answer of a server that goes down."""
    return unavailable("SHUTTING_DOWN", "the server is going down", 1.0)
