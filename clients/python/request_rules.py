"""Which values a request's controls may have, for a command to say so before anything is asked.

They are the bounds that every server keeps to; a test compares them with the server's own. What a server can
set otherwise (how long a request may take, how many tokens a draft proposes) or a model decides (which token
ids there are) is for them to judge.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from headrace.clients.errors import FieldViolation, InvalidArgument
from headrace.clients.prompts import PATHS, RequestOptions, start_message

MAX_SEQUENCES = 128
MAX_BIAS = 100.0
_MOST_BYTES = 2**31 - 1


@dataclass(frozen=True, slots=True)
class _Range:
    """Finite numbers. `low` is one of them unless `is_above`."""

    wanted: str
    low: float
    high: float = math.inf
    is_above: bool = False

    def holds(self, value: float) -> bool:
        is_within = math.isfinite(value) and self.low <= value <= self.high
        return is_within and not (self.is_above and value == self.low)


_PENALTY = _Range("from -2 to 2", -2, 2)
_PROBABILITY = _Range("above 0 and at most 1", 0, 1, is_above=True)
_NUM_LOGPROBS = _Range("from 0 to 64", 0, 64)
_RANGES = {
    "temperature": _Range("a finite number from 0 to 100", 0, 100),
    "top_k": _Range("0 (off) or a positive number", 0),
    "top_p": _PROBABILITY,
    "min_p": _Range("from 0 to 1", 0, 1),
    "typical_p": _PROBABILITY,
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "repetition_penalty": _Range("above 0 and at most 10", 0, 10, is_above=True),
    "seed": _Range("from 0 to 2**64 - 1", 0, 2**64 - 1),
    "logprobs": _NUM_LOGPROBS,
    "prompt_logprobs": _NUM_LOGPROBS,
    "priority": _Range("from -100 to 100", -100, 100),
    "n": _Range(f"from 1 to {MAX_SEQUENCES}", 1, MAX_SEQUENCES),
    "min_tokens": _Range("0 or a positive number", 0),
    "time_limit_s": _Range("above 0", 0, is_above=True),
    "num_speculative_tokens": _Range("0 or a positive number", 0),
}


def check_options(options: RequestOptions) -> None:
    """Check what can be checked without a server.

    Raises:
        InvalidArgument: naming every field that no server would take as it is.
    """
    found = [
        FieldViolation(PATHS.get(option, f"sampling.{option}").removesuffix(".ids"), description)
        for option, description in (*_single(options), *_listed(options), *_together(options))
    ]
    if found:
        told = "; ".join(f"{violation.field}: {violation.description}" for violation in found)
        raise InvalidArgument(told, violations=tuple(found))
    # What doesn't fit the protocol's types.
    start_message("", options, _MOST_BYTES)


def _single(options: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for option, allowed in _RANGES.items():
        value = options.get(option)
        if isinstance(value, int | float) and not allowed.holds(value):
            yield option, f"must be {allowed.wanted}, got {value}"


def _listed(options: RequestOptions) -> Iterator[tuple[str, str]]:
    biases = options.get("logit_bias", {})
    for option, ids, most in (
        ("stop_token_ids", options.get("stop_token_ids", ()), 256),
        ("allowed_token_ids", options.get("allowed_token_ids", ()), 16_384),
        ("banned_token_ids", options.get("banned_token_ids", ()), 16_384),
        ("logit_bias", tuple(biases), 1024),
    ):
        if len(ids) > most:
            yield option, f"must hold at most {most} ids, got {len(ids)}"
        elif ids and min(ids) < 0:
            yield option, f"a token id must be 0 or a positive number, got {min(ids)}"
    for token_id, bias in biases.items():
        if not (math.isfinite(bias) and abs(bias) <= MAX_BIAS):
            yield "logit_bias", f"must be from -100 to 100, got {bias} for token {token_id}"
    for option, texts, most, most_bytes in (
        ("stop", options.get("stop", ()), 32, 1024),
        ("bad_words", options.get("bad_words", ()), 128, 256),
    ):
        if len(texts) > most:
            yield option, f"must hold at most {most} texts, got {len(texts)}"
        elif not all(1 <= len(text.encode(errors="surrogatepass")) <= most_bytes for text in texts):
            yield option, f"each must be 1 to {most_bytes} bytes of UTF-8"


def _together(options: RequestOptions) -> Iterator[tuple[str, str]]:
    """What is wrong with some beside others."""
    n = options.get("n", 1)
    best_of = options.get("best_of", n)
    if 1 <= n <= MAX_SEQUENCES and not n <= best_of <= MAX_SEQUENCES:
        yield "best_of", f"must be from n={n} to {MAX_SEQUENCES}, got {best_of}"
    num_min = options.get("min_tokens", 0)
    num_max = options.get("max_tokens", max(1, num_min))
    if num_max < 0 or (num_max == 0 and "prompt_logprobs" not in options):
        advice = "leave it out for as many as fit, or ask for prompt_logprobs too"
        yield "max_tokens", f"must be at least 1, got {num_max}: {advice}"
    elif num_min > num_max:
        yield "min_tokens", f"must be at most max_tokens={num_max}, got {num_min}"
    num_proposed = options.get("num_speculative_tokens")
    if options.get("speculation") is False and num_proposed:
        reason = "must be 0 or left out where speculation is not enabled"
        yield "num_speculative_tokens", f"{reason}, got {num_proposed}"
