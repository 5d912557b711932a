"""From logits to token ids, for all rows of a step at once; no row's result depends on another row.

Letters: R rows, D drawn (not greedy) rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.engine.sampling.draws import Purpose, uniform
from headrace.engine.sampling.params import SamplingParams

_FEW = 512
"""So many likeliest tokens nearly always hold the mass that top-p asks for."""
_RUN = 256
"""Tokens whose weights are added up before the totals are: two short searches instead of one long one."""
_BELOW_ONE = 1.0 - 2.0**-53


@dataclass(frozen=True, slots=True)
class SampledRow:
    """How one row's token is chosen.

    Args:
        index: which of the request's sequences it is.
        position: of the token that is chosen.
    """

    params: SamplingParams
    index: int
    position: int


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What came of it.

    Args:
        token_ids: (R,), int64; without meaning where a row is not healthy.
        is_healthy: (R,), bool: whether the row's logits hold no NaN, no +inf, and not -inf alone.
    """

    token_ids: Tensor
    is_healthy: Tensor


def sample(logits: Tensor, rows: Sequence[SampledRow]) -> SampledTokens:
    """Choose one token per row.

    Greedy rows take the highest logit, the lowest id at ties. The others draw from what is left after
    temperature, top-k, top-p (Holtzman et al., 2020) and min-p (Nguyen et al., 2024), in this order; each
    works on what the one before it left. Among equally likely tokens at a border the lowest ids stay.

    Args:
        logits: (R, V), fp32; not changed.
        rows: R of them.
    """
    highest, token_ids = logits.max(dim=-1)
    drawn = [i for i, row in enumerate(rows) if not row.params.is_greedy]
    if drawn:
        which = torch.tensor(drawn, device=logits.device)
        token_ids[which] = _draw(logits[which], highest[which], [rows[i] for i in drawn])
    return SampledTokens(token_ids, torch.isfinite(highest))


def token_weights(logits: Tensor, highest: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Probabilities up to a factor per row; 0 for what the controls remove, 1 for the likeliest token.

    Args:
        logits: (D, V), fp32.
        highest: (D,): the highest of each row.
        params: D of them, none greedy.

    Returns:
        (D, V), fp32.
    """
    device = logits.device
    temperatures = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device)
    # The highest is taken off before the division, so that a low temperature can't overflow.
    scaled = (logits - highest[:, None]).div_(temperatures[:, None])
    weights = scaled.exp()
    cut = [i for i, p in enumerate(params) if 0 < p.top_k < logits.shape[1] or p.top_p < 1.0]
    if cut:
        which = torch.tensor(cut, device=device)
        removed = ~_likeliest(scaled[which], weights[which], [params[i] for i in cut])
        weights[which] = weights[which].masked_fill_(removed, 0.0)
    if any(p.min_p > 0.0 for p in params):
        # The likeliest token's weight is exactly 1, and the controls before this one never remove it.
        least = torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device)
        weights.masked_fill_(weights < least[:, None], 0.0)
    return weights


def _draw(logits: Tensor, highest: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """(D,): a token per row, where the row's own uniform number falls in its cumulated weights."""
    weights = token_weights(logits, highest, [row.params for row in rows])
    numbers = [uniform(row.params.seed, row.index, row.position, Purpose.SAMPLE) for row in rows]
    runs = _runs(weights)
    ends = runs.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    marks = torch.tensor(numbers, dtype=torch.float64, device=logits.device)[:, None] * ends[:, -1:]
    run = _first_end_past(ends, marks)
    marks = marks - torch.where(run > 0, ends.gather(1, (run - 1).clamp(min=0)), 0.0)
    chosen = runs.gather(1, run[:, :, None].expand(-1, -1, _RUN)).squeeze(1)
    ends = chosen.cumsum(dim=-1, dtype=torch.float64)
    # The run's own total may differ from its share above in the last bit: the mark stays inside.
    marks = torch.minimum(marks, ends[:, -1:] * _BELOW_ONE)
    return (run * _RUN + _first_end_past(ends, marks)).squeeze(1)


def _runs(weights: Tensor) -> Tensor:
    """(D, runs, `_RUN`): the vocabulary cut into runs, the last one filled up with weight 0."""
    return F.pad(weights, (0, -weights.shape[1] % _RUN)).reshape(weights.shape[0], -1, _RUN)


def _first_end_past(ends: Tensor, marks: Tensor) -> Tensor:
    """(D, 1): the first item that ends past the mark.

    Never one of weight 0, for it ends where the one before it does; the last one in a row of NaN.
    """
    return torch.searchsorted(ends, marks, right=True).clamp_(max=ends.shape[1] - 1)


def _likeliest(scaled: Tensor, weights: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """(D, V), bool: what top-k and top-p keep. The vocabulary is sorted only as far as it must be."""
    vocab_size = scaled.shape[1]
    top_ks = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    width = min(vocab_size, max(_FEW, *(k for k in top_ks if k < vocab_size), 0))
    totals = _runs(weights).sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)[:, -1]
    counts, lowest, is_enough = _cut_points(scaled, totals, top_ks, params, width)
    if not bool(is_enough.all()):
        more = torch.nonzero(~is_enough).squeeze(1)
        chosen = more.tolist()
        counts[more], lowest[more], _ = _cut_points(
            scaled[more], totals[more], [top_ks[i] for i in chosen], [params[i] for i in chosen], vocab_size
        )
    above = scaled > lowest[:, None]
    level = scaled == lowest[:, None]
    num_level = counts - above.sum(dim=-1)
    if bool((level.sum(dim=-1) > num_level).any()):
        level &= level.cumsum(dim=-1) <= num_level[:, None]
    return above | level


def _cut_points(
    scaled: Tensor, totals: Tensor, top_ks: Sequence[int], params: Sequence[SamplingParams], width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """How many of the likeliest tokens stay, and the scaled logit of the last of them.

    Args:
        totals: (D,), fp64: sum of each row's weights.
        width: how many of the likeliest tokens are looked at.

    Returns:
        Three of (D,): the number, the scaled logit, and whether `width` was enough to know them.
    """
    ordered = scaled.topk(width, dim=-1).values
    cumulated = ordered.exp().cumsum(dim=-1, dtype=torch.float64)
    limits = torch.tensor(top_ks, device=scaled.device)
    masses = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=scaled.device)
    within = cumulated.gather(1, limits.clamp(max=width)[:, None] - 1).squeeze(1)
    wanted = masses * torch.where(limits <= width, within, totals)
    # A token stays while those before it do not reach the wanted mass; top_p = 1 keeps all.
    reached = (cumulated < wanted[:, None]).sum(dim=-1) + 1
    counts = torch.minimum(torch.where(masses < 1.0, reached, limits), limits)
    is_enough = counts <= width
    counts = counts.clamp(max=width)
    return counts, ordered.gather(1, counts[:, None] - 1).squeeze(1), is_enough
