"""Draws a step's tokens: one per sampled row, and one in the place of each draft, to be compared with it.

A row's drafts are kept as far as what is drawn in their places is what they say. The target draws there as it
would without drafts, by the same random numbers: so whatever was proposed, by whomever, the text is the one
that comes without speculation. Only what was drawn by a draft model for rejection sampling is judged by that.
Letters: R sampled rows, P places: one behind the known tokens of each row, and one behind each of its drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headrace.engine.errors import IntegrityError
from headrace.engine.native.kit import native_kit
from headrace.engine.sampling.constraint import RowMask
from headrace.engine.sampling.rejection import judge
from headrace.engine.sampling.row import SampledRow
from headrace.engine.sampling.sampler import Distributions, SampledTokens, choose, distributions
from headrace.engine.scheduling.plan import ScheduledSequence
from headrace.engine.transfer import on_device


def masks_of(row: ScheduledSequence) -> Sequence[RowMask | None] | None:
    """What a row's constraint lets be drawn in each of its places; None without a constraint."""
    return None if row.constraint is None else row.constraint.masks_along(row.draft_token_ids)


def greedy_places(logits: Tensor, rows: Sequence[ScheduledSequence]) -> Tensor | None:
    """The token of each place where all rows are greedy and nobody but the model has a say, in one pass: what
    `draw_places` gives. None where that is to be asked.

    Args:
        logits: (P, V), fp32; not changed.
        rows: R of them.

    Returns:
        (P, 3), fp64: see `headrace.engine.runner.results.StepTables`.
    """
    kit = native_kit()
    is_plain = all(
        row.sampling.is_likeliest and row.constraint is None and not row.suppressed_token_ids for row in rows
    )
    if not is_plain or kit is None or not kit.token_ops.takes(logits):
        return None
    return kit.token_ops.greedy(logits)


def draw_places(
    logits: Tensor,
    rows: Sequence[ScheduledSequence],
    masks: Sequence[Sequence[RowMask | None] | None],
    draft_weights: Mapping[int, Tensor],
    draft_vocabulary: Tensor | None = None,
) -> SampledTokens:
    """Draw the token of each place. Behind the first draft of a row that is not kept they have no meaning.

    Args:
        logits: (P, V), fp32; not changed.
        rows: R of them.
        masks: R: see `masks_of`.
        draft_weights: by row, (drafts, C): what drafts that are judged by rejection sampling were drawn by.
        draft_vocabulary: (C,): see `headrace.engine.sampling.rejection.judge`.
    """
    places = [place for row, along in zip(rows, masks, strict=True) for place in places_of(row, along)]
    given = distributions(logits, places)
    sampled = choose(given, places)
    if draft_weights:
        _judge(sampled.token_ids, given, rows, places, draft_weights, vocabulary=draft_vocabulary)
    return sampled


def places_of(row: ScheduledSequence, masks: Sequence[RowMask | None] | None) -> list[SampledRow]:
    """How the token of each of a row's places is chosen: as if the drafts before it were part of the text."""
    return [_place(row, i, None if masks is None else masks[i]) for i in range(row.num_draft_tokens + 1)]


def _place(row: ScheduledSequence, i: int, mask: RowMask | None) -> SampledRow:
    # A text that nothing can follow ends: there is no token left to reach `min_tokens` with.
    must_end = mask is not None and mask.must_end
    known = row.known_token_ids
    return SampledRow(
        row.sampling,
        row.index,
        row.known_end + i,
        row.num_prompt_tokens,
        known + row.draft_token_ids[:i] if i and known else known,
        row.suppressed_token_ids if i < max(1, row.num_suppressed) and not must_end else frozenset(),
        None if mask is None else mask.bits,
    )


def _judge(
    token_ids: Tensor,
    given: Distributions,
    rows: Sequence[ScheduledSequence],
    places: Sequence[SampledRow],
    draft_weights: Mapping[int, Tensor],
    *,
    vocabulary: Tensor | None,
) -> None:
    """Put what rejection sampling says into the places of the drafts that it judges."""
    drawn_at = {place: i for i, place in enumerate(given.drawn)}
    judged: list[int] = []
    drafts: list[int] = []
    first = 0
    for i, row in enumerate(rows):
        if i in draft_weights:
            judged += range(first, first + row.num_draft_tokens)
            drafts += row.draft_token_ids
        first += row.num_draft_tokens + 1
    if given.weights is None:
        raise IntegrityError("drafts were drawn for rows that are greedy")
    device = token_ids.device
    token_ids[on_device(judged, device)] = judge(
        given.weights[on_device([drawn_at[place] for place in judged], device)],
        torch.cat([draft_weights[i] for i in sorted(draft_weights)]),
        on_device(drafts, device),
        [places[place] for place in judged],
        vocabulary,
    )
