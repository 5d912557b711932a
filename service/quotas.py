"""How much each client may ask for. What one client has used up is no other's loss."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from headrace.service.status import QuotaViolation, RpcFailure

_MAX_IDLE_ACCOUNTS = 4096


@dataclass(frozen=True, slots=True)
class QuotaRules:
    """Most that one client may have; None for no bound.

    Args:
        max_requests: requests at once.
        max_rpcs: RPCs at once, of whatever kind.
        tokens_per_minute: tokens of prompts and answers, on average; as many may come in one burst. A request
            is let in while anything is left, and what it uses beyond that is waited for by the next one.
    """

    max_requests: int | None = None
    max_rpcs: int | None = None
    tokens_per_minute: int | None = None


class _Account:
    """What one client has open, and has left."""

    def __init__(self, now_s: float, num_tokens: float) -> None:
        self.num_requests = 0
        self.num_rpcs = 0
        self.num_tokens = num_tokens
        self.filled_s = now_s


class Ticket:
    """A request's place in its client's account; closed once, however often it is told so."""

    def __init__(self, charge: Callable[[int], None], release: Callable[[], None]) -> None:
        self._charge = charge
        self._release = release
        self._num_charged = 0
        self._is_open = True

    def charge_up_to(self, num_tokens: int) -> None:
        """So many tokens have been used for it by now, prompt and answer together."""
        if num_tokens > self._num_charged:
            self._charge(num_tokens - self._num_charged)
            self._num_charged = num_tokens

    def close(self) -> None:
        """It is over."""
        if self._is_open:
            self._is_open = False
            self._release()


class Quotas:
    """Keeps every client's account.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, rules: QuotaRules | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._rules = rules or QuotaRules()
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    @property
    def num_accounts(self) -> int:
        """Clients that are remembered."""
        return len(self._accounts)

    @contextmanager
    def rpc(self, name: str) -> Iterator[None]:
        """Count an RPC of `name` for as long as the block lasts.

        Raises:
            RpcFailure: RESOURCE_EXHAUSTED, too many are open.
        """
        account, most = self._account(name), self._rules.max_rpcs
        if most is not None and account.num_rpcs >= most:
            raise _exceeded(name, "RPC_QUOTA", f"at most {most} RPCs of one client may be open at once", 1.0)
        account.num_rpcs += 1
        try:
            yield
        finally:
            account.num_rpcs -= 1

    def request(self, name: str) -> Ticket:
        """Let in a request of `name`.

        Raises:
            RpcFailure: RESOURCE_EXHAUSTED, too many run, or its tokens are used up.
        """
        account, most = self._account(name), self._rules.max_requests
        if most is not None and account.num_requests >= most:
            raise _exceeded(
                name, "REQUEST_QUOTA", f"at most {most} requests of one client may be open at once", 1.0
            )
        rate = self._rules.tokens_per_minute
        if rate is not None and account.num_tokens <= 0:
            wait_s = (1 - account.num_tokens) * 60 / rate
            raise _exceeded(name, "TOKEN_QUOTA", f"the client's {rate} tokens per minute are used up", wait_s)
        account.num_requests += 1

        def charge(num_tokens: int) -> None:
            if rate is not None:
                self._fill(account)
                account.num_tokens -= num_tokens

        def release() -> None:
            account.num_requests -= 1

        return Ticket(charge, release)

    def _account(self, name: str) -> _Account:
        account = self._accounts.get(name)
        if account is None:
            if len(self._accounts) >= 2 * _MAX_IDLE_ACCOUNTS:
                self._forget_idle()
            account = self._accounts[name] = _Account(self._clock(), self._rules.tokens_per_minute or 0)
        self._fill(account)
        return account

    def _fill(self, account: _Account) -> None:
        rate, now_s = self._rules.tokens_per_minute, self._clock()
        if rate is not None:
            account.num_tokens = min(rate, account.num_tokens + (now_s - account.filled_s) * rate / 60)
        account.filled_s = now_s

    def _forget_idle(self) -> None:
        """Whoever has nothing open and everything left is as good as new."""
        full = self._rules.tokens_per_minute or 0
        for name, account in list(self._accounts.items()):
            self._fill(account)
            if not account.num_rpcs and not account.num_requests and account.num_tokens >= full:
                del self._accounts[name]


def _exceeded(name: str, reason: str, description: str, retry_after_s: float) -> RpcFailure:
    return RpcFailure(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        reason,
        description,
        retry_after_s=retry_after_s,
        quota=QuotaViolation(f"client:{name}", description),
    )
