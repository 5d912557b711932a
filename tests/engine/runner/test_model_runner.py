"""The real runner over a tiny model: its greedy ids are those of transformers, however the steps are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch

from headrace.engine.attention.backend import AttentionBackend
from headrace.engine.attention.cpu import CpuBackend
from headrace.engine.attention.reference import ReferenceBackend
from headrace.engine.batch import build_batch
from headrace.engine.config import CacheLayout, ModelConfig
from headrace.engine.errors import IntegrityError
from headrace.engine.kv.storage import KVStorage
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.forward import ForwardModel
from headrace.engine.models.loader import load_decoder
from headrace.engine.runner.model_runner import ModelRunner
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.scheduling.plan import DraftWork, ScheduledSequence, StepPlan, StepResult
from headrace.engine.sequence import SequenceId
from tests.support.contract_backend import ContractCheckingBackend
from tests.support.plan_loop import GREEDY, LoopSequence, make_sequences, num_blocks_for, run_to_end
from tests.support.poisoned_decoder import PoisonedDecoder
from tests.support.shadow_kv import ShadowKV
from tests.support.tiny_models import tiny_llama, write_tiny_llama

PROMPTS = (
    (7, 8, 9),
    (100, 200, 300, 400, 500, 11, 12, 13, 14, 15, 16, 17, 18),
    (5,),
    tuple(range(20, 110)),
    (42, 42, 42, 42, 42, 42, 42),
)
NUM_NEW = 12


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    return load_decoder(ModelConfig(folder, dtype="float32"), torch.device("cpu")).decoder


@cache
def expected(prompt: tuple[int, ...]) -> list[int]:
    """Prompt and greedy continuation by transformers."""
    output = tiny_llama().generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        eos_token_id=None,
    )
    return output[0].tolist()


def make_runner(
    decoder: Decoder,
    layout: CacheLayout,
    make_backend: Callable[[KVStorage], AttentionBackend] = CpuBackend,
    model: ForwardModel | None = None,
) -> ModelRunner:
    storage = KVStorage(layout, decoder.kv_shape, torch.device("cpu"))
    return ModelRunner(decoder if model is None else model, make_backend(storage), layout)


def outputs(
    decoder: Decoder,
    sequences: Sequence[LoopSequence],
    block_size: int,
    *,
    chunk: int = 10**9,
    make_backend: Callable[[KVStorage], AttentionBackend] = CpuBackend,
) -> list[list[int]]:
    layout = CacheLayout(num_blocks_for(sequences), block_size)
    return run_to_end(make_runner(decoder, layout, make_backend), sequences, chunk=chunk)


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_alone(decoder: Decoder, prompt: tuple[int, ...]) -> None:
    assert outputs(decoder, make_sequences([prompt], NUM_NEW, 16), 16) == [expected(prompt)]


@pytest.mark.parametrize("block_size", [1, 4, 16, 256])
def test_batched(decoder: Decoder, block_size: int) -> None:
    sequences = make_sequences(PROMPTS, NUM_NEW, block_size)

    assert outputs(decoder, sequences, block_size) == [expected(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 12, 13, 16, 33, 64, 65, 89])
def test_chunked(decoder: Decoder, chunk: int) -> None:
    sequences = make_sequences(PROMPTS, NUM_NEW, 4)

    assert outputs(decoder, sequences, 4, chunk=chunk) == [expected(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("chunk", range(1, 14))
def test_every_chunk_size_of_one_prompt(decoder: Decoder, chunk: int) -> None:
    prompt = PROMPTS[1]

    assert outputs(decoder, make_sequences([prompt], NUM_NEW, 4), 4, chunk=chunk) == [expected(prompt)]


@pytest.mark.parametrize("block_size", [4, 256])
@pytest.mark.parametrize("chunk", [5, 10**9])
def test_keeps_the_kernels_contract(decoder: Decoder, block_size: int, chunk: int) -> None:
    def make_backend(storage: KVStorage) -> AttentionBackend:
        return ContractCheckingBackend(storage, block_size_multiple=block_size)

    sequences = make_sequences(PROMPTS, NUM_NEW, block_size)

    assert outputs(decoder, sequences, block_size, chunk=chunk, make_backend=make_backend) == [
        expected(prompt) for prompt in PROMPTS
    ]


def test_slots_are_written_and_read_by_their_owners(decoder: Decoder) -> None:
    sequences = make_sequences(PROMPTS, NUM_NEW, 4)
    layout = CacheLayout(num_blocks_for(sequences), 4)
    shadow = ShadowKV(layout)

    run_to_end(
        make_runner(decoder, layout),
        sequences,
        chunk=6,
        on_step=lambda plan, _: shadow.step(plan, build_batch(plan, 4)),
    )

    for sequence in sequences:
        assert shadow.tokens(sequence.sequence_id) == sequence.token_ids[:-1]


def test_a_step_can_be_run_again(decoder: Decoder) -> None:
    """Whole, then row by row: the same tokens, and the loop goes on as if nothing had been."""
    sampling = [SamplingParams(temperature=0.9, seed=i) if i % 2 else GREEDY for i in range(len(PROMPTS))]
    plain = outputs(decoder, make_sequences(PROMPTS, NUM_NEW, 4, sampling), 4, chunk=5)
    sequences = make_sequences(PROMPTS, NUM_NEW, 4, sampling)
    layout = CacheLayout(num_blocks_for(sequences), 4)
    runner = make_runner(decoder, layout)

    def run_again(plan: StepPlan, result: StepResult) -> None:
        assert runner.execute(plan) == result
        for i, row in enumerate(plan.rows):
            assert runner.execute(StepPlan(plan.step, (row,))).rows == result.rows[i : i + 1]

    assert run_to_end(runner, sequences, chunk=5, on_step=run_again) == plain


@pytest.mark.parametrize("chunk", [1, 4, 10**9])
def test_seeded_tokens_are_the_same_alone_batched_and_chunked(decoder: Decoder, chunk: int) -> None:
    sampling = [SamplingParams(temperature=0.8, top_p=0.95, seed=7 + i) for i in range(len(PROMPTS))]
    alone = [
        outputs(decoder, make_sequences([prompt], NUM_NEW, 16, [params]), 16)[0]
        for prompt, params in zip(PROMPTS, sampling, strict=True)
    ]

    assert outputs(decoder, make_sequences(PROMPTS, NUM_NEW, 4, sampling), 4, chunk=chunk) == alone
    assert alone != [expected(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("make_backend", [CpuBackend, ReferenceBackend])
@pytest.mark.parametrize("chunk", [3, 10**9])
def test_a_row_that_is_not_finite_fails_alone(
    decoder: Decoder, make_backend: Callable[[KVStorage], AttentionBackend], chunk: int
) -> None:
    """NaN in a chunk that is not sampled shows when the row is; its blocks serve the next one as if new."""
    prompts = [*PROMPTS[:3], (9, 9, 66, 9, 9, 9, 9, 9), PROMPTS[4]]
    sequences = make_sequences(prompts, NUM_NEW, 4)
    layout = CacheLayout(num_blocks_for(sequences), 4)
    runner = make_runner(decoder, layout, make_backend, PoisonedDecoder(decoder, token_id=66))

    run_to_end(runner, sequences, chunk=chunk)

    sick = sequences.pop(3)
    assert len(sick.failures) == 1
    assert "not finite" in sick.failures[0]
    assert sick.token_ids == list(prompts[3])
    assert [seq.token_ids for seq in sequences] == [expected(p) for p in prompts if 66 not in p]

    heir = LoopSequence(SequenceId(99), [7, 8, 9], 3 + NUM_NEW, block_ids=sick.block_ids)
    assert run_to_end(runner, [heir]) == [expected((7, 8, 9))]


def make_row(*, draft: DraftWork | None = None, block_ids: tuple[int, ...] = (1,)) -> ScheduledSequence:
    return ScheduledSequence(SequenceId(0), 0, (1, 2), 0, block_ids, True, GREEDY, draft=draft)


def test_plans_that_it_can_not_run_are_refused(decoder: Decoder) -> None:
    runner = make_runner(decoder, CacheLayout(4, 4))

    with pytest.raises(IntegrityError, match="no draft model"):
        runner.execute(StepPlan(0, (make_row(draft=DraftWork(0, (1, 2), 1)),)))
    with pytest.raises(IntegrityError, match="rows"):
        runner.execute(StepPlan(0, ()))


def test_warming_up_leaves_no_trace(decoder: Decoder) -> None:
    layout = CacheLayout(8, 4)
    storage = KVStorage(layout, decoder.kv_shape, torch.device("cpu"))

    ModelRunner(decoder, CpuBackend(storage), layout).warm_up(num_prefill_tokens=70, num_decode_rows=3)

    assert not storage.key[:, 1:].any()
    assert not storage.value[:, 1:].any()


def test_a_closed_runner_runs_nothing(decoder: Decoder) -> None:
    runner = make_runner(decoder, CacheLayout(4, 4))
    runner.close()
    runner.close()

    with pytest.raises(IntegrityError, match="closed"):
        runner.execute(StepPlan(0, (make_row(),)))


def test_rows_that_are_not_sampled_answer_with_nothing(decoder: Decoder) -> None:
    row = ScheduledSequence(SequenceId(0), 0, (1, 2), 0, (1,), False, GREEDY)

    result = make_runner(decoder, CacheLayout(4, 4)).execute(StepPlan(0, (row, row)))

    assert [r.token_ids for r in result.rows] == [(), ()]
    assert [r.failure for r in result.rows] == [None, None]
