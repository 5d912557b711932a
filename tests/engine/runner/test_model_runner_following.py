"""A step that follows another takes its tokens on the device, and draws what it draws with known ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headrace.engine.attention.backend import AttentionBackend
from headrace.engine.attention.cpu import CpuBackend
from headrace.engine.attention.flash import FlashBackend
from headrace.engine.batch import build_batch
from headrace.engine.config import CacheLayout, ModelConfig
from headrace.engine.errors import IntegrityError
from headrace.engine.kv.storage import KVStorage
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.loader import load_decoder
from headrace.engine.runner.model_runner import ModelRunner
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.scheduling.plan import UNKNOWN_TOKEN, ScheduledSequence, StepPlan
from headrace.engine.sequence import SequenceId
from tests.support.contract_backend import ContractCheckingBackend
from tests.support.emulated_kernels import EmulatedKernels
from tests.support.paged_step import storage_for
from tests.support.plan_loop import (
    GREEDY,
    LoopSequence,
    make_sequences,
    num_blocks_for,
    run_ahead_to_end,
    run_to_end,
)
from tests.support.tiny_models import write_tiny_llama

PROMPTS = [(7, 8, 9), (5,), tuple(range(20, 60)), (42, 42), (300, 301, 302, 303)]
SAMPLING = [
    GREEDY,
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=1.1, top_p=0.9, seed=2, num_logprobs=2),
    SamplingParams(temperature=0.0, banned_token_ids=frozenset({42}), logit_bias=((9, 1.5),)),
    SamplingParams(temperature=0.7, top_k=20, seed=2**63, num_logprobs=0),
]
NUM_NEW = 12


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    return load_decoder(ModelConfig(folder, dtype="float32"), torch.device("cpu")).decoder


def cpu(storage: KVStorage) -> AttentionBackend:
    return CpuBackend(storage)


def contract(storage: KVStorage) -> AttentionBackend:
    return ContractCheckingBackend(storage)


def flash(storage: KVStorage) -> AttentionBackend:
    backend = FlashBackend(storage, EmulatedKernels(dtypes=(torch.float32,)).flash)
    return ContractCheckingBackend(
        storage, backend, block_size_multiple=256, dtypes=frozenset({torch.float32})
    )


def sequences(block_size: int = 4) -> list[LoopSequence]:
    made = make_sequences(PROMPTS, NUM_NEW, block_size, SAMPLING)
    for i, sequence in enumerate(made):
        sequence.max_len -= i  # so that steps shrink, and rows change their places
    return made


def make_runner(
    decoder: Decoder,
    make_backend: Callable[[KVStorage], AttentionBackend] = cpu,
    block_size: int = 4,
) -> ModelRunner:
    layout = CacheLayout(num_blocks_for(sequences(block_size)), block_size)
    attention = make_backend(storage_for(decoder.spec, layout.num_blocks, block_size))
    return ModelRunner(decoder, attention, layout)


@pytest.mark.parametrize(("make_backend", "block_size"), [(cpu, 4), (contract, 4), (flash, 256)])
def test_tokens_and_logprobs_are_those_of_steps_with_known_tokens(
    decoder: Decoder, make_backend: Callable[[KVStorage], AttentionBackend], block_size: int
) -> None:
    known, ahead = sequences(block_size), sequences(block_size)
    plans: list[StepPlan] = []

    expected = run_to_end(make_runner(decoder, make_backend, block_size), known)
    made = run_ahead_to_end(make_runner(decoder, make_backend, block_size), ahead, plans.append)

    assert made == expected
    assert [len(seq.token_ids) - len(prompt) for seq, prompt in zip(ahead, PROMPTS, strict=True)] == [
        12,
        11,
        10,
        9,
        8,
    ]
    for one, other in zip(ahead, known, strict=True):
        assert one.logprobs == other.logprobs
    assert all(row.token_ids == (UNKNOWN_TOKEN,) for plan in plans[1:] for row in plan.rows)


def row(sequence_id: int, **changes: object) -> ScheduledSequence:
    made = ScheduledSequence(SequenceId(sequence_id), 0, (5,), 0, (1 + sequence_id,), True, GREEDY)
    return made._replace(**changes)  # type: ignore[arg-type]


def following(step: int, follows: int) -> StepPlan:
    return StepPlan(
        step, (row(0, first_position=1, token_ids=(UNKNOWN_TOKEN,), takes_from=0),), follows=follows
    )


def test_only_the_step_right_behind_can_follow(decoder: Decoder) -> None:
    runner = make_runner(decoder)
    with pytest.raises(IntegrityError, match="step 1 follows step 0, and step None was the last"):
        runner.launch(following(1, 0))
    runner.launch(StepPlan(0, (row(0),)))
    runner.launch(StepPlan(1, (row(1),)))
    with pytest.raises(IntegrityError, match="step 2 follows step 0, and step 1 was the last"):
        runner.launch(following(2, 0))


def test_nothing_follows_a_step_that_could_not_be_launched(decoder: Decoder) -> None:
    runner = make_runner(decoder)
    runner.launch(StepPlan(0, (row(0),)))
    with pytest.raises(IntegrityError, match="0 blocks"):
        runner.launch(StepPlan(1, (row(0, block_ids=()),)))
    with pytest.raises(IntegrityError, match="step None was the last"):
        runner.launch(following(2, 1))


def test_only_tokens_that_are_drawn_are_taken() -> None:
    rows = (
        row(0, first_position=1, token_ids=(UNKNOWN_TOKEN,), takes_from=3),
        row(1, token_ids=(4, 5, 6), block_ids=(2, 3)),
        row(2, first_position=1, token_ids=(UNKNOWN_TOKEN,), takes_from=0),
    )

    batch = build_batch(StepPlan(8, rows, follows=7), 2)

    assert batch.taken_from.tolist() == [3, -1, -1, -1, 0]
    assert build_batch(StepPlan(8, rows[1:2]), 2).taken_from.tolist() == []
