"""Notes per slot who wrote it last, and compares with who reads it.

Catches a wrong slot mapping, a block freed too early, a stale table, a read of the null block: faults that a
comparison of floats shows only as noise.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.engine.batch import ModelInput
from headrace.engine.config import CacheLayout
from headrace.engine.scheduling.plan import StepPlan
from headrace.engine.sequence import SequenceId


class ShadowViolationError(AssertionError):
    """A row would read a slot that holds something else."""


class ShadowKV:
    """The owners of all slots: (sequence, position, token)."""

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._owners: dict[int, tuple[SequenceId, int, int]] = {}

    def step(self, plan: StepPlan, batch: ModelInput) -> None:
        """Write the step's tokens by `slot_mapping`, then walk every row's block table.

        Raises:
            ShadowViolationError: a row's table does not lead to its own positions 0 to n - 1, in order.
        """
        slots = iter(batch.attention.slot_mapping.tolist())
        for row in plan.rows:
            for position, token_id in enumerate(row.token_ids, start=row.first_position):
                self._owners[next(slots)] = (row.sequence_id, position, token_id)
        for row, block_ids, seq_len in zip(
            plan.rows, batch.attention.block_table.tolist(), batch.attention.seq_lens.tolist(), strict=True
        ):
            for position in range(seq_len):
                block_id, offset = (
                    block_ids[position // self._layout.block_size],
                    position % self._layout.block_size,
                )
                owner = self._owners.get(block_id * self._layout.block_size + offset)
                if block_id == 0 or owner is None or owner[:2] != (row.sequence_id, position):
                    raise ShadowViolationError(
                        f"sequence {row.sequence_id}, position {position}: block {block_id} holds {owner}"
                    )

    def tokens(self, sequence_id: SequenceId) -> list[int]:
        """The tokens that the cache holds of a sequence, by position."""
        held = sorted((pos, token) for owner, pos, token in self._owners.values() if owner == sequence_id)
        return [token for _, token in held]


class SharedShadowKV:
    """Like `ShadowKV`, for sequences that share blocks: a slot is known by the key that its writer shared KV
    under, and by the whole text behind which it was written.

    So it also catches KV of another client, of another text, and a block that its reader shared while its
    writer went on writing.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._written: dict[int, tuple[str, tuple[int, ...]]] = {}

    def step(self, plan: StepPlan, batch: ModelInput, texts: Sequence[tuple[str, Sequence[int]]]) -> None:
        """Write the step's tokens by `slot_mapping`, then walk every row's block table.

        Args:
            texts: per row the key under which it shares KV, its own where it shares none, and its tokens up
                to the end of the row, drafts included.

        Raises:
            ShadowViolationError: a row would read what was written under another key or behind another text,
                or writes into a block that another row of the step reads.
        """
        slots = iter(batch.attention.slot_mapping.tolist())
        written: set[int] = set()
        for row, (key, text) in zip(plan.rows, texts, strict=True):
            for position in range(row.first_position, row.end_position):
                slot = next(slots)
                if slot in written:
                    raise ShadowViolationError(f"slot {slot} is written twice in step {plan.step}")
                written.add(slot)
                self._written[slot] = (key, tuple(text[: position + 1]))
        for row, (key, text), block_ids, seq_len in zip(
            plan.rows,
            texts,
            batch.attention.block_table.tolist(),
            batch.attention.seq_lens.tolist(),
            strict=True,
        ):
            for position in range(seq_len):
                block_id, offset = divmod(position, self._layout.block_size)
                slot = block_ids[block_id] * self._layout.block_size + offset
                if slot < self._layout.block_size or self._written.get(slot) != (
                    key,
                    tuple(text[: position + 1]),
                ):
                    raise ShadowViolationError(
                        f"sequence {row.sequence_id}, position {position}: slot {slot} holds "
                        f"{self._written.get(slot)}"
                    )
