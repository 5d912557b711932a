"""From logits to token ids, for all rows of a step at once; no row's result depends on another row.

Nothing here, nor in what is called from here, looks at a number that a GPU has to compute first.
Letters: R rows, D drawn (not greedy) rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.engine.sampling.adjustments import adjust
from headrace.engine.sampling.draws import Purpose, uniform
from headrace.engine.sampling.reductions import RUN, cumulated_runs, highest, runs, take_run
from headrace.engine.sampling.row import SampledRow
from headrace.engine.sampling.truncation import token_weights
from headrace.engine.transfer import on_device

Adjusting = Callable[[Tensor, Sequence[SampledRow]], None]
"""See `headrace.engine.sampling.adjustments.adjust`."""
_BELOW_ONE = 1.0 - 2.0**-53


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What came of it.

    Args:
        token_ids: (R,), int64; without meaning where a row is not healthy or has no choice.
        is_healthy: (R,), bool: whether the row's logits hold no NaN, no +inf, and not -inf alone.
        has_choice: (R,), bool: whether any token is left after the request's own masks.
    """

    token_ids: Tensor
    is_healthy: Tensor
    has_choice: Tensor


@dataclass(frozen=True, slots=True)
class Distributions:
    """What a step's tokens are drawn from, after all controls.

    Args:
        likeliest: (R,), int64: the highest logit of each row, the lowest id at ties.
        is_healthy, has_choice: see `SampledTokens`.
        drawn: the D rows, ascending, that are not greedy.
        weights: (D, V), fp32: their probabilities up to a factor per row; None without any.
    """

    likeliest: Tensor
    is_healthy: Tensor
    has_choice: Tensor
    drawn: tuple[int, ...]
    weights: Tensor | None


def distributions(logits: Tensor, rows: Sequence[SampledRow], adjusting: Adjusting = adjust) -> Distributions:
    """Apply each row's controls, by the order of operations that `SamplingParams` gives.

    Args:
        logits: (R, V), fp32; not changed.
        rows: R of them.
        adjusting: changes the logits of the rows that want it, in place.
    """
    peaks, token_ids = highest(logits)
    is_healthy = has_choice = torch.isfinite(peaks)
    adjusted = [i for i, row in enumerate(rows) if row.is_adjusted]
    if adjusted:
        # A copy: whoever tells logprobs reads the model's own logits.
        which = on_device(adjusted, logits.device)
        changed = logits.index_select(0, which)
        adjusting(changed, [rows[i] for i in adjusted])
        peaks[which], token_ids[which] = highest(changed)
        has_choice = torch.isfinite(peaks)
        logits = changed if len(adjusted) == len(rows) else logits.index_copy(0, which, changed)
    drawn = tuple(i for i, row in enumerate(rows) if not row.params.is_greedy)
    weights = None
    if drawn:
        which = on_device(drawn, logits.device)
        some, highs = (logits, peaks) if len(drawn) == len(rows) else (logits[which], peaks[which])
        weights = token_weights(some, highs, [rows[i].params for i in drawn])
    return Distributions(token_ids, is_healthy, has_choice, drawn, weights)


def sample(logits: Tensor, rows: Sequence[SampledRow]) -> SampledTokens:
    """Choose one token per row.

    Greedy rows take the highest logit after masks, penalties and bias, the lowest id at ties. The others
    draw from what all controls leave.

    Args:
        logits: (R, V), fp32; not changed.
        rows: R of them.
    """
    return choose(distributions(logits, rows), rows)


def choose(given: Distributions, rows: Sequence[SampledRow]) -> SampledTokens:
    """Choose one token per row, each by its own uniform number.

    Args:
        rows: those that the distributions were made for.
    """
    token_ids = given.likeliest
    if given.weights is not None:
        numbers = uniforms([rows[i] for i in given.drawn])
        token_ids = token_ids.clone()
        token_ids[on_device(given.drawn, token_ids.device)] = draw(given.weights, numbers)
    return SampledTokens(token_ids, given.is_healthy, given.has_choice)


def uniforms(rows: Sequence[SampledRow], purpose: Purpose | None = None) -> list[float]:
    """Each row's own number in [0, 1).

    Args:
        purpose: what the numbers are for; None leaves it to each row.
    """
    return [uniform(row.params.seed, row.index, row.position, purpose or row.purpose) for row in rows]


def draw(weights: Tensor, numbers: Sequence[float]) -> Tensor:
    """(D,), int64: a token per row, where the row's uniform number falls in its cumulated weights.

    Args:
        weights: (D, V), fp32, none negative.
        numbers: D of them, in [0, 1).
    """
    # Two short searches instead of one long one: first for the run, then in it.
    ends = cumulated_runs(weights)
    marks = on_device(numbers, weights.device, torch.float64)[:, None] * ends[:, -1:]
    run = _first_end_past(ends, marks)
    marks = marks - torch.where(run > 0, ends.gather(1, (run - 1).clamp(min=0)), 0.0)
    ends = take_run(runs(weights), run).cumsum(dim=-1, dtype=torch.float64)
    # The run's own total may differ from its share above in the last bit: the mark stays inside.
    marks = torch.minimum(marks, ends[:, -1:] * _BELOW_ONE)
    # A row of NaN finds the end of the last run, which may lie past the vocabulary.
    return (run * RUN + _first_end_past(ends, marks)).squeeze(1).clamp_(max=weights.shape[1] - 1)


def _first_end_past(ends: Tensor, marks: Tensor) -> Tensor:
    """(D, 1): the first item that ends past the mark.

    Never one of weight 0, for it ends where the one before it does; the last one in a row of NaN.
    """
    return torch.searchsorted(ends, marks, right=True).clamp_(max=ends.shape[1] - 1)
