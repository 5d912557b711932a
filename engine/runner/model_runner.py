"""Runs steps on a real model: plan -> tensors -> forward pass -> tokens."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from headrace.engine.attention.backend import AttentionBackend, AttentionStep
from headrace.engine.batch import build_batch
from headrace.engine.config import CacheLayout
from headrace.engine.errors import IntegrityError
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.sampler import SampledRow, SampledTokens, sample
from headrace.engine.scheduling.plan import RowResult, ScheduledSequence, StepPlan, StepResult
from headrace.engine.sequence import SequenceId

_NOT_FINITE = "the model's output for this request is not finite (NaN or infinity)"


class ForwardModel(Protocol):
    """What the runner asks of a decoder."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionStep, logits_rows: Tensor
    ) -> Tensor:
        """Compute one step.

        Args:
            input_ids, positions: (T,), int64.
            attention: this step's attention over the paged cache.
            logits_rows: (R,), int64: tokens whose logits are wanted.

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
        logits = self._model.forward(batch.input_ids, batch.positions, step, batch.logits_rows)
        wanted = [_sampled_row(row) for row in plan.rows if row.is_sampled]
        if not wanted:
            return StepResult((RowResult(),) * len(plan.rows))
        outcomes = iter(_to_host(sample(logits, wanted)))
        return StepResult(tuple(next(outcomes) if row.is_sampled else RowResult() for row in plan.rows))

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


def _sampled_row(row: ScheduledSequence) -> SampledRow:
    return SampledRow(row.sampling, row.index, row.end_position)


def _to_host(sampled: SampledTokens) -> list[RowResult]:
    """The step's one copy from the device to the host."""
    packed = torch.stack((sampled.token_ids, sampled.is_healthy.to(torch.int64)))
    token_ids, is_healthy = packed.tolist()
    return [
        RowResult((token_id,)) if healthy else RowResult(failure=_NOT_FINITE)
        for token_id, healthy in zip(token_ids, is_healthy, strict=True)
    ]
