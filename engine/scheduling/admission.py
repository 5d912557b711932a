"""Whether one more request may wait, and, if not, when there is going to be room.

The queue is bounded by the number of its sequences and by the tokens that they may come to hold. Both bounds
are there for the flood of all callers together; a client that has next to nothing waiting is let in beyond
them, up to half as much again, so that a flood of others doesn't shut it out.

A refusal says when to come back: when so much work will be done that the queue has room, by the tokens per
second of the last steps and by how much of what they might have made the last requests really made.
"""

from __future__ import annotations

import math

from headrace.engine.config import SchedulerConfig
from headrace.engine.errors import InvalidRequest, Overloaded
from headrace.engine.scheduling.queue import WaitingQueue
from headrace.engine.sequence import Request, Sequence

UNMEASURED_RETRY_S = 1.0
"""What a refusal says before any step has been measured, seconds."""
LEAST_RETRY_S = 0.1
MOST_RETRY_S = 600.0

_SMALL_SHARE = 16
"""A client with less than one in so many of the queue's places is let in beyond its bounds."""
_REMEMBER_STEPS = 0.98
"""Weight of a step when the next one comes: some fifty steps are remembered."""
_REMEMBER_ENDS = 0.95


class QueueGate:
    """Keeps the queue within bounds.

    Args:
        config: the bounds.
        waiting: the queue.
    """

    def __init__(self, config: SchedulerConfig, waiting: WaitingQueue) -> None:
        self._max_num = config.max_num_waiting
        self._max_tokens = config.max_waiting_tokens
        self._max_num_seqs = config.max_num_seqs
        self._waiting = waiting
        self._num_tokens = 0.0
        self._seconds = 0.0
        self._num_made = 0.0
        self._num_allowed = 0.0

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Learn from a finished step.

        Args:
            num_tokens: tokens that it computed.
            seconds: how long it took, planning included.
        """
        self._num_tokens = _REMEMBER_STEPS * self._num_tokens + num_tokens
        self._seconds = _REMEMBER_STEPS * self._seconds + seconds

    def note_end(self, sequence: Sequence) -> None:
        """Learn from a sequence that is over how much of what it might have taken it took."""
        if sequence.first_scheduled_s is not None:
            num_computed = len(sequence.token_ids) - sequence.num_cached_tokens
            self._num_made = _REMEMBER_ENDS * self._num_made + num_computed
            self._num_allowed = _REMEMBER_ENDS * self._num_allowed + sequence.max_len

    def check(self, request: Request, max_len: int, num_running: int) -> None:
        """Let a request pass, or not.

        Args:
            max_len: the longest that each of its sequences may become, tokens.
            num_running: sequences that run now.

        Raises:
            InvalidRequest: it alone is more than the queue may ever hold.
            Overloaded: there is no room now.
        """
        num, num_tokens = request.best_of, request.best_of * max_len
        self._check_size(request, num_tokens)
        held, held_tokens = len(self._waiting), self._waiting.num_tokens
        if held + num <= self._max_num and held_tokens + num_tokens <= self._max_tokens:
            return
        if self._has_little(request.client, num, num_tokens) and (
            2 * (held + num) <= 3 * self._max_num and 2 * (held_tokens + num_tokens) <= 3 * self._max_tokens
        ):
            return
        message = (
            f"{held} sequences are waiting, which may come to hold {held_tokens} tokens; this server lets "
            f"{self._max_num} wait, of {self._max_tokens} tokens together"
        )
        num_free = max(0, self._max_num_seqs - num_running)
        retry_s = self._seconds_until_room(
            held + num - self._max_num - num_free, held_tokens + num_tokens - self._max_tokens
        )
        raise Overloaded(message, retry_after_s=retry_s)

    def _check_size(self, request: Request, num_tokens: int) -> None:
        field = "sampling.best_of" if request.best_of > request.n else "n"
        if request.best_of > self._max_num:
            raise InvalidRequest.of(
                field, f"must be at most {self._max_num}, as many as may wait, got {request.best_of}"
            )
        if num_tokens > self._max_tokens:
            raise InvalidRequest.of(
                field if request.best_of > 1 else "stop.max_tokens",
                f"{request.best_of} sequences of up to {num_tokens // request.best_of} tokens, prompt "
                f"included, are more than may wait: {self._max_tokens} tokens; ask for fewer",
            )

    def _has_little(self, client: str, num: int, num_tokens: int) -> bool:
        held, held_tokens = self._waiting.held_by(client)
        return held + num <= max(1, self._max_num // _SMALL_SHARE) and (
            held == 0 or (held_tokens + num_tokens) * _SMALL_SHARE <= self._max_tokens
        )

    def _seconds_until_room(self, num_over: int, num_tokens_over: int) -> float:
        """How long until the queue has lost so many sequences and so many tokens, seconds.

        While all places in the batch are taken, one leaves the queue for each that ends: so much work has to
        be done first as one takes on average.
        """
        if self._seconds <= 0.0:
            return UNMEASURED_RETRY_S
        mean_len = max(1.0, self._waiting.num_tokens / max(1, len(self._waiting)))
        share = self._num_made / self._num_allowed if self._num_allowed else 1.0
        # Tokens leave with whole sequences.
        num_leaving = max(num_over, math.ceil(num_tokens_over / mean_len), 0)
        seconds = share * num_leaving * mean_len * self._seconds / max(1.0, self._num_tokens)
        return min(MOST_RETRY_S, max(LEAST_RETRY_S, seconds))
