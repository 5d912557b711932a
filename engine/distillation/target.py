"""The target as a teacher: what its head makes its predictions from, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from headrace.engine.attention.backend import AttentionBackend
from headrace.engine.attention.select import select_backend
from headrace.engine.batch import build_batch
from headrace.engine.config import CacheLayout, ModelConfig
from headrace.engine.kv.storage import KVStorage
from headrace.engine.models.loader import load_decoder
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.scheduling.plan import ScheduledSequence, StepPlan
from headrace.engine.sequence import SequenceId

_BLOCK_SIZE = 16
_STEP_TOKENS = 4096


class Teacher:
    """Computes sequences whole, many in one step.

    Args:
        folder: the target's.
        dtype: see `headrace.engine.ModelConfig`.
    """

    def __init__(self, folder: Path, dtype: str = "auto") -> None:
        self._decoder = load_decoder(ModelConfig(folder, dtype=dtype), torch.device("cpu")).decoder
        self._attention: AttentionBackend | None = None
        self._num_blocks = 0

    @torch.inference_mode()
    def hidden(self, sequences: Sequence[tuple[int, ...]]) -> Tensor:
        """What the head gets for every token: (T, width), the sequences one after the other."""
        parts: list[Tensor] = []
        together: list[tuple[int, ...]] = []
        num_tokens = 0
        for sequence in sequences:
            if together and num_tokens + len(sequence) > _STEP_TOKENS:
                parts.append(self._step(together))
                together, num_tokens = [], 0
            together.append(sequence)
            num_tokens += len(sequence)
        if together:
            parts.append(self._step(together))
        return torch.cat(parts)

    def _step(self, sequences: Sequence[tuple[int, ...]]) -> Tensor:
        rows, next_block = [], 1
        for number, sequence in enumerate(sequences):
            num_blocks = -(-len(sequence) // _BLOCK_SIZE)
            rows.append(
                ScheduledSequence(
                    sequence_id=SequenceId(number),
                    first_position=0,
                    token_ids=sequence,
                    num_draft_tokens=0,
                    block_ids=tuple(range(next_block, next_block + num_blocks)),
                    is_sampled=False,
                    sampling=SamplingParams(temperature=0.0),
                )
            )
            next_block += num_blocks
        batch = build_batch(StepPlan(0, tuple(rows)), _BLOCK_SIZE)
        step = self._backend(next_block).begin_step(batch.attention)
        every = torch.arange(batch.input_ids.shape[0])
        return self._decoder.hidden(batch.input_ids, batch.positions, step, every)

    def _backend(self, num_blocks: int) -> AttentionBackend:
        if self._attention is None or num_blocks > self._num_blocks:
            storage = KVStorage(
                CacheLayout(num_blocks, _BLOCK_SIZE), self._decoder.kv_shape, torch.device("cpu")
            )
            self._attention, self._num_blocks = select_backend("auto", storage), num_blocks
        return self._attention
