"""LongRoPE against transformers: short factors up to the original length, long ones beyond it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.engine.attention.cpu import CpuBackend
from headrace.engine.config import ModelConfig
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.loader import load_decoder
from headrace.engine.runner.model_runner import ModelRunner
from tests.support.paged_step import logits_of, storage_for
from tests.support.plan_loop import make_sequences, num_blocks_for, run_to_end
from tests.support.tiny_models import VOCAB_SIZE, write_tiny_family

ORIGINAL, LONGEST = 200, 800
NUM_NEW = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_family(tmp_path_factory.mktemp("longrope"), "phi3, longrope")


def load(folder: Path, max_model_len: int) -> Decoder:
    config = ModelConfig(path=folder, dtype="float32", max_model_len=max_model_len)
    return load_decoder(config, torch.device("cpu")).decoder


def random_ids(length: int) -> torch.Tensor:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize(
    ("served", "length"), [(ORIGINAL, 50), (ORIGINAL, ORIGINAL), (LONGEST, ORIGINAL + 1), (LONGEST, LONGEST)]
)
def test_logits_equal_the_references_where_both_take_the_same_factors(
    folder: Path, served: int, length: int
) -> None:
    ids = random_ids(length)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = model(ids[None]).logits[0]
    torch.testing.assert_close(logits_of(load(folder, served), ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunk", [10**9, 64])
@pytest.mark.parametrize(("served", "length"), [(ORIGINAL, 100), (LONGEST, 300)])
def test_greedy_ids_equal_the_references_on_either_side_of_the_original_length(
    folder: Path, served: int, length: int, chunk: int
) -> None:
    prompt = random_ids(length)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    expected = model.generate(
        prompt[None],
        attention_mask=torch.ones(1, length, dtype=torch.int64),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        eos_token_id=None,
    )
    decoder = load(folder, served)
    sequences = make_sequences([prompt.tolist()], NUM_NEW, 4)
    storage = storage_for(decoder.spec, num_blocks_for(sequences), 4)
    runner = ModelRunner(decoder, CpuBackend(storage), storage.layout)
    assert run_to_end(runner, sequences, chunk=chunk) == [expected[0].tolist()]


def test_short_sequences_are_turned_by_the_long_factors_where_long_ones_are_served(folder: Path) -> None:
    ids = random_ids(50)
    short, long = logits_of(load(folder, ORIGINAL), ids), logits_of(load(folder, LONGEST), ids)
    # A prefix of a long sequence, which the reference computes with the long factors from its first token on.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        whole = model(torch.cat((ids, random_ids(ORIGINAL)))[None]).logits[0, :50]
    torch.testing.assert_close(long, whole, atol=1e-4, rtol=0)
    assert (short - long).abs().max() > 0.1
