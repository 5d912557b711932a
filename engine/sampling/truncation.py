"""From logits to the weights that tokens are drawn by: temperature, then what leaves unlikely tokens out.

Letters: D drawn (not greedy) rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.reductions import at_least, numbered, totals
from headrace.engine.transfer import is_at_hand, on_device

_WIDTHS = (64, 512, 8192)
"""So many of the preferred tokens are looked at first, and next; only then is the whole vocabulary sorted."""
_ABSENT = -1e4
"""In place of the scaled logit of an impossible token: its exponential is 0 too, and 0 times it is 0."""
_FAR = 1e9
"""More than any distance between scaled logits of possible tokens."""


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
    temperatures = on_device([p.temperature for p in params], device, torch.float32)
    # The highest is taken off before the division, so that a low temperature can't overflow.
    scaled = (logits - highest[:, None]).div_(temperatures[:, None])
    # Not exp: that takes ten times as long where results are nearly 0, and exp2's depend on the batch.
    weights = torch.softmax(scaled, dim=-1)
    rows = [i for i, p in enumerate(params) if 0 < p.top_k < vocab_size or p.top_p < 1.0]
    if rows:
        top_ks = [min(params[i].top_k or vocab_size, vocab_size) for i in rows]
        cut = partial(_keep_first, max_counts=top_ks, shares=[params[i].top_p for i in rows])
        _apply(cut, rows, scaled, weights)
    rows = [i for i, p in enumerate(params) if p.typical_p < 1.0]
    if rows:
        _apply(partial(_keep_typical, shares=[params[i].typical_p for i in rows]), rows, scaled, weights)
    if any(p.min_p > 0.0 for p in params):
        least = on_device([p.min_p for p in params], device, torch.float32)
        weights.mul_(at_least(weights, least * weights.amax(dim=-1)))
    return weights


def _apply(
    cut: Callable[[Tensor, Tensor], None], rows: Sequence[int], scaled: Tensor, weights: Tensor
) -> None:
    """Let `cut` set some of the weights of some rows to 0."""
    if len(rows) == weights.shape[0]:
        cut(scaled, weights)
        return
    which = on_device(rows, weights.device)
    part = weights[which]
    cut(scaled[which], part)
    weights[which] = part


def _keep_typical(scaled: Tensor, weights: Tensor, shares: Sequence[float]) -> None:
    """Typical-p: see `_keep_first`.

    A token's information is log(total) - scaled, the expected one its mean: the logarithm falls out of their
    difference.
    """
    wide = weights.double()
    information = scaled.double().clamp_(min=_ABSENT)
    mean = totals(wide * information) / totals(wide)
    scores = information.sub_(mean[:, None]).abs_().neg_()
    # What an earlier control has removed comes last.
    scores.sub_(torch.eq(wide, 0.0, out=wide), alpha=_FAR)
    _keep_first(scores, weights, [weights.shape[1]] * len(shares), shares)


def _keep_first(scores: Tensor, weights: Tensor, max_counts: Sequence[int], shares: Sequence[float]) -> None:
    """Keep the fewest tokens of highest score that hold a share of the mass; the others' weights become 0.

    Args:
        scores: (D, V): which tokens come first.
        weights: (D, V), fp32; changed in place.
        max_counts: D of them: no more tokens than these are kept or counted in the mass.
        shares: D of them, in (0, 1]; 1 keeps all.
    """
    vocab_size = scores.shape[1]
    limits = on_device(max_counts, scores.device)
    parts = on_device(shares, scores.device, torch.float64)
    # Whether a few tokens tell enough has to be looked at: where that means waiting, all are sorted.
    tried = _WIDTHS if is_at_hand(scores) else ()
    widths = [*(width for width in tried if width < vocab_size), vocab_size]
    lowest, num_level = _cut_points(scores, weights, limits, parts, widths)
    weights.mul_(at_least(scores, lowest))
    is_tied = num_level > 0
    if not is_at_hand(scores):
        is_level = is_tied[:, None] & (scores == lowest[:, None])
        weights.masked_fill_(is_level & (is_level.cumsum(dim=-1) > num_level[:, None]), 0.0)
    elif bool(is_tied.any()):
        which = torch.nonzero(is_tied).squeeze(1)
        rows, token_ids, places = numbered(scores[which] == lowest[which, None])
        is_surplus = places >= num_level[which][rows]
        weights[which[rows[is_surplus]], token_ids[is_surplus]] = 0.0


def _cut_points(
    scores: Tensor, weights: Tensor, limits: Tensor, shares: Tensor, widths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Where to cut.

    Args:
        limits, shares: (D,): see `_keep_first`.
        widths: how many of the first tokens are looked at; where that tells too little, how many next.

    Returns:
        Two of (D,): the score of the last token that stays; and where that is a tie, how many of those with
        this score stay, else 0.
    """
    width, vocab_size = widths[0], scores.shape[1]
    # One more is looked at than may stay: it may be the last one's equal.
    ordered, token_ids = scores.topk(min(width + 1, vocab_size), dim=-1)
    ordered_weights = weights.gather(1, token_ids)
    cumulated = ordered_weights.cumsum(dim=-1, dtype=torch.float64)

    def item(of: Tensor, place: Tensor) -> Tensor:
        return of.gather(1, place.clamp(max=of.shape[1] - 1)[:, None]).squeeze(1)

    is_whole = limits <= width
    wanted = shares * torch.where(is_whole, item(cumulated, limits - 1), totals(weights))
    # A token stays while those before it do not reach the wanted mass; a share of 1 keeps all.
    reached = (cumulated < wanted[:, None]).sum(dim=-1) + 1
    counts = torch.minimum(torch.where(shares < 1.0, reached, limits), limits)
    lowest = item(ordered, counts - 1)
    # Impossible tokens are equals that nobody has to tell apart.
    is_tied = (
        (counts < ordered.shape[1])
        & (item(ordered, counts) == lowest)
        & (item(ordered_weights, counts - 1) > 0)
    )
    num_level = torch.where(is_tied, counts - (ordered > lowest[:, None]).sum(dim=-1), 0)
    is_enough = (is_whole | (limits == vocab_size)) & (counts <= width)
    if len(widths) > 1 and not bool(is_enough.all()):
        more = torch.nonzero(~is_enough).squeeze(1)
        lowest[more], num_level[more] = _cut_points(
            scores[more], weights[more], limits[more], shares[more], widths[1:]
        )
    return lowest, num_level
