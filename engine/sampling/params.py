"""What a request may say about how its tokens are drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.engine.errors import FieldViolation, InvalidRequest

MAX_TEMPERATURE = 100.0
GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would overflow float32 logits."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling controls of one request, checked.

    Order of operations: temperature, top-k, top-p, min-p.

    Args:
        temperature: 0 (or below 1e-5) is greedy: the highest logit, the lowest id at ties. At most 100.
        top_k: keep the k likeliest tokens; 0 is off, more than the vocabulary is the vocabulary.
        top_p: keep the smallest set of likeliest tokens whose probability reaches it, in (0, 1].
        min_p: drop tokens less likely than this times the likeliest, in [0, 1].
        seed: draws are a function of (seed, sequence index, position, purpose) and of nothing else,
            so batch, preemption and speculation can't change them. 0 to 2**64 - 1.

    Raises:
        InvalidRequest: naming every field that is out of range or not a number.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        violations = [
            FieldViolation(f"sampling.{name}", f"must be {wanted}, got {value!r}")
            for name, value, is_valid, wanted in (
                (
                    "temperature",
                    self.temperature,
                    math.isfinite(self.temperature) and 0.0 <= self.temperature <= MAX_TEMPERATURE,
                    "a finite number from 0 to 100",
                ),
                ("top_k", self.top_k, self.top_k >= 0, "0 (off) or a positive number"),
                (
                    "top_p",
                    self.top_p,
                    math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0,
                    "above 0 and at most 1",
                ),
                (
                    "min_p",
                    self.min_p,
                    math.isfinite(self.min_p) and 0.0 <= self.min_p <= 1.0,
                    "from 0 to 1",
                ),
                ("seed", self.seed, 0 <= self.seed < 2**64, "from 0 to 2**64 - 1"),
            )
            if not is_valid
        ]
        if violations:
            raise InvalidRequest(*violations)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken without a draw."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1
