"""What a step costs in seconds, learned from the steps that have run.

The cost is taken to be a sum: so much per step, per prefill token, per decode token, per KV token that a
decode reads, per pair of tokens that prefill attends over. None of it can be negative, so more work never
costs less. The five prices are the minimum of a weighted least-squares problem with exponential forgetting,
kept as its normal equations and solved over the non-negative numbers by coordinate descent from where they
stood before (Franc, Hlaváč and Navara, CAIP '05). Errors count relative to the step's time, not in seconds:
else long prefills would drown short decodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.engine.scheduling.plan import StepPlan

_FORGET = 0.998
"""Weight of a step when the next one comes: some five hundred steps are remembered."""
_KEPT = 0.02
"""So much of what was once known of a price is kept while nothing new is heard of it."""
_PEAK_FADES = 0.9999
_PRIOR_WEIGHT = 0.01
"""Of the prior, in steps."""
_NUM_FIRST_STEPS = 8
"""So many steps are believed whatever they say: the prior may be far off."""
_OUTLIER = 4.0
"""An error beyond so many times the usual one counts as if it were just there, ..."""
_MAX_STREAK = 3
"""... unless so many in a row are off on the same side."""
_LEAST_SPREAD = 0.03
_LEAST_S = 1e-9
_SPREAD_GAIN = 0.02
_PACE_GAIN = 0.1
_SWEEPS = 2
_NUM_PRICES = 5


@dataclass(frozen=True, slots=True)
class StepShape:
    """How much a step computes.

    Args:
        num_prefill_tokens: tokens of rows that compute more than their newest token.
        num_decode_tokens: tokens of all other rows: one each, and its drafts.
        num_context_tokens: KV tokens that those other rows read, each row's own included.
        num_attended_pairs: for each prefill token, the tokens before it and itself; summed.
    """

    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_context_tokens: int = 0
    num_attended_pairs: int = 0

    @classmethod
    def of(cls, plan: StepPlan) -> StepShape:
        """The shape of a plan."""
        num_prefill = num_decode = num_context = num_pairs = 0
        for row in plan.rows:
            num_known = len(row.token_ids)
            if num_known == 1 and row.draft is None:
                # The usual case, without what the others need.
                num_decode += 1
                num_context += row.first_position + 1
                continue
            num_tokens = row.num_planned_tokens
            if num_known == 1 + row.num_draft_tokens:
                num_decode += num_tokens
                num_context += row.first_position + num_tokens
            else:
                num_prefill += num_tokens
                num_pairs += attended_pairs(row.first_position, num_tokens)
        return cls(num_prefill, num_decode, num_context, num_pairs)

    def with_decode(self, num_context_tokens: int, num_tokens: int = 1) -> StepShape:
        """This shape and one more row that decodes.

        Args:
            num_context_tokens: KV tokens that it reads, its own new ones included.
            num_tokens: itself and its drafts.
        """
        return StepShape(
            self.num_prefill_tokens,
            self.num_decode_tokens + num_tokens,
            self.num_context_tokens + num_context_tokens,
            self.num_attended_pairs,
        )

    def with_prefill(self, first_position: int, num_tokens: int) -> StepShape:
        """This shape and one more chunk of a prompt."""
        return StepShape(
            self.num_prefill_tokens + num_tokens,
            self.num_decode_tokens,
            self.num_context_tokens,
            self.num_attended_pairs + attended_pairs(first_position, num_tokens),
        )


def attended_pairs(first_position: int, num_tokens: int) -> int:
    """Over how many tokens `num_tokens` tokens attend together, each over all before it and itself."""
    return num_tokens * first_position + num_tokens * (num_tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class StepPrices:
    """What each part of a step's shape costs, seconds.

    The defaults are what is believed before any step has run: a small model on a few processor cores. They
    are nearly without weight; the first request, which runs alone, replaces them.
    """

    step: float = 8e-3
    prefill_token: float = 3e-4
    decode_token: float = 3e-4
    context_token: float = 4e-7
    attended_pair: float = 1e-7

    def __post_init__(self) -> None:
        if not all(math.isfinite(price) and price >= 0 for price in self.as_tuple()):
            raise ValueError(f"prices must be finite and not negative, got {self}")

    def as_tuple(self) -> tuple[float, float, float, float, float]:
        """In the order of `StepShape`, the step itself first."""
        return self.step, self.prefill_token, self.decode_token, self.context_token, self.attended_pair


class StepCostModel:
    """Learns what steps cost, and says what one would cost. Some microseconds a call, whatever has been seen.

    Two things are learned at two paces: the prices, over hundreds of steps; and by how much everything is
    slower or faster just now (another program on the same cores), over ten. The first step sets the scale of
    all prices, so that of the prior no more than their proportions matters.

    Args:
        prior: what is believed before the first step.
    """

    def __init__(self, prior: StepPrices | None = None) -> None:
        self._prices = [max(price, 1e-12) for price in (prior or StepPrices()).as_tuple()]
        self._pace = 1.0
        self._spread = 0.1
        self._streak = 0
        self._num_observed = 0
        self._set_prior(1.0)

    @property
    def num_observed(self) -> int:
        """Steps that it has learned from."""
        return self._num_observed

    @property
    def prices(self) -> StepPrices:
        """What the parts cost at the present pace."""
        return StepPrices(*(price * self._pace for price in self._prices))

    def predict(self, shape: StepShape) -> float:
        """What a step of this shape is expected to take, seconds."""
        return self._pace * self._at_usual_pace(shape)

    def seconds_of_decodes(self, num_tokens: int, num_context_tokens: int) -> float:
        """What a step without prompts is expected to take, seconds.

        Args:
            num_tokens: that it computes, drafts included.
            num_context_tokens: KV tokens that it reads.
        """
        return self.predict(StepShape(num_decode_tokens=num_tokens, num_context_tokens=num_context_tokens))

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from a step that has run. One that is said to have taken no time teaches nothing."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        expected_s = self._at_usual_pace(shape)
        if self._num_observed == 0:
            self._set_prior(seconds / expected_s)
            expected_s = seconds
        ratio = seconds / expected_s
        if self._num_observed >= _NUM_FIRST_STEPS:
            ratio = self._pace * math.exp(self._bounded(math.log(ratio / self._pace)))
        self._num_observed += 1
        self._learn(shape, expected_s * ratio)

    def _at_usual_pace(self, shape: StepShape) -> float:
        step, prefill, decode, context, pair = self._prices
        return max(
            _LEAST_S,
            step
            + prefill * shape.num_prefill_tokens
            + decode * shape.num_decode_tokens
            + context * shape.num_context_tokens
            + pair * shape.num_attended_pairs,
        )

    def _set_prior(self, scale: float) -> None:
        self._prices = [price * scale for price in self._prices]
        weights = [_PRIOR_WEIGHT / (price * price) for price in self._prices]
        self._normal = [
            [weights[i] if i == j else 0.0 for j in range(_NUM_PRICES)] for i in range(_NUM_PRICES)
        ]
        self._right = [weight * price for weight, price in zip(weights, self._prices, strict=True)]
        self._peaks = [0.0] * _NUM_PRICES

    def _bounded(self, error: float) -> float:
        """What of an error, a logarithm, is believed; the pace and the usual error follow it."""
        bound = _OUTLIER * self._spread
        bounded = max(-bound, min(bound, error))
        if bounded == error:
            self._streak = 0
        else:
            side = 1 if error > 0 else -1
            self._streak = self._streak + side if self._streak * side >= 0 else side
            if abs(self._streak) >= _MAX_STREAK:
                bounded = error
        # 1.25 mean absolute errors of a normal distribution are its standard deviation.
        self._spread += _SPREAD_GAIN * (1.25 * min(bound, abs(error)) - self._spread)
        self._spread = max(_LEAST_SPREAD, self._spread)
        self._pace *= math.exp(_PACE_GAIN * bounded)
        return bounded

    def _learn(self, shape: StepShape, seconds: float) -> None:
        # Divided by the step's own time, so that errors count in relation to it.
        amounts = (
            1.0 / seconds,
            shape.num_prefill_tokens / seconds,
            shape.num_decode_tokens / seconds,
            shape.num_context_tokens / seconds,
            shape.num_attended_pairs / seconds,
        )
        prices, right, peaks = self._prices, self._right, self._peaks
        for i, (row, amount) in enumerate(zip(self._normal, amounts, strict=True)):
            for j in range(_NUM_PRICES):
                row[j] = _FORGET * row[j] + amount * amounts[j]
            right[i] = _FORGET * right[i] + amount
            peaks[i] = max(_PEAK_FADES * peaks[i], row[i])
            missing = _KEPT * peaks[i] - row[i]
            if missing > 0:
                row[i] += missing
                right[i] += missing * prices[i]
        for _ in range(_SWEEPS):
            for i, row in enumerate(self._normal):
                a, b, c, d, e = row
                step, prefill, decode, context, pair = prices
                gap = right[i] - (a * step + b * prefill + c * decode + d * context + e * pair)
                prices[i] = max(0.0, prices[i] + gap / row[i])
