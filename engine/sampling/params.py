"""What a request may say about how its tokens are drawn."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.engine.errors import FieldViolation, InvalidRequest

MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 10.0
MAX_BIAS = 100.0
MAX_LOGPROBS = 64
GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would overflow float32 logits."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling controls of one request, checked.

    Order of operations: allowed and banned tokens and bad words, repetition penalty, frequency and presence
    penalties, bias, temperature, top-k, top-p, typical-p, min-p. Each works on what the one before it left.

    Args:
        temperature: 0 (or below 1e-5) is greedy: the highest logit, the lowest id at ties. At most 100.
        top_k: keep the k likeliest tokens; 0 is off, more than the vocabulary is the vocabulary.
        top_p: keep the smallest set of likeliest tokens whose probability reaches it, in (0, 1].
        min_p: drop tokens less likely than this times the likeliest, in [0, 1].
        seed: draws are a function of (seed, sequence index, position, purpose) and of nothing else,
            so batch, preemption and speculation can't change them. 0 to 2**64 - 1.
        typical_p: keep the smallest set of tokens whose information is nearest to the expected one and whose
            probability reaches it (Meister et al., 2023), in (0, 1].
        frequency_penalty: taken off a token's logit once per time that it stands in the output, -2 to 2.
        presence_penalty: taken off once if it stands in the output at all, -2 to 2.
        repetition_penalty: divides a positive logit, multiplies a negative one, of every token that stands in
            prompt or output (Keskar et al., 2019); above 0, at most 10.
        logit_bias: (token id, what is added to its logit), -100 to 100.
        allowed_token_ids: when given, nothing else is drawn.
        banned_token_ids: never drawn.
        bad_words: runs of token ids that are never completed.
        num_logprobs: tell the chosen token's log-probability and those of so many likeliest; None tells none.
        num_prompt_logprobs: the same for the prompt's tokens.

    Raises:
        InvalidRequest: naming every field that is out of range or not a number.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    typical_p: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: frozenset[int] | None = None
    banned_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    is_likeliest: bool = field(init=False, repr=False, compare=False)
    """Whether the likeliest token is taken, and the model alone says which that is. Known beforehand, for
    it is asked of every row in every step."""

    def __post_init__(self) -> None:
        violations = [*self._range_violations(), *self._token_violations()]
        if violations:
            raise InvalidRequest(*violations)
        object.__setattr__(self, "is_likeliest", self.is_greedy and not self.is_adjusted)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken without a draw."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether a draw depends on which tokens stand in prompt or output."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1

    @property
    def is_adjusted(self) -> bool:
        """Whether anything but the model has a say in the logits, temperature aside."""
        return bool(
            self.banned_token_ids
            or self.bad_words
            or self.logit_bias
            or self.has_penalties
            or self.allowed_token_ids is not None
        )

    @property
    def needs_history(self) -> bool:
        """Whether a draw depends on tokens before the last one, beyond what their KV says."""
        return self.has_penalties or bool(self.bad_words)

    def _range_violations(self) -> Iterator[FieldViolation]:
        def within(value: float, low: float, high: float) -> bool:
            return math.isfinite(value) and low <= value <= high

        for name, is_valid, wanted in (
            ("temperature", within(self.temperature, 0, MAX_TEMPERATURE), "a finite number from 0 to 100"),
            ("top_k", self.top_k >= 0, "0 (off) or a positive number"),
            ("top_p", within(self.top_p, 0, 1) and self.top_p > 0, "above 0 and at most 1"),
            ("min_p", within(self.min_p, 0, 1), "from 0 to 1"),
            ("seed", 0 <= self.seed < 2**64, "from 0 to 2**64 - 1"),
            ("typical_p", within(self.typical_p, 0, 1) and self.typical_p > 0, "above 0 and at most 1"),
            ("frequency_penalty", within(self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY), "from -2 to 2"),
            ("presence_penalty", within(self.presence_penalty, -MAX_PENALTY, MAX_PENALTY), "from -2 to 2"),
            (
                "repetition_penalty",
                within(self.repetition_penalty, 0, MAX_REPETITION_PENALTY) and self.repetition_penalty > 0,
                "above 0 and at most 10",
            ),
        ):
            if not is_valid:
                yield FieldViolation(f"sampling.{name}", f"must be {wanted}, got {getattr(self, name)!r}")

    def _token_violations(self) -> Iterator[FieldViolation]:
        for token_id, bias in self.logit_bias:
            if not (math.isfinite(bias) and abs(bias) <= MAX_BIAS):
                yield FieldViolation(
                    "sampling.logit_bias", f"must be from -100 to 100, got {bias!r} for token {token_id}"
                )
        if self.allowed_token_ids is not None and not self.allowed_token_ids - self.banned_token_ids:
            yield FieldViolation("sampling.allowed_token_ids", "leaves no token that could be drawn")
        if not all(self.bad_words):
            yield FieldViolation("sampling.bad_words", "must not hold an empty text")
        for name, number in (
            ("logprobs", self.num_logprobs),
            ("prompt_logprobs", self.num_prompt_logprobs),
        ):
            if number is not None and not 0 <= number <= MAX_LOGPROBS:
                yield FieldViolation(f"output.{name}", f"must be from 0 to {MAX_LOGPROBS}, got {number}")
