"""Log-probabilities of the model itself: log-softmax of its logits before any control.

On the device they are a table of numbers, one row per token, so that they come to the host with whatever
else a step has to tell.
Letters: R rows, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.engine.outputs import TokenLogprob, TokenLogprobs
from headrace.engine.sampling.reductions import numbered, totals
from headrace.engine.transfer import is_at_hand

_NUM_FIXED = 4


def logprob_table(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """What `read_logprobs` needs, a row per token.

    Args:
        logits: (R, V), fp32: the model's own; not changed.
        token_ids: (R,), int64: the token that stands, or was drawn, at each place.
        num_top: K; more than the vocabulary is the vocabulary.

    Returns:
        (R, 4 + 2 * K), fp64: the token, its logit, its rank, what makes a logit of this row a logprob when
        it is taken off; then the likeliest tokens and their logits.
    """
    log_softmax = torch.log_softmax(logits, dim=-1)
    # What it takes off each logit of the row, told by the one that loses the least.
    log_total = logits.amax(dim=-1).double() - log_softmax.amax(dim=-1)
    chosen = logits.gather(1, token_ids[:, None])
    # Counted in floating point, which a CPU does in a fraction of the time; the sums are exact.
    rank = totals(torch.gt(logits, chosen, out=log_softmax)) + 1
    fixed = torch.stack([column.double() for column in (token_ids, chosen[:, 0], rank, log_total)], dim=1)
    top_ids, top = _likeliest(logits, min(num_top, logits.shape[1]))
    return torch.cat((fixed, top_ids.double(), top.double()), dim=1)


def read_logprobs(table_row: Sequence[float], num_top: int) -> TokenLogprobs | None:
    """A row of a table in words.

    Args:
        table_row: on the host.
        num_top: how many of the likeliest tokens are told, at most as many as the table holds.

    Returns:
        None when the model's logits are not finite.
    """
    token_id, chosen, rank, log_total = table_row[:_NUM_FIXED]
    if not math.isfinite(log_total):
        return None
    width = (len(table_row) - _NUM_FIXED) // 2
    top_ids, top = table_row[_NUM_FIXED : _NUM_FIXED + width], table_row[_NUM_FIXED + width :]
    likeliest: list[TokenLogprob] = []
    level = math.inf
    for logit, top_id in sorted(zip(top, top_ids, strict=True), key=lambda item: (-item[0], item[1])):
        if len(likeliest) == num_top:
            break
        shared = likeliest[-1].rank if logit == level else len(likeliest) + 1
        likeliest.append(TokenLogprob(int(top_id), logit - log_total, shared))
        level = logit
    return TokenLogprobs(TokenLogprob(int(token_id), chosen - log_total, int(rank)), tuple(likeliest))


def _likeliest(logits: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Two of (R, K): ids and logits of the highest logits, the lowest ids among equals at the border."""
    vocab_size = logits.shape[1]
    width = min(num_top + 1, vocab_size) if num_top else 0
    values, token_ids = logits.topk(width, dim=-1)
    if num_top < width:
        is_tied = values[:, num_top - 1] == values[:, num_top]
        if not is_at_hand(logits):
            token_ids = _lowest_everywhere(logits, values, token_ids)
        elif bool(is_tied.any()):
            which = torch.nonzero(is_tied).squeeze(1)
            token_ids[which] = _lowest_at_border(logits[which], values[which], token_ids[which])
    return token_ids[:, :num_top], values[:, :num_top]


def _lowest_everywhere(logits: Tensor, values: Tensor, token_ids: Tensor) -> Tensor:
    """What `_lowest_at_border` does, for rows without a tie there, too, which it leaves as they are."""
    num_top = values.shape[1] - 1
    is_level = logits == values[:, num_top:]
    places = is_level.cumsum(dim=-1) - 1 + (values > values[:, num_top:]).sum(dim=-1, keepdim=True)
    # Whoever has no place among the first goes where the column without meaning is.
    places.masked_fill_(~is_level, num_top).clamp_(max=num_top)
    level_ids = torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
    return token_ids.scatter(1, places, level_ids)


def _lowest_at_border(logits: Tensor, values: Tensor, token_ids: Tensor) -> Tensor:
    """Give the places of the last value but one to the lowest ids that have it.

    Args:
        logits: (R, V).
        values, token_ids: (R, K + 1): the highest of each row; the last two values are equal.

    Returns:
        (R, K + 1): `token_ids`, its last column without meaning.
    """
    num_top = values.shape[1] - 1
    border = values[:, num_top:]
    rows, level_ids, places = numbered(logits == border)
    places += (values > border).sum(dim=-1)[rows]
    is_in = places < num_top
    token_ids[rows[is_in], places[is_in]] = level_ids[is_in]
    return token_ids
