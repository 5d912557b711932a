"""Every family against transformers: a tiny random checkpoint that transformers itself writes and reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from headrace.engine.attention.backend import AttentionBackend
from headrace.engine.attention.cpu import CpuBackend
from headrace.engine.attention.reference import ReferenceBackend
from headrace.engine.attention.select import AUTO, select_backend
from headrace.engine.config import ModelConfig
from headrace.engine.kv.storage import KVStorage
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.loader import load_decoder
from headrace.engine.models.spec import HEAD
from headrace.engine.runner.model_runner import ModelRunner
from tests.support.family_table import FamilyTable
from tests.support.paged_step import logits_of, storage_for
from tests.support.plan_loop import LoopSequence, make_sequences, num_blocks_for, run_to_end
from tests.support.tiny_models import FAMILIES, VOCAB_SIZE, write_tiny_family

CPU = torch.device("cpu")
TOLERANCE = 1e-4
NUM_NEW = 64
BLOCK_SIZE = 4
PROMPTS = ((7, 8, 9), (5,), tuple(range(20, 110)), (100, 200, 300, 400, 500, 11, 12, 13, 14, 15, 16, 17, 18))

pytestmark = pytest.mark.parametrize("variant", FAMILIES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes a variant's folder once."""
    return cache(lambda variant: write_tiny_family(tmp_path_factory.mktemp("family"), variant))


@pytest.fixture
def decoder(variant: str, folders: Callable[[str], Path]) -> Decoder:
    return load_decoder(ModelConfig(path=folders(variant), dtype="float32"), CPU).decoder


@pytest.fixture(scope="module")
def references(folders: Callable[[str], Path]) -> Callable[[str], PreTrainedModel]:
    """Loads a variant as transformers does, once."""

    def load(variant: str) -> PreTrainedModel:
        # Whoever comes first may be in inference mode, and nobody outside may write to what is made there.
        with torch.inference_mode(mode=False):
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                folders(variant), dtype=torch.float32, attn_implementation="eager"
            )
        return model.eval()

    return cache(load)


@pytest.fixture(scope="module")
def reference_ids(references: Callable[[str], PreTrainedModel]) -> Callable[[str], list[list[int]]]:
    """Each prompt with what transformers makes of it alone."""

    def generate(variant: str) -> list[list[int]]:
        return [greedy(references(variant), prompt) for prompt in PROMPTS]

    return cache(generate)


def greedy(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    """Prompt and continuation by transformers."""
    output = model.generate(  # type: ignore[operator]  # a mixin's method, hidden behind the module's attributes
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        eos_token_id=None,
    )
    ids: list[int] = output[0].tolist()
    return ids


def fastest_backend(storage: KVStorage) -> AttentionBackend:
    """What a server takes that is not told otherwise."""
    return select_backend(AUTO, storage)


def generated(
    decoder: Decoder,
    sequences: Sequence[LoopSequence],
    chunk: int = 10**9,
    make_backend: Callable[[KVStorage], AttentionBackend] = CpuBackend,
) -> list[list[int]]:
    storage = storage_for(decoder.spec, num_blocks_for(sequences), BLOCK_SIZE)
    return run_to_end(ModelRunner(decoder, make_backend(storage), storage.layout), sequences, chunk=chunk)


def test_logits_at_every_position_equal_the_references(
    variant: str,
    decoder: Decoder,
    references: Callable[[str], PreTrainedModel],
    family_table: FamilyTable,
) -> None:
    ids = torch.randint(
        0, VOCAB_SIZE, (min(256, decoder.spec.default_len),), generator=torch.Generator().manual_seed(1)
    )
    with torch.inference_mode():
        expected = references(variant)(ids[None]).logits[0]
    difference = (logits_of(decoder, ids) - expected).abs().max().item()
    family_table.add_logits(variant, len(ids), difference)
    assert difference < TOLERANCE


@torch.inference_mode()
def test_bfloat16_is_as_near_to_fp32_as_the_references(
    variant: str, folders: Callable[[str], Path], references: Callable[[str], PreTrainedModel]
) -> None:
    ids = torch.randint(0, VOCAB_SIZE, (100,), generator=torch.Generator().manual_seed(3))
    decoder = load_decoder(ModelConfig(path=folders(variant), dtype="bfloat16"), CPU).decoder
    theirs = AutoModelForCausalLM.from_pretrained(
        folders(variant), dtype=torch.bfloat16, attn_implementation="eager"
    )
    exact = references(variant)(ids[None]).logits[0]

    def error(logits: Tensor) -> float:
        return (logits.float() - exact).square().mean().sqrt().item()

    assert error(logits_of(decoder, ids)) < 1.5 * error(theirs(ids[None]).logits[0])


@pytest.mark.parametrize(
    ("way", "chunk", "make_backend"),
    [
        ("batched", 10**9, CpuBackend),
        ("chunks of 7", 7, CpuBackend),
        ("batched (reference attention)", 10**9, ReferenceBackend),
        ("batched (fastest attention)", 10**9, fastest_backend),
        ("chunks of 7 (fastest attention)", 7, fastest_backend),
    ],
)
def test_greedy_ids_in_a_batch_equal_the_references(
    variant: str,
    decoder: Decoder,
    reference_ids: Callable[[str], list[list[int]]],
    family_table: FamilyTable,
    *,
    way: str,
    chunk: int,
    make_backend: Callable[[KVStorage], AttentionBackend],
) -> None:
    sequences = make_sequences(PROMPTS, NUM_NEW, BLOCK_SIZE)
    assert generated(decoder, sequences, chunk, make_backend) == reference_ids(variant)
    family_table.add_equal_ids(variant, way)


def test_greedy_ids_alone_equal_the_references(
    variant: str,
    decoder: Decoder,
    reference_ids: Callable[[str], list[list[int]]],
    family_table: FamilyTable,
) -> None:
    alone = [generated(decoder, make_sequences([prompt], NUM_NEW, BLOCK_SIZE))[0] for prompt in PROMPTS]
    assert alone == reference_ids(variant)
    family_table.add_equal_ids(variant, "alone")


def test_greedy_ids_behind_a_cached_prompt_equal_the_references(
    variant: str,
    decoder: Decoder,
    reference_ids: Callable[[str], list[list[int]]],
    family_table: FamilyTable,
) -> None:
    prompt, expected = PROMPTS[2], reference_ids(variant)[2]
    [first] = make_sequences([prompt], NUM_NEW, BLOCK_SIZE)
    num_cached = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    shared = first.block_ids[: num_cached // BLOCK_SIZE]
    own = tuple(max(first.block_ids) + 1 + i for i in range(len(first.block_ids) - len(shared)))
    second = LoopSequence(
        first.sequence_id, list(prompt), first.max_len, (*shared, *own), num_computed=num_cached
    )
    storage = storage_for(decoder.spec, max(own) + 1, BLOCK_SIZE)
    runner = ModelRunner(decoder, CpuBackend(storage), storage.layout)
    assert run_to_end(runner, [first]) == [expected]
    assert run_to_end(runner, [second]) == [expected]
    family_table.add_equal_ids(variant, "prompt cached")


def test_the_tensors_asked_for_are_those_that_the_reference_saves(
    variant: str, folders: Callable[[str], Path], decoder: Decoder
) -> None:
    with safe_open(folders(variant) / "model.safetensors", framework="pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert decoder.spec.tensors() == saved
    assert decoder.spec.tied_head == (HEAD not in saved)
