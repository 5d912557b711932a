"""A whole decoder over the kit: what a sequence gives does not depend on its company, to the bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.engine.batch import build_batch
from headrace.engine.config import CacheLayout, ModelConfig
from headrace.engine.kv.storage import KVStorage
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.loader import load_decoder
from headrace.engine.native.backend import NativeCpuBackend
from headrace.engine.native.kit import native_kit
from headrace.engine.native.library import NativeLibrary
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.scheduling.plan import ScheduledSequence, StepPlan
from headrace.engine.sequence import SequenceId
from tests.support.tiny_models import write_tiny_llama

CPU = torch.device("cpu")
BLOCK_SIZE, BLOCKS_PER_ROW = 16, 24
LENGTHS = (1, 200, 37, 129, 64)


@dataclass(frozen=True, slots=True)
class Share:
    """A part of one sequence in a step: its tokens `first` .. `last` - 1."""

    row: int
    first: int
    last: int


class Runs:
    """Steps over one model; every sequence has blocks of its own."""

    def __init__(self, decoder: Decoder, library: NativeLibrary) -> None:
        spec = decoder.spec
        storage = KVStorage(
            CacheLayout(1 + BLOCKS_PER_ROW * len(LENGTHS), BLOCK_SIZE),
            decoder.kv_shape,
            CPU,
        )
        self._decoder, self._backend = decoder, NativeCpuBackend(storage, library)
        generator = torch.Generator().manual_seed(1)
        self._tokens = [
            torch.randint(0, spec.vocab_size, (n,), generator=generator).tolist() for n in LENGTHS
        ]

    def step(self, *shares: Share) -> tuple[Tensor, ...]:
        """Logits after each share's last token."""
        rows = tuple(
            ScheduledSequence(
                sequence_id=SequenceId(share.row),
                first_position=share.first,
                token_ids=tuple(self._tokens[share.row][share.first : share.last]),
                num_draft_tokens=0,
                block_ids=tuple(1 + BLOCKS_PER_ROW * share.row + i for i in range(BLOCKS_PER_ROW)),
                is_sampled=True,
                sampling=SamplingParams(temperature=0.0),
            )
            for share in shares
        )
        batch = build_batch(StepPlan(0, rows), BLOCK_SIZE)
        step = self._backend.begin_step(batch.attention)
        return self._decoder.forward(batch.input_ids, batch.positions, step, batch.logits_rows).unbind()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_and_chunks_change_no_bit_of_the_logits(
    library: NativeLibrary, dtype: str, tmp_path: Path
) -> None:
    kit = native_kit()
    assert kit is not None
    decoder = load_decoder(ModelConfig(write_tiny_llama(tmp_path), dtype=dtype), CPU).decoder
    if not kit.linears.suits(torch.zeros(2, 2, dtype=decoder.dtype)):
        pytest.skip(f"linear layers in {dtype} are another library's on this processor")
    alone = [Runs(decoder, library).step(Share(row, 0, length))[0] for row, length in enumerate(LENGTHS)]
    together = Runs(decoder, library).step(*(Share(row, 0, length) for row, length in enumerate(LENGTHS)))
    for row in range(len(LENGTHS)):
        assert torch.equal(together[row], alone[row])
    chunked = Runs(decoder, library)
    chunked.step(Share(1, 0, 50), Share(3, 0, 7))
    chunked.step(Share(3, 7, 100), Share(2, 0, 37), Share(1, 50, 199))
    last = chunked.step(Share(3, 100, 129), Share(1, 199, 200), Share(0, 0, 1))
    assert torch.equal(last[0], alone[3])
    assert torch.equal(last[1], alone[1])
    assert torch.equal(last[2], alone[0])
