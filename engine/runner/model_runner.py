"""Runs steps on a real model: plan -> tensors -> forward pass -> tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headrace.engine.attention.backend import AttentionBackend
from headrace.engine.batch import BatchBuilder, with_drawn
from headrace.engine.config import CacheLayout
from headrace.engine.errors import IntegrityError
from headrace.engine.models.forward import ForwardModel
from headrace.engine.runner.cuda_graphs import DecodeGraphs
from headrace.engine.runner.results import LaunchedTables, StepTables
from headrace.engine.runner.verification import draw_places, greedy_places, masks_of
from headrace.engine.sampling.constraint import RowMask
from headrace.engine.sampling.logprobs import logprob_table
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.scheduling.plan import ScheduledSequence, StepPlan, StepResult
from headrace.engine.sequence import SequenceId
from headrace.engine.speculative.draft_model import DraftModel, Proposals
from headrace.engine.transfer import on_device

logger = logging.getLogger(__name__)

_PROMPT_SLICE = 64
"""So many prompt tokens' logits are held at a time, whatever the length of a chunk."""


class ModelRunner:
    """See `headrace.engine.runner.protocol.Runner`.

    Holds no state of any sequence: what it computes is a function of the plan and of the KV pool, and
    the KV that it writes is a function of the plan. So a step may be run again. It remembers what the last
    step drew, on the device, for a plan that follows that one.

    Args:
        model: computes logits.
        attention: over the KV pool of `layout`.
        draft_model: makes the drafts that a plan asks for.
        graphs: run the steps that were captured; the others run as ever.
    """

    def __init__(
        self,
        model: ForwardModel,
        attention: AttentionBackend,
        layout: CacheLayout,
        draft_model: DraftModel | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._model: ForwardModel | None = model
        self._attention: AttentionBackend | None = attention
        self._draft_model = draft_model
        self._graphs = graphs
        self._block_size = layout.block_size
        self._batches = BatchBuilder(layout.block_size, model.device)
        self._has_told_draft_failure = False
        self._last_step: int | None = None
        self._last_drawn: StepTables | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        """See `Runner.execute`."""
        return self.launch(plan).fetch()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedTables:
        """See `Runner.launch`. Where the draft model has work, it is waited for."""
        if self._model is None or self._attention is None:
            raise IntegrityError("a step was sent to a runner that is closed")
        before = self._drawn_before(plan)
        started_s = time.perf_counter()
        proposals = self._propose(plan)
        plan = proposals.plan
        propose_s = time.perf_counter() - started_s
        hidden, num_places = self._forward(self._model, self._attention, plan, before)
        is_prompt_told = hidden.shape[0] > num_places
        drawn = _draw(self._model, hidden[:num_places], proposals) if num_places else StepTables()
        prompt = _tell_prompts(self._model, hidden[num_places:], plan) if is_prompt_told else ()
        self._last_step, self._last_drawn = plan.step, drawn
        return LaunchedTables(plan, replace(drawn, prompt=prompt), proposals.failed, propose_s)

    def _drawn_before(self, plan: StepPlan) -> Tensor | None:
        """(P,): what the step draws that a plan follows; None where all its tokens are known."""
        last, drawn = self._last_step, self._last_drawn
        # Should this one fail on its way, nothing may follow it.
        self._last_step = self._last_drawn = None
        if plan.follows is None:
            return None
        token_ids = None if drawn is None else drawn.token_ids
        if plan.follows != last or token_ids is None:
            raise IntegrityError(
                f"step {plan.step} follows step {plan.follows}, and step {last} was the last"
            )
        return token_ids

    def _forward(
        self, model: ForwardModel, attention: AttentionBackend, plan: StepPlan, before: Tensor | None
    ) -> tuple[Tensor, int]:
        """Hidden states of the places that are drawn from, then of those before told prompt tokens; and how
        many of the first there are."""
        if self._graphs is not None:
            hidden = self._graphs.hidden(plan, before)
            if hidden is not None:
                return hidden, hidden.shape[0]
        batch = self._batches.build(plan)
        step = attention.begin_step(batch.attention)
        is_prompt_told = batch.prompt_rows.shape[0] > 0
        rows = torch.cat((batch.logits_rows, batch.prompt_rows)) if is_prompt_told else batch.logits_rows
        input_ids = batch.input_ids
        if before is not None:
            input_ids = with_drawn(input_ids, batch.taken_from, before)
        return model.hidden(input_ids, batch.positions, step, rows), batch.logits_rows.shape[0]

    def _propose(self, plan: StepPlan) -> Proposals:
        if all(row.draft is None for row in plan.rows):
            return Proposals(plan)
        if self._draft_model is None:
            raise IntegrityError("a plan wants drafts, and this runner has no draft model")
        error: Exception | None = None
        try:
            proposals = self._draft_model.propose(plan)
        except Exception as raised:
            # Nobody's answer hangs on drafts: a failure is counted, told once, and costs this step's drafts.
            error, proposals = raised, Proposals.none(plan)
        if proposals.failed and not self._has_told_draft_failure:
            self._has_told_draft_failure = True
            logger.error(
                "the draft model failed in step %d for %d of %d rows%s: they go on without drafts, and it is "
                "asked ever more seldom. Further failures are only counted",
                plan.step,
                len(proposals.failed),
                len(plan.rows),
                "" if error else " (its numbers are not finite)",
                exc_info=error,
            )
        return proposals

    def warm_up(self, num_prefill_tokens: int, num_decode_rows: int) -> None:
        """Run the largest steps once, over the null block, so that no request pays for first calls.

        Args:
            num_prefill_tokens: of one sequence; the token budget.
            num_decode_rows: the slots.
        """
        greedy = SamplingParams(temperature=0.0)

        def row(first_position: int, num_tokens: int) -> ScheduledSequence:
            num_blocks = -(-(first_position + num_tokens) // self._block_size)
            return ScheduledSequence(
                sequence_id=SequenceId(-1),
                first_position=first_position,
                token_ids=(0,) * num_tokens,
                num_draft_tokens=0,
                block_ids=(0,) * num_blocks,
                is_sampled=True,
                sampling=greedy,
            )

        self.execute(StepPlan(-1, (row(0, num_prefill_tokens),)))
        self.execute(StepPlan(-1, (row(num_prefill_tokens - 1, 1),) * num_decode_rows))

    def close(self) -> None:
        """See `Runner.close`."""
        if self._graphs is not None:
            self._graphs.release()
        self._model = self._attention = self._draft_model = self._graphs = self._last_drawn = None


def _draw(model: ForwardModel, hidden: Tensor, proposals: Proposals) -> StepTables:
    """The step's tables, the prompt's own aside, from the (P, hidden size) of the places of its rows."""
    rows = [row for row in proposals.plan.rows if row.is_sampled]
    logits = model.logits(hidden)
    tokens = None if proposals.weights else greedy_places(logits, rows)
    if tokens is not None:
        return StepTables(tokens, _tell(logits, tokens, rows))
    # While the device computes.
    masks = [masks_of(row) for row in rows]
    weights = {}
    if proposals.weights:
        places = [place for place, row in enumerate(proposals.plan.rows) if row.is_sampled]
        weights = {
            i: proposals.weights[place] for i, place in enumerate(places) if place in proposals.weights
        }
    sampled = draw_places(logits, rows, masks, weights, proposals.vocabulary)
    tokens = torch.stack((sampled.token_ids, sampled.is_healthy, sampled.has_choice), dim=1)
    failures = tuple(None if along is None else _failure(along[0]) for along in masks)
    return StepTables(tokens, _tell(logits, tokens, rows), failures=failures)


def _failure(mask: RowMask | None) -> str | None:
    return None if mask is None else mask.failure


def _tell(logits: Tensor, tokens: Tensor, rows: Sequence[ScheduledSequence]) -> Tensor | None:
    """`StepTables.logprobs`, from the (P, V) and `StepTables.tokens` of the places of `rows`."""
    num_tops = [row.num_logprobs for row in rows if row.num_logprobs is not None]
    if not num_tops:
        return None
    token_ids = tokens[:, 0].long()
    if len(num_tops) < len(rows):
        told = [row.num_logprobs is not None for row in rows for _ in range(row.num_draft_tokens + 1)]
        which = on_device([i for i, is_told in enumerate(told) if is_told], logits.device)
        logits, token_ids = logits[which], token_ids[which]
    return logprob_table(logits, token_ids, max(num_tops))


def _tell_prompts(model: ForwardModel, hidden: Tensor, plan: StepPlan) -> tuple[Tensor, ...]:
    """`StepTables.prompt`, from the (P, hidden size) of the tokens before those that are told."""
    token_ids: list[int] = []
    num_top = 0
    for row in plan.rows:
        if row.num_prompt_logprobs is not None:
            first = row.first_position + 1
            token_ids += row.known_token_ids[first : first + row.num_prompt_successors]
            num_top = max(num_top, row.num_prompt_logprobs)
    told = on_device(token_ids, hidden.device)
    return tuple(
        logprob_table(model.logits(hidden[i : i + _PROMPT_SLICE]), told[i : i + _PROMPT_SLICE], num_top)
        for i in range(0, len(token_ids), _PROMPT_SLICE)
    )
