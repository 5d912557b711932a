"""When a request is sent again, and how long that waits."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import grpc

from headrace.clients.errors import HeadraceError, Overloaded, Pushback, Unavailable, error_from_rpc

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Bounded exponential backoff with jitter.

    A request is sent again only while nothing of its output has been seen, and only after UNAVAILABLE, or
    after RESOURCE_EXHAUSTED when the server says how long to wait. So no token is ever made twice for a
    caller, and a request that the server refuses for good is never repeated. gRPC's own retries are left off.

    Args:
        max_attempts: most times that a request is sent, the first included; 1 turns retries off.
        initial_backoff_s: wait before the second attempt; it doubles from attempt to attempt.
        max_backoff_s: longest wait of its own choice.
        max_retry_after_s: longest wait that a server may ask for; asked for more, the call fails at once.
    """

    max_attempts: int = 5
    initial_backoff_s: float = 0.1
    max_backoff_s: float = 5.0
    max_retry_after_s: float = 30.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts={self.max_attempts} is too small: use 1 (no retries) or more")
        if min(self.initial_backoff_s, self.max_backoff_s, self.max_retry_after_s) < 0:
            raise ValueError("a wait can't be negative")

    def delay_s(self, num_attempts: int, error: HeadraceError, rng: random.Random) -> float | None:
        """How long to wait before the next attempt, seconds; None: give up.

        Args:
            num_attempts: attempts made so far, at least 1.
            error: what the last of them ended with.
            rng: source of the jitter, which keeps callers that were refused together from returning together.
        """
        if num_attempts >= self.max_attempts or not is_retriable(error):
            return None
        ceiling_s = min(self.max_backoff_s, self.initial_backoff_s * 2.0 ** (num_attempts - 1))
        backoff_s = ceiling_s * rng.uniform(0.5, 1.0)
        retry_after_s = error.retry_after_s if isinstance(error, Pushback) else None
        if retry_after_s is None:
            return backoff_s
        if retry_after_s > self.max_retry_after_s:
            return None
        # Never before the moment that the server named.
        return retry_after_s + backoff_s


def is_retriable(error: HeadraceError) -> bool:
    """Whether the same request may succeed a little later."""
    if isinstance(error, Overloaded):
        return error.retry_after_s is not None
    return isinstance(error, Unavailable)


class Attempts:
    """The attempts of one call, under one deadline.

    Args:
        timeout_s: longest time for all attempts and the waits between them; None: no limit.
    """

    def __init__(self, policy: RetryPolicy, rng: random.Random, timeout_s: float | None = None) -> None:
        self._policy = policy
        self._rng = rng
        self._deadline_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        self._num_attempts = 1

    @property
    def remaining_s(self) -> float | None:
        """Time left for the attempt to come, seconds; None: no limit."""
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - asyncio.get_running_loop().time())

    def next_delay_s(self, error: HeadraceError) -> float:
        """Count a failed attempt; how long to wait before the next one, seconds.

        Raises:
            HeadraceError: `error` itself, when there is to be no other attempt.
        """
        delay_s = self._policy.delay_s(self._num_attempts, error, self._rng)
        remaining_s = self.remaining_s
        if delay_s is None or (remaining_s is not None and delay_s >= remaining_s):
            raise error
        self._num_attempts += 1
        return delay_s


async def call_with_retries(send: Callable[[float | None], Awaitable[T]], attempts: Attempts) -> T:
    """Make a unary call until it succeeds or must be given up.

    Args:
        send: makes one attempt, given the time that is left for it, seconds.

    Raises:
        HeadraceError: what the last attempt ended with.
    """
    while True:
        try:
            return await send(attempts.remaining_s)
        except grpc.aio.AioRpcError as rpc_error:
            error = error_from_rpc(rpc_error)
        await asyncio.sleep(attempts.next_delay_s(error))
