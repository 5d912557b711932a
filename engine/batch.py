"""From a step's plan to the tensors of one forward pass: the only place where they are made.

All rows lie behind each other on one flat token axis (selective batching, Orca, OSDI '22).
Letters: T tokens of the step, B rows, R places to draw at, P prompt tokens to be told, M width of the block
table, S block size.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.attention.backend import AttentionMetadata
from headrace.engine.errors import IntegrityError
from headrace.engine.scheduling.plan import StepPlan
from headrace.engine.transfer import upload

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ModelInput:
    """What the decoder is called with.

    Args:
        input_ids: (T,), int64.
        positions: (T,), int64: place of each token in its own sequence.
        attention: where the tokens stand in the paged cache.
        logits_rows: (R,), int64: tokens of the flat axis behind which one is drawn, ascending: each sampled
            row's last known one and its drafts; may be empty.
        prompt_rows: (P,), int64: tokens of the flat axis whose successor in the prompt is to be told with its
            logprob, ascending; nearly always empty.
        taken_from: (T,), int64: for each token that the step before draws, the place that it draws it in; -1
            for those that `input_ids` holds. (0,) where it holds all.
    """

    input_ids: Tensor
    positions: Tensor
    attention: AttentionMetadata
    logits_rows: Tensor
    prompt_rows: Tensor
    taken_from: Tensor


def with_drawn(input_ids: Tensor, taken_from: Tensor, drawn: Tensor) -> Tensor:
    """Token ids with those in their places that the step before draws, which nobody looks at.

    Args:
        input_ids, taken_from: (T,), int64: see `ModelInput`.
        drawn: (P,), int64: what that step draws in its places.
    """
    return torch.where(taken_from < 0, input_ids, drawn.index_select(0, taken_from.clamp(min=0)))


def build_batch(plan: StepPlan, block_size: int, device: torch.device = _CPU) -> ModelInput:
    """Lay a plan's rows out as tensors.

    Args:
        plan: at least one row, each of at least one token.
        block_size: tokens per block, S.
        device: where the tensors go.

    Raises:
        IntegrityError: the plan or a row of it is empty, or a row's block table is too short for its tokens.
    """
    rows = plan.rows
    num_rows, num_tokens = len(rows), plan.num_tokens
    lens = [len(row.token_ids) for row in rows]
    if not rows or min(lens) == 0:
        raise IntegrityError(f"step {plan.step} has no rows, or a row without tokens")
    max_query_len = max(lens)
    first_positions = np.fromiter((row.first_position for row in rows), np.int64, num_rows)
    if max_query_len == 1:
        # Most steps only decode: each token is a row.
        cu_seqlens_q = np.arange(num_rows + 1)
        row_of_token, positions = cu_seqlens_q[:-1], first_positions
        seq_lens = positions + 1
    else:
        query_lens = np.array(lens)
        seq_lens = first_positions + query_lens
        cu_seqlens_q = _cumulated(query_lens)
        row_of_token = np.repeat(np.arange(num_rows), query_lens)
        positions = np.arange(num_tokens) + (first_positions - cu_seqlens_q[:-1])[row_of_token]
    block_table = _block_table(plan, -(-seq_lens // block_size))
    block_of_token = block_table[row_of_token, positions // block_size].astype(np.int64)

    def tensor(array: NDArray[np.int64] | NDArray[np.int32], dtype: type[np.int32 | np.int64]) -> Tensor:
        return torch.from_numpy(array.astype(dtype, copy=False))

    batch = ModelInput(
        input_ids=tensor(
            np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int64, num_tokens), np.int64
        ),
        positions=tensor(positions, np.int64),
        attention=AttentionMetadata(
            slot_mapping=tensor(block_of_token * block_size + positions % block_size, np.int64),
            block_table=tensor(block_table, np.int32),
            seq_lens=tensor(seq_lens, np.int32),
            cu_seqlens_q=tensor(cu_seqlens_q, np.int32),
            cu_seqlens_k=tensor(_cumulated(seq_lens), np.int32),
            max_query_len=max_query_len,
            max_seq_len=int(seq_lens.max()),
        ),
        logits_rows=tensor(_logits_rows(plan, cu_seqlens_q[1:]), np.int64),
        prompt_rows=tensor(_prompt_rows(plan, cu_seqlens_q), np.int64),
        taken_from=tensor(_taken_from(plan, cu_seqlens_q), np.int64),
    )
    return batch if device.type == "cpu" else uploaded(batch, device)


def uploaded(batch: ModelInput, device: torch.device) -> ModelInput:
    """The same on a device, brought there in one copy that nobody waits for."""
    attention = batch.attention
    there = upload(
        (
            batch.input_ids,
            batch.positions,
            batch.logits_rows,
            batch.prompt_rows,
            batch.taken_from,
            attention.slot_mapping,
            attention.block_table,
            attention.seq_lens,
            attention.cu_seqlens_q,
            attention.cu_seqlens_k,
        ),
        device,
    )
    input_ids, positions, logits_rows, prompt_rows, taken_from = there[:5]
    slot_mapping, table, seq_lens, cu_q, cu_k = there[5:]
    longest = attention.max_query_len, attention.max_seq_len
    metadata = AttentionMetadata(slot_mapping, table, seq_lens, cu_q, cu_k, *longest)
    return ModelInput(input_ids, positions, metadata, logits_rows, prompt_rows, taken_from)


def _logits_rows(plan: StepPlan, ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """(R,): of each sampled row the last known token and the drafts, which end at `ends`."""
    if all(row.is_sampled and not row.num_draft_tokens for row in plan.rows):
        return ends - 1
    counts = np.fromiter(
        (row.num_draft_tokens + 1 if row.is_sampled else 0 for row in plan.rows), np.int64, len(plan.rows)
    )
    num_places = int(counts.sum())
    # Of every token: how many of its row's places come after it or are its own.
    left = np.repeat(np.cumsum(counts), counts) - np.arange(num_places)
    return np.repeat(ends, counts) - left


def _prompt_rows(plan: StepPlan, cu_seqlens_q: NDArray[np.int64]) -> NDArray[np.int64]:
    """(P,): the first so many tokens of each row that has to tell what follows them."""
    runs = [
        np.arange(first, first + row.num_prompt_successors)
        for row, first in zip(plan.rows, cu_seqlens_q[:-1].tolist(), strict=True)
        if row.num_prompt_logprobs is not None
    ]
    return np.concatenate(runs) if runs else np.empty(0, np.int64)


def _taken_from(plan: StepPlan, cu_seqlens_q: NDArray[np.int64]) -> NDArray[np.int64]:
    """(T,): see `ModelInput`."""
    if plan.follows is None:
        return np.empty(0, np.int64)
    taken_from = np.full(plan.num_tokens, -1, np.int64)
    taken_from[cu_seqlens_q[:-1]] = [-1 if row.takes_from is None else row.takes_from for row in plan.rows]
    return taken_from


def _cumulated(lens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Running totals of `lens`, with a leading 0."""
    totals = np.zeros(len(lens) + 1, np.int64)
    np.cumsum(lens, out=totals[1:])
    return totals


def _block_table(plan: StepPlan, num_blocks: NDArray[np.int64]) -> NDArray[np.int32]:
    """(B, M): the blocks that hold each row's tokens so far, padded with the null block.

    Blocks held ahead of the tokens are left out, so that nothing of them is ever read.
    """
    for row, wanted in zip(plan.rows, num_blocks.tolist(), strict=True):
        if len(row.block_ids) < wanted:
            raise IntegrityError(
                f"sequence {row.sequence_id}: {row.end_position} tokens in {len(row.block_ids)} blocks"
            )
    width = int(num_blocks.max())
    table = np.zeros((len(plan.rows), width), np.int32)
    table[np.arange(width) < num_blocks[:, None]] = np.fromiter(
        chain.from_iterable(
            islice(row.block_ids, wanted) for row, wanted in zip(plan.rows, num_blocks.tolist(), strict=True)
        ),
        np.int32,
        int(num_blocks.sum()),
    )
    return table
