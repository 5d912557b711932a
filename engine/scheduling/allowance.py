"""What one step may take on, so that it is not too long: how many prompt tokens, and who may join."""

from __future__ import annotations

import math

from headrace.engine.scheduling.cost_model import StepCostModel, StepShape, attended_pairs

_DECODE_SHARE = 0.9
"""Nobody joins when decodes alone would take more of the tightest target than this."""
_LEAST_CHUNK = 16
"""Tokens: prompts are not cut finer, but for their ends."""
_MANY = 2**30


class StepAllowance:
    """What one step may still take on beside its decodes; made anew for each step. The default allows all.

    Args:
        costs: what steps cost.
        limit_s: time that all of the step may take.
        left_s: time of it that prompts may take.
        rows: all that run, as if each decoded.
        tightest_s: least TPOT that any of them is to have.
        must_prefill: whether a prompt gets on whatever the time.
        must_join: whether somebody joins whatever the time.
    """

    def __init__(
        self,
        costs: StepCostModel,
        limit_s: float = math.inf,
        left_s: float = math.inf,
        rows: StepShape | None = None,
        tightest_s: float = math.inf,
        *,
        must_prefill: bool = False,
        must_join: bool = False,
    ) -> None:
        self._costs = costs
        self._prices = costs.prices
        self.limit_s = limit_s
        self._left_s = left_s
        self._rows = rows or StepShape()
        self._tightest_s = tightest_s
        self._must_prefill = must_prefill
        self._must_join = must_join
        self.num_joined = 0
        self.has_prefill = False
        self.was_tight = False

    def lift(self) -> None:
        """Allow all: there are no decodes."""
        self.limit_s = self._left_s = math.inf

    def chunk_len(self, first_position: int, most: int, *, is_new: bool = False) -> int:
        """How many of `most` prompt tokens from `first_position` on the step may compute.

        Args:
            is_new: whether they are of a sequence that is about to join.
        """
        if self._left_s == math.inf or most == 0:
            return most
        num_tokens = self._num_tokens_within(self._left_s, first_position)
        if num_tokens >= most:
            return most
        self.was_tight = True
        is_due = self._must_join and self.num_joined == 0 if is_new else self._must_prefill
        if num_tokens < _LEAST_CHUNK:
            return min(most, _LEAST_CHUNK) if is_due and (is_new or not self.has_prefill) else 0
        return num_tokens

    def take(self, first_position: int, num_tokens: int) -> None:
        """Count prompt tokens that the step is going to compute."""
        if num_tokens == 0:
            return
        self.has_prefill = True
        prices = self._prices
        self._left_s -= prices.prefill_token * num_tokens
        self._left_s -= prices.attended_pair * attended_pairs(first_position, num_tokens)

    def take_drafts(self, num_tokens: int) -> None:
        """Count draft tokens that the step is going to verify."""
        self._left_s -= self._prices.decode_token * num_tokens

    def may_join(self, num_known_tokens: int, aim_s: float) -> bool:
        """Whether decodes stay quick enough with one more sequence.

        Args:
            aim_s: TPOT that it is to have itself; infinite for any.
        """
        tightest_s = min(self._tightest_s, aim_s)
        if tightest_s == math.inf or self._rows.num_decode_tokens == 0:
            return True
        if self._costs.predict(self._rows.with_decode(num_known_tokens)) <= _DECODE_SHARE * tightest_s:
            return True
        return self._must_join and self.num_joined == 0

    def join(self, num_known_tokens: int, aim_s: float) -> None:
        """Count a sequence that has joined."""
        self.num_joined += 1
        self._rows = self._rows.with_decode(num_known_tokens)
        self._tightest_s = min(self._tightest_s, aim_s)

    def _num_tokens_within(self, seconds: float, first_position: int) -> int:
        """Most tokens from `first_position` on that take no longer: a quadratic equation's solution."""
        per_token = self._prices.prefill_token + self._prices.attended_pair * (first_position + 0.5)
        per_square = self._prices.attended_pair / 2
        if seconds <= 0:
            return 0
        root = math.sqrt(per_token * per_token + 4 * per_square * seconds)
        # The form of the solution that holds for a square term of zero, too.
        divisor = per_token + root
        return _MANY if divisor == 0 else min(_MANY, int(2 * seconds / divisor))
