"""Retries are bounded, wait longer each time, and never come before the moment that a server named."""

from __future__ import annotations

import random

import pytest

from headrace.clients.errors import (
    Cancelled,
    DeadlineExceeded,
    HeadraceError,
    InvalidArgument,
    NotFound,
    Overloaded,
    ServerError,
    Unavailable,
)
from headrace.clients.retry import Attempts, RetryPolicy, is_retriable

UNAVAILABLE = Unavailable("loading")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UNAVAILABLE, True),
        (Unavailable("draining", retry_after_s=1.0), True),
        (Overloaded("queue full", retry_after_s=1.0), True),
        (Overloaded("slow reader"), False),
        (InvalidArgument("bad"), False),
        (NotFound("no such model"), False),
        (DeadlineExceeded("late"), False),
        (Cancelled("by you"), False),
        (ServerError("a bug"), False),
    ],
    ids=repr,
)
def test_only_unavailable_and_pushback_are_tried_again(error: HeadraceError, expected: bool) -> None:
    assert is_retriable(error) is expected
    assert (RetryPolicy().delay_s(1, error, random.Random(0)) is not None) is expected


def test_the_wait_doubles_up_to_its_ceiling_with_jitter_below() -> None:
    policy = RetryPolicy(max_attempts=100, initial_backoff_s=0.1, max_backoff_s=1.0)
    rng = random.Random(3)
    for attempt, ceiling_s in ((1, 0.1), (2, 0.2), (3, 0.4), (4, 0.8), (5, 1.0), (50, 1.0)):
        delays = [policy.delay_s(attempt, UNAVAILABLE, rng) for _ in range(50)]
        assert all(delay is not None and ceiling_s / 2 <= delay <= ceiling_s for delay in delays)
        assert len(set(delays)) > 40, "callers that were refused together must not return together"


def test_a_servers_own_delay_is_honoured_and_only_added_to() -> None:
    delay_s = RetryPolicy(initial_backoff_s=0.1).delay_s(
        1, Overloaded("full", retry_after_s=3.0), random.Random(0)
    )
    assert delay_s is not None
    assert 3.0 < delay_s <= 3.1


def test_a_delay_that_is_too_long_gives_up_at_once() -> None:
    policy = RetryPolicy(max_retry_after_s=30.0)
    assert policy.delay_s(1, Overloaded("full", retry_after_s=31.0), random.Random(0)) is None


def test_attempts_are_bounded() -> None:
    policy = RetryPolicy(max_attempts=3)
    assert policy.delay_s(2, UNAVAILABLE, random.Random(0)) is not None
    assert policy.delay_s(3, UNAVAILABLE, random.Random(0)) is None
    assert RetryPolicy(max_attempts=1).delay_s(1, UNAVAILABLE, random.Random(0)) is None


async def test_a_wait_past_the_deadline_is_not_begun() -> None:
    attempts = Attempts(RetryPolicy(), random.Random(0), timeout_s=2.0)
    assert attempts.remaining_s is not None
    with pytest.raises(Overloaded):
        attempts.next_delay_s(Overloaded("full", retry_after_s=5.0))


@pytest.mark.parametrize("setting", [{"max_attempts": 0}, {"initial_backoff_s": -1.0}], ids=str)
def test_a_senseless_policy_is_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"too small|negative"):
        RetryPolicy(**setting)  # type: ignore[arg-type]  # a dict of names and numbers, for parametrize
