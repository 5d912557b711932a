"""From logits to the weights that tokens are drawn by: temperature, then what leaves unlikely tokens out.

Letters: D drawn (not greedy) rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.sums import totals

_FEW, _MANY = 64, 1024
"""So many of the preferred tokens are looked at first, and next; only then the whole vocabulary is sorted."""


def token_weights(logits: Tensor, highest: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Probabilities up to a factor per row; 0 for what the controls remove.

    Temperature, top-k, top-p (Holtzman et al., 2020), typical-p (Meister et al., 2023) and min-p (Nguyen et
    al., 2024), in this order; each works on what the one before it left. Among equals at a border the lowest
    ids stay.

    Args:
        logits: (D, V), fp32; not changed.
        highest: (D,): the highest of each row.
        params: D of them, none greedy.

    Returns:
        (D, V), fp32.
    """
    device, vocab_size = logits.device, logits.shape[1]
    temperatures = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device)
    # The highest is taken off before the division, so that a low temperature can't overflow.
    scaled = (logits - highest[:, None]).div_(temperatures[:, None])
    weights = scaled.exp()
    cut = [i for i, p in enumerate(params) if 0 < p.top_k < vocab_size or p.top_p < 1.0]
    if cut:
        which = torch.tensor(cut, device=device)
        top_ks = [params[i].top_k if 0 < params[i].top_k < vocab_size else vocab_size for i in cut]
        kept = _preferred(scaled[which], weights[which], top_ks, [params[i].top_p for i in cut])
        weights[which] = weights[which].masked_fill_(~kept, 0.0)
    cut = [i for i, p in enumerate(params) if p.typical_p < 1.0]
    if cut:
        which = torch.tensor(cut, device=device)
        kept = _typical(scaled[which], weights[which], [params[i].typical_p for i in cut])
        weights[which] = weights[which].masked_fill_(~kept, 0.0)
    if any(p.min_p > 0.0 for p in params):
        # Typical-p alone may have removed the likeliest token; else its weight is exactly 1.
        likeliest = weights.amax(dim=-1) if cut else 1.0
        least = likeliest * torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device)
        weights.masked_fill_(weights < least[:, None], 0.0)
    return weights


def _typical(scaled: Tensor, weights: Tensor, masses: Sequence[float]) -> Tensor:
    """(D, V), bool: what typical-p keeps.

    A token's information is log(total) - scaled, the expected one its mean: the logarithm falls out of their
    difference.
    """
    scaled, wide = scaled.double(), weights.double()
    is_left = wide > 0.0
    mean = totals(torch.where(is_left, wide * scaled, 0.0)) / totals(wide)
    scores = (scaled - mean[:, None]).abs_().neg_().masked_fill_(~is_left, -math.inf)
    return _preferred(scores, weights, [scaled.shape[1]] * len(masses), masses)


def _preferred(scores: Tensor, weights: Tensor, max_counts: Sequence[int], masses: Sequence[float]) -> Tensor:
    """The fewest tokens of highest score that hold a share of the mass.

    Args:
        scores: (D, V): which tokens come first.
        weights: (D, V), fp32.
        max_counts: D of them: no more tokens than these are kept or counted in the mass.
        masses: D of them: the share, in (0, 1]; 1 keeps all.

    Returns:
        (D, V), bool.
    """
    limits = torch.tensor(max_counts, device=scores.device)
    shares = torch.tensor(masses, dtype=torch.float64, device=scores.device)
    vocab_size = scores.shape[1]
    widths = [width for width in (_FEW, _MANY) if width < vocab_size] + [vocab_size]
    counts, lowest = _cut_points(scores, weights, limits, shares, widths)
    above = scores > lowest[:, None]
    level = scores == lowest[:, None]
    num_level = counts - above.sum(dim=-1)
    if bool((level.sum(dim=-1) > num_level).any()):
        level &= level.cumsum(dim=-1) <= num_level[:, None]
    return above | level


def _cut_points(
    scores: Tensor, weights: Tensor, limits: Tensor, shares: Tensor, widths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """How many of the first tokens stay, and the score of the last of them.

    Args:
        limits, shares: (D,): see `_preferred`.
        widths: how many of the first tokens are looked at; where that tells nothing, how many next.

    Returns:
        Two of (D,).
    """
    width, vocab_size = widths[0], scores.shape[1]
    ordered, token_ids = scores.topk(width, dim=-1)
    cumulated = weights.gather(1, token_ids).cumsum(dim=-1, dtype=torch.float64)
    within = cumulated.gather(1, limits.clamp(max=width)[:, None] - 1).squeeze(1)
    is_whole = limits <= width
    wanted = shares * torch.where(is_whole, within, totals(weights))
    # A token stays while those before it do not reach the wanted mass; a share of 1 keeps all.
    reached = (cumulated < wanted[:, None]).sum(dim=-1) + 1
    counts = torch.minimum(torch.where(shares < 1.0, reached, limits), limits)
    is_enough = (is_whole | (limits == vocab_size)) & (counts <= width)
    counts = counts.clamp(max=width)
    lowest = ordered.gather(1, counts[:, None] - 1).squeeze(1)
    if len(widths) > 1 and not bool(is_enough.all()):
        more = torch.nonzero(~is_enough).squeeze(1)
        counts[more], lowest[more] = _cut_points(
            scores[more], weights[more], limits[more], shares[more], widths[1:]
        )
    return counts, lowest
