"""From a step's plan to the tensors of one forward pass: the only place where they are made.

All rows lie behind each other on one flat token axis (selective batching, Orca, OSDI '22).
Letters: T tokens of the step, B rows, R places to draw at, P prompt tokens to be told, M width of the block
table, S block size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.attention.backend import AttentionMetadata
from headrace.engine.errors import IntegrityError
from headrace.engine.scheduling.plan import ScheduledSequence, StepPlan
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


class BatchBuilder:
    """Lays out one step after the other. Nearly all of them only decode, and differ in few numbers: on the
    host their tensors are kept, and those numbers written into them.

    Args:
        block_size: tokens per block, S.
        device: where the tensors go.
    """

    def __init__(self, block_size: int, device: torch.device = _CPU) -> None:
        self._block_size, self._device = block_size, device
        self._decodes: _Decodes | None = None

    def build(self, plan: StepPlan) -> ModelInput:
        """What `build_batch` gives, and holds until the next call; the block table may be wider."""
        if self._device.type != "cpu" or not _only_decodes(plan):
            return build_batch(plan, self._block_size, self._device)
        if self._decodes is None or self._decodes.num_rows != len(plan.rows):
            self._decodes = _Decodes(len(plan.rows), self._block_size)
        return self._decodes.filled(plan.rows)


class _Decodes:
    """The tensors of a step of so many rows, each of one token behind which one is drawn."""

    def __init__(self, num_rows: int, block_size: int) -> None:
        self.num_rows = num_rows
        self._block_size = block_size
        # Of each token: id, position, slot.
        self._tokens = np.zeros((3, num_rows), np.int64)
        self._lens = np.zeros(2 * num_rows + 1, np.int32)
        tokens, lens = torch.from_numpy(self._tokens), torch.from_numpy(self._lens)
        self._input_ids, self._positions, self._slot_mapping = tokens[0], tokens[1], tokens[2]
        self._seq_lens, self._cu_seqlens_k = lens[:num_rows], lens[num_rows:]
        self._cu_seqlens_q = torch.arange(num_rows + 1, dtype=torch.int32)
        self._logits_rows = torch.arange(num_rows)
        self._nothing = torch.empty(0, dtype=torch.int64)
        self._widen(1)

    def filled(self, rows: Sequence[ScheduledSequence]) -> ModelInput:
        """They, with the numbers of these rows."""
        size = self._block_size
        positions = [row.first_position for row in rows]
        seq_lens = [position + 1 for position in positions]
        max_seq_len = max(seq_lens)
        if max_seq_len > self._table.shape[1] * size:
            self._widen(-(-max_seq_len // size))
        slots = []
        for i, (row, position) in enumerate(zip(rows, positions, strict=True)):
            block_ids, last = row.block_ids, position // size
            if self._shown[i] is not block_ids or self._num_shown[i] != last + 1:
                self._show(i, row, last + 1)
            slots.append(block_ids[last] * size + position % size)
        self._tokens[:] = [row.token_ids[0] for row in rows], positions, slots
        self._lens[:] = [*seq_lens, *accumulate(seq_lens, initial=0)]
        attention = AttentionMetadata(
            self._slot_mapping,
            self._block_table,
            self._seq_lens,
            self._cu_seqlens_q,
            self._cu_seqlens_k,
            1,
            max_seq_len,
        )
        return ModelInput(
            self._input_ids, self._positions, attention, self._logits_rows, self._nothing, self._nothing
        )

    def _widen(self, num_blocks: int) -> None:
        """Make the table anew, with room for so many blocks and for as many again."""
        self._table = np.zeros((self.num_rows, 2 * num_blocks), np.int32)
        self._block_table = torch.from_numpy(self._table)
        # What the table holds of each row: tables are tuples, so the same one says the same.
        self._shown: list[tuple[int, ...] | None] = [None] * self.num_rows
        self._num_shown = [0] * self.num_rows

    def _show(self, i: int, row: ScheduledSequence, num_blocks: int) -> None:
        """Let the table hold the first so many blocks of row `i`, and the null block behind them."""
        _check_blocks(row, num_blocks)
        self._table[i, :num_blocks] = row.block_ids[:num_blocks]
        self._table[i, num_blocks:] = 0
        self._shown[i], self._num_shown[i] = row.block_ids, num_blocks


def _only_decodes(plan: StepPlan) -> bool:
    return (
        bool(plan.rows)
        and plan.follows is None
        and all(
            len(row.token_ids) == 1 and row.is_sampled and row.num_prompt_logprobs is None
            for row in plan.rows
        )
    )


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
        _check_blocks(row, wanted)
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


def _check_blocks(row: ScheduledSequence, wanted: int) -> None:
    if len(row.block_ids) < wanted:
        raise IntegrityError(
            f"sequence {row.sequence_id}: {row.end_position} tokens in {len(row.block_ids)} blocks"
        )
