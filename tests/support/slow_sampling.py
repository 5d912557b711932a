"""Sampling by its definition, one row at a time, in plain floats: what the real one is held against."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from headrace.engine.sampling.row import SampledRow

Floats = list[float]


def adjusted_logits(logits: Sequence[float], row: SampledRow) -> Floats:
    """After masks, penalties and bias."""
    params = row.params
    known, output = row.known_token_ids, row.known_token_ids[row.num_prompt_tokens :]
    changed = list(logits)
    for token_id in range(len(changed)):
        is_allowed = params.allowed_token_ids is None or token_id in params.allowed_token_ids
        is_banned = token_id in params.banned_token_ids or token_id in row.suppressed_token_ids
        if not is_allowed or is_banned or _completes_a_bad_word(token_id, row):
            changed[token_id] = -math.inf
    for token_id in set(known):
        if changed[token_id] > 0:
            changed[token_id] /= params.repetition_penalty
        else:
            changed[token_id] *= params.repetition_penalty
    for token_id, count in Counter(output).items():
        changed[token_id] -= params.frequency_penalty * count + params.presence_penalty
    for token_id, bias in params.logit_bias:
        changed[token_id] += bias
    return changed


def probabilities(logits: Sequence[float], row: SampledRow) -> Floats:
    """How likely each token is to be drawn; needs at least one that can be."""
    params = row.params
    changed = adjusted_logits(logits, row)
    if params.is_greedy:
        chosen = changed.index(max(changed))
        return [float(i == chosen) for i in range(len(changed))]
    scaled = [x / params.temperature for x in changed]
    likely = _normalised([math.exp(x - max(scaled)) for x in scaled])
    by_likelihood = sorted(range(len(likely)), key=lambda i: (-likely[i], i))
    if params.top_k:
        likely = _only(likely, by_likelihood[: params.top_k])
    likely = _only(likely, _fewest(by_likelihood, likely, params.top_p))
    if params.typical_p < 1.0:
        entropy = -sum(p * math.log(p) for p in likely if p > 0)
        possible = [i for i in range(len(likely)) if likely[i] > 0]
        # Two tokens of equal probability are equally typical, whatever the rounding says.
        by_typicality = sorted(possible, key=lambda i: (round(abs(-math.log(likely[i]) - entropy), 9), i))
        likely = _only(likely, _fewest(by_typicality, likely, params.typical_p))
    return _only(likely, [i for i, p in enumerate(likely) if p >= params.min_p * max(likely)])


def typicality_gap(likely: Floats) -> float:
    """The least difference between the surprise of tokens that are not equally likely: below some 1e-6,
    rounding decides which of them typical-p keeps."""
    entropy = -sum(p * math.log(p) for p in likely if p > 0)
    distances = sorted(abs(-math.log(p) - entropy) for p in {round(p, 12) for p in likely if p > 0})
    return min((b - a for a, b in pairwise(distances)), default=math.inf)


def _completes_a_bad_word(token_id: int, row: SampledRow) -> bool:
    text = (*row.known_token_ids, token_id)
    return any(text[-len(word) :] == word for word in row.params.bad_words)


def _fewest(order: Sequence[int], likely: Floats, share: float) -> list[int]:
    """The beginning of `order` that reaches the share; all of it for a share of 1."""
    kept, mass = [], 0.0
    for token_id in order:
        if mass >= share * (1 - 1e-12) and share < 1.0:
            break
        kept.append(token_id)
        mass += likely[token_id]
    return kept


def _only(likely: Floats, kept: Sequence[int]) -> Floats:
    return _normalised([p if i in set(kept) else 0.0 for i, p in enumerate(likely)])


def _normalised(weights: Floats) -> Floats:
    return [weight / sum(weights) for weight in weights]
