"""A small model that proposes tokens, with KV of its own behind the block ids of the large one.

It holds no state of any sequence: what it computes is a function of the plan and of its KV pool, and what it
writes there is a function of the plan. So a step may be run again. Which of its KV is valid is known where
steps are planned.
Letters: R rows, N drafts of a row, V vocabulary of the target model, C tokens that the draft model proposes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.engine.attention.backend import AttentionBackend
from headrace.engine.batch import BatchBuilder
from headrace.engine.models.forward import ForwardModel
from headrace.engine.sampling.adjustments import adjust
from headrace.engine.sampling.constraint import RowConstraint
from headrace.engine.sampling.draws import Purpose
from headrace.engine.sampling.row import SampledRow
from headrace.engine.sampling.sampler import choose, distributions
from headrace.engine.scheduling.plan import ScheduledSequence, StepPlan
from headrace.engine.transfer import download


@dataclass(frozen=True, slots=True)
class Proposals:
    """A plan with the draft model's tokens in it.

    Args:
        plan: every draft is a token of its row.
        weights: by the place of a row in the plan, (N, C): what its drafts were drawn by, up to a factor per
            draft. Only for rows whose drafts are judged by rejection sampling.
        failed: places of rows that the draft model was given work for and could not do it. Its KV of them is
            not to be trusted.
        vocabulary: (C,), int64, ascending: the tokens that `weights` are of; None: all.
    """

    plan: StepPlan
    weights: dict[int, Tensor] = field(default_factory=dict)
    failed: frozenset[int] = frozenset()
    vocabulary: Tensor | None = None

    @staticmethod
    def none(plan: StepPlan) -> Proposals:
        """Every row goes without drafts, for the draft model has failed."""
        failed = frozenset(place for place, row in enumerate(plan.rows) if row.draft is not None)
        return Proposals(replace(plan, rows=tuple(row._replace(draft=None) for row in plan.rows)), {}, failed)


@dataclass(slots=True)
class _Drafting:
    """A row while it is given drafts."""

    place: int
    row: ScheduledSequence
    num_wanted: int
    token_ids: list[int] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    is_failed: bool = False
    chance: float = 1.0

    def sampled_row(self) -> SampledRow:
        """How its next draft is chosen: by all the controls that the target's token there is chosen by."""
        row, num_made = self.row, len(self.token_ids)
        mask = None
        if row.constraint is not None:
            output = row.constraint.output_token_ids + tuple(self.token_ids)
            mask = RowConstraint(row.constraint.matcher, output, row.constraint.end_token_ids).mask()
        is_early = num_made < row.num_suppressed and not (mask is not None and mask.must_end)
        return SampledRow(
            row.sampling,
            row.index,
            row.known_end + num_made,
            row.num_prompt_tokens,
            row.known_token_ids + tuple(self.token_ids) if row.known_token_ids else (),
            row.suppressed_token_ids if is_early else frozenset(),
            None if mask is None else mask.bits,
            Purpose.SAMPLE if self.is_coupled else Purpose.DRAFT,
        )

    @property
    def least_chance(self) -> float:
        """See `DraftWork`."""
        return 0.0 if self.row.draft is None else self.row.draft.least_chance

    @property
    def is_coupled(self) -> bool:
        """See `DraftWork`."""
        return self.row.draft is None or self.row.draft.is_coupled


class DraftModel:
    """Proposes tokens for the rows of a plan that want some.

    Args:
        model: computes logits.
        attention: over a KV pool of its own, of the same number and size of blocks as the target's.
        block_size: tokens per block.
        vocab_size: V.
        num_common_ids: so many ids, from 0 on, mean the same token to both models; no other is proposed.
        vocabulary: (C,), int64, ascending, all of them common: the tokens that the model gives logits of,
            where it has a reduced head.
    """

    def __init__(
        self,
        model: ForwardModel,
        attention: AttentionBackend,
        *,
        block_size: int,
        vocab_size: int,
        num_common_ids: int,
        vocabulary: Tensor | None = None,
    ) -> None:
        self._model = model
        self._attention = attention
        self._batches = BatchBuilder(block_size, model.device)
        self._vocab_size = vocab_size
        self._num_common_ids = num_common_ids
        self._vocabulary = vocabulary
        self._proposed_ids = None if vocabulary is None else vocabulary.tolist()

    @torch.inference_mode()
    def propose(self, plan: StepPlan) -> Proposals:
        """Catch up where the plan says so, and put drafts where it wants some.

        A row gets fewer than it wants where the draft model's own numbers are not finite, where the request's
        controls leave it nothing to choose, or where the draft model doubts what it has proposed.
        """
        working = [(place, row) for place, row in enumerate(plan.rows) if row.draft is not None]
        rows = [_catching_up(row, self._num_common_ids) for _, row in working]
        drafting = [
            _Drafting(place, row, row.draft.num_drafts)
            for place, row in working
            if row.draft is not None and row.draft.num_drafts > 0
        ]
        going_on = self._step(plan.step, rows, drafting)
        while going_on:
            rows = [_next_row(each, self._num_common_ids) for each in going_on]
            going_on = self._step(plan.step, rows, going_on)
        return replace(_put_in(plan, drafting), vocabulary=self._vocabulary)

    def _step(
        self, step: int, rows: Sequence[ScheduledSequence], drafting: Sequence[_Drafting]
    ) -> list[_Drafting]:
        """Compute `rows`, give each of `drafting` a token; returns those that want another."""
        batch = self._batches.build(StepPlan(step, tuple(rows)))
        attention = self._attention.begin_step(batch.attention)
        hidden = self._model.hidden(batch.input_ids, batch.positions, attention, batch.logits_rows)
        if not drafting:
            return []
        logits = self._widened(self._model.logits(hidden))
        sampled_rows = [each.sampled_row() for each in drafting]
        given = distributions(logits, sampled_rows, self._adjust)
        chosen = choose(given, sampled_rows)
        table = [chosen.token_ids, chosen.is_healthy, chosen.has_choice]
        if any(each.least_chance for each in drafting):
            table.append(_chances(logits, chosen.token_ids))
        # fp64 holds ids exactly. The next draft hangs on what is drawn here: there is one look per draft.
        told = download(torch.stack([column.double() for column in table]))
        token_ids, is_healthy, has_choice, *more = (
            told[i : i + len(drafting)] for i in range(0, len(told), len(drafting))
        )
        chances = more[0] if more else [1.0] * len(drafting)
        place_of = {row: i for i, row in enumerate(given.drawn)}
        going_on = []
        for i, (each, token_id) in enumerate(zip(drafting, map(int, token_ids), strict=True)):
            # This hangs on the distribution alone, not on the token: else some tokens would be favoured.
            each.is_failed = not is_healthy[i]
            if not is_healthy[i] or not has_choice[i]:
                continue
            each.token_ids.append(token_id if self._proposed_ids is None else self._proposed_ids[token_id])
            if given.weights is not None and i in place_of and not each.is_coupled:
                each.weights.append(given.weights[place_of[i]])
            # The draft itself is judged, however unlikely: only whether another one follows hangs on it.
            each.chance *= chances[i]
            if len(each.token_ids) < each.num_wanted and each.chance >= each.least_chance:
                going_on.append(each)
        return going_on

    def _widened(self, logits: Tensor) -> Tensor:
        """(R, V): logits of the draft model's own vocabulary, impossible where that is not the target's;
        (R, C) with a reduced head."""
        num_common = self._num_common_ids
        if self._vocabulary is not None:
            return logits
        if logits.shape[1] == self._vocab_size == num_common:
            return logits
        return F.pad(logits[:, :num_common], (0, self._vocab_size - num_common), value=-math.inf)

    def _adjust(self, logits: Tensor, rows: Sequence[SampledRow]) -> None:
        """Apply the controls, which speak of the target's tokens, to (R, C) logits."""
        if self._vocabulary is None:
            adjust(logits, rows)
            return
        wide = logits.new_full((len(rows), self._vocab_size), -math.inf)
        wide[:, self._vocabulary] = logits
        adjust(wide, rows)
        logits.copy_(wide[:, self._vocabulary])


def _chances(logits: Tensor, token_ids: Tensor) -> Tensor:
    """(R,): how likely the draft model itself holds these tokens."""
    chosen = logits.gather(1, token_ids[:, None]).squeeze(1)
    return (chosen - logits.logsumexp(dim=-1)).exp()


def _catching_up(row: ScheduledSequence, num_common_ids: int) -> ScheduledSequence:
    work = row.draft
    if work is None:
        raise AssertionError("a row without work for the draft model was given to it")
    return _draft_row(
        row, work.first_position, work.token_ids, num_common_ids, is_sampled=work.num_drafts > 0
    )


def _next_row(drafting: _Drafting, num_common_ids: int) -> ScheduledSequence:
    row, newest = drafting.row, drafting.token_ids[-1]
    position = row.known_end + len(drafting.token_ids) - 1
    return _draft_row(row, position, (newest,), num_common_ids, is_sampled=True)


def _draft_row(
    row: ScheduledSequence,
    first_position: int,
    token_ids: tuple[int, ...],
    num_common_ids: int,
    *,
    is_sampled: bool,
) -> ScheduledSequence:
    if max(token_ids) >= num_common_ids:
        # A token that the draft model has no row for: what it makes of another one there is as good as any.
        token_ids = tuple(min(token_id, num_common_ids - 1) for token_id in token_ids)
    return ScheduledSequence(
        sequence_id=row.sequence_id,
        first_position=first_position,
        token_ids=token_ids,
        num_draft_tokens=0,
        block_ids=row.block_ids,
        is_sampled=is_sampled,
        sampling=row.sampling,
    )


def _put_in(plan: StepPlan, drafting: Sequence[_Drafting]) -> Proposals:
    rows = list(plan.rows)
    weights = {}
    for each in drafting:
        drafts = tuple(each.token_ids)
        rows[each.place] = each.row._replace(
            token_ids=each.row.token_ids + drafts, num_draft_tokens=len(drafts), draft=None
        )
        if each.weights:
            weights[each.place] = torch.stack(each.weights)
    failed = frozenset(each.place for each in drafting if each.is_failed)
    return Proposals(StepPlan(plan.step, tuple(rows)), weights, failed)
