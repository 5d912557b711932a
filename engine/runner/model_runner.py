"""Runs steps on a real model: plan -> tensors -> forward pass -> tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from headrace.engine.attention.backend import AttentionBackend, AttentionStep
from headrace.engine.batch import build_batch
from headrace.engine.config import CacheLayout
from headrace.engine.errors import IntegrityError
from headrace.engine.runner.results import StepTables, to_result
from headrace.engine.sampling.constraint import RowMask
from headrace.engine.sampling.logprobs import logprob_table
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.row import SampledRow
from headrace.engine.sampling.sampler import sample
from headrace.engine.scheduling.plan import ScheduledSequence, StepPlan, StepResult
from headrace.engine.sequence import SequenceId

_PROMPT_SLICE = 64
"""So many prompt tokens' logits are held at a time, whatever the length of a chunk."""


class ForwardModel(Protocol):
    """What the runner asks of a decoder."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    def hidden(self, input_ids: Tensor, positions: Tensor, attention: AttentionStep, rows: Tensor) -> Tensor:
        """Compute one step as far as the head.

        Args:
            input_ids, positions: (T,), int64.
            attention: this step's attention over the paged cache.
            rows: (R,), int64: tokens that `logits` is going to be asked for; may be empty.

        Returns:
            (R, hidden size).
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Go from some of `hidden`'s rows to logits.

        Args:
            hidden: (R, hidden size).

        Returns:
            (R, V), fp32.
        """
        ...


class ModelRunner:
    """See `headrace.engine.runner.protocol.Runner`.

    Holds no state of any sequence: what it computes is a function of the plan and of the KV pool, and
    the KV that it writes is a function of the plan. So a step may be run again.

    Args:
        model: computes logits.
        attention: over the KV pool of `layout`.
    """

    def __init__(self, model: ForwardModel, attention: AttentionBackend, layout: CacheLayout) -> None:
        self._model: ForwardModel | None = model
        self._attention: AttentionBackend | None = attention
        self._block_size = layout.block_size

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """See `Runner.execute`."""
        if self._model is None or self._attention is None:
            raise IntegrityError("a step was sent to a runner that is closed")
        if any(row.num_draft_tokens for row in plan.rows):
            raise IntegrityError("a plan holds draft tokens, which this runner does not verify")
        batch = build_batch(plan, self._block_size, self._model.device)
        step = self._attention.begin_step(batch.attention)
        sampled = [row for row in plan.rows if row.is_sampled]
        is_prompt_told = batch.prompt_rows.shape[0] > 0
        rows = torch.cat((batch.logits_rows, batch.prompt_rows)) if is_prompt_told else batch.logits_rows
        hidden = self._model.hidden(batch.input_ids, batch.positions, step, rows)
        # While the device computes.
        masks = [None if row.constraint is None else row.constraint.mask() for row in sampled]
        tokens, logprobs = (
            _draw(self._model, hidden[: len(sampled)], sampled, masks) if sampled else (None, None)
        )
        prompt = _tell_prompts(self._model, hidden[len(sampled) :], plan) if is_prompt_told else ()
        failures = tuple(None if mask is None else mask.failure for mask in masks)
        return to_result(plan, StepTables(tokens, logprobs, prompt, failures))

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
        self._model = self._attention = None


def _draw(
    model: ForwardModel, hidden: Tensor, rows: Sequence[ScheduledSequence], masks: Sequence[RowMask | None]
) -> tuple[Tensor, Tensor | None]:
    """`StepTables.tokens` and `StepTables.logprobs`, from the (R, hidden size) of the sampled rows."""
    logits = model.logits(hidden)
    sampled = sample(logits, [_sampled_row(row, mask) for row, mask in zip(rows, masks, strict=True)])
    tokens = torch.stack((sampled.token_ids, sampled.is_healthy, sampled.has_choice), dim=1)
    num_tops = [(i, row.num_logprobs) for i, row in enumerate(rows) if row.num_logprobs is not None]
    if not num_tops:
        return tokens, None
    token_ids = sampled.token_ids
    if len(num_tops) < len(rows):
        which = torch.tensor([i for i, _ in num_tops], device=logits.device)
        logits, token_ids = logits[which], token_ids[which]
    return tokens, logprob_table(logits, token_ids, max(num_top for _, num_top in num_tops))


def _tell_prompts(model: ForwardModel, hidden: Tensor, plan: StepPlan) -> tuple[Tensor, ...]:
    """`StepTables.prompt`, from the (P, hidden size) of the tokens before those that are told."""
    token_ids: list[int] = []
    num_top = 0
    for row in plan.rows:
        if row.num_prompt_logprobs is not None:
            first = row.first_position + 1
            token_ids += row.known_token_ids[first : first + row.num_prompt_successors]
            num_top = max(num_top, row.num_prompt_logprobs)
    told = torch.tensor(token_ids, device=hidden.device)
    return tuple(
        logprob_table(model.logits(hidden[i : i + _PROMPT_SLICE]), told[i : i + _PROMPT_SLICE], num_top)
        for i in range(0, len(token_ids), _PROMPT_SLICE)
    )


def _sampled_row(row: ScheduledSequence, mask: RowMask | None) -> SampledRow:
    # A text that nothing can follow ends: there is no token left to reach `min_tokens` with.
    must_end = mask is not None and mask.must_end
    return SampledRow(
        row.sampling,
        row.index,
        row.end_position,
        row.num_prompt_tokens,
        row.known_token_ids,
        frozenset() if must_end else row.suppressed_token_ids,
        None if mask is None else mask.bits,
    )
