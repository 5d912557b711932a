"""Judges drafts so that what is kept, and what replaces the rest, is distributed as the target's own draws.

Rejection sampling by Leviathan et al., "Fast inference from transformers via speculative decoding"
(ICML '23), and Chen et al., "Accelerating large language model decoding with speculative sampling" (2023): a
draft x is kept with probability min(1, target(x) / draft(x)). The first one that is refused is replaced by a
draw from the positive part of target - draft; behind drafts that are all kept comes a draw from the target.

Both distributions are those after all sampling controls: the very ones that target and draft draw from.
Letters: N drafts, V vocabulary, C tokens that the draft model knows: V, unless it has a reduced head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.engine.sampling.draws import Purpose
from headrace.engine.sampling.reductions import totals
from headrace.engine.sampling.row import SampledRow
from headrace.engine.sampling.sampler import draw, uniforms
from headrace.engine.transfer import is_at_hand, on_device


def judge(
    target_weights: Tensor,
    draft_weights: Tensor,
    draft_token_ids: Tensor,
    rows: Sequence[SampledRow],
    vocabulary: Tensor | None = None,
) -> Tensor:
    """The token that stands in each draft's place: the draft itself where it is kept, never where it is not.

    Every draft is judged as if the ones before it had been kept; of a run of drafts, what lies behind the
    first refused one is to be ignored.

    Args:
        target_weights: (N, V): the target's probabilities at each draft's place, up to a factor per row.
        draft_weights: (N, C): those that the drafts were drawn by, up to a factor per row.
        draft_token_ids: (N,), int64.
        rows: N of them: the seeds and positions of the draws.
        vocabulary: (C,), int64, ascending: what tokens the draft model knows, each draft among them; it gives
            no other one any chance. None: all.

    Returns:
        (N,), int64.
    """
    target_probs, draft_probs = normalised(target_weights), normalised(draft_weights)
    place = draft_token_ids[:, None]
    target_chance = target_probs.gather(1, place).squeeze(1)
    known_place = place if vocabulary is None else torch.searchsorted(vocabulary, place)
    draft_chance = draft_probs.gather(1, known_place).squeeze(1)
    marks = on_device(uniforms(rows, Purpose.ACCEPT), place.device, torch.float64)
    # target / draft > mark without the division: a draft that could not have been drawn is refused, not NaN.
    is_kept = marks * draft_chance < target_chance
    if is_at_hand(is_kept) and bool(is_kept.all()):
        return draft_token_ids
    left = residual(target_probs, draft_probs, vocabulary)
    return torch.where(is_kept, draft_token_ids, draw(left, uniforms(rows, Purpose.RECOVER)))


def normalised(weights: Tensor) -> Tensor:
    """(N, V), fp64: probabilities."""
    return weights.double() / totals(weights)[:, None]


def residual(target_probs: Tensor, draft_probs: Tensor, vocabulary: Tensor | None = None) -> Tensor:
    """(N, V), fp64: what a refused draft's place is drawn by: the positive part of target - draft.

    Where nothing is left of it, the two are equal and a draft is refused by rounding alone: then the target.
    """
    if vocabulary is None:
        left = (target_probs - draft_probs).clamp_(min=0.0)
    else:
        left = target_probs.clone()
        left[:, vocabulary] = (target_probs[:, vocabulary] - draft_probs).clamp_(min=0.0)
    return torch.where(left.amax(dim=-1, keepdim=True) > 0.0, left, target_probs)
