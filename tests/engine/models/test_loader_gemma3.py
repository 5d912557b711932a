"""The second known model, of another family, against transformers and SentencePiece."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.engine.attention.cpu import CpuBackend
from headrace.engine.config import ModelConfig
from headrace.engine.models.loader import load_decoder
from headrace.engine.models.tokenizer import load_tokenizer
from headrace.engine.runner.model_runner import ModelRunner
from tests.support.default_model import cached_model_path
from tests.support.paged_step import logits_of, storage_for
from tests.support.plan_loop import make_sequences, num_blocks_for, run_to_end

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

CPU = torch.device("cpu")
MODEL = "gemma3-270m"
BOS = 2

# SentencePiece's own ids, of a model file made from the same pieces and scores.
SENTENCEPIECE_IDS = {
    "Hello  world": [9259, 138, 12392],
    "a\n\n\tb": [236746, 108, 255968, 236763],
    "x <b>y</b>": [236781, 236743, 200, 236762, 209],
    "   é 水車 🌊": [139, 236859, 34156, 238139, 236743, 244245],
    " " * 33 + "a": [167, 138, 236746],
}
PROMPTS = (
    "Paris is the capital of France. Rome is the capital of",
    "def fibonacci(n):\n    if n < 2:\n",
    "Die Mühle am Bach steht seit hundert Jahren, und",
    "水車は川の流れで回り、",
)
NUM_NEW = 32
LONG_TEXT = (
    "The mill stands where the river bends, and the wheel turns as long as the channel is full. "
    "A keeper opens the gate in the morning, and closes it when the grain has been ground. "
) * 16


@pytest.mark.parametrize("text", SENTENCEPIECE_IDS)
def test_ids_equal_sentencepieces(text: str) -> None:
    tokenizer = load_tokenizer(cached_model_path(MODEL))
    assert tokenizer.encode(text) == [BOS, *SENTENCEPIECE_IDS[text]]
    assert tokenizer.decode(SENTENCEPIECE_IDS[text]) == text


def test_the_description_is_the_published_one() -> None:
    info = load_decoder(
        ModelConfig(path=cached_model_path(MODEL), dtype="bfloat16", max_model_len=512), CPU
    ).info
    assert (info.name, info.family) == (MODEL, "gemma3")
    assert (info.vocab_size, info.num_parameters) == (262_144, 268_098_176)
    assert info.eos_token_ids == {1}
    assert info.bos_token_id == BOS


@torch.inference_mode()
def test_logits_beyond_the_window_equal_the_references_at_every_position() -> None:
    folder = cached_model_path(MODEL)
    ids = torch.tensor(load_tokenizer(folder).encode(LONG_TEXT)[:600])
    assert len(ids) == 600
    decoder = load_decoder(ModelConfig(path=folder, dtype="float32", max_model_len=1024), CPU).decoder
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids[None]).logits[0]
    ours = logits_of(decoder, ids)
    torch.testing.assert_close(ours, theirs, atol=5e-3, rtol=0)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_greedy_ids_of_four_prompts_equal_the_references() -> None:
    folder = cached_model_path(MODEL)
    tokenizer = load_tokenizer(folder)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = [
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            eos_token_id=None,
        )[0].tolist()
        for prompt in prompts
    ]
    del model
    decoder = load_decoder(ModelConfig(path=folder, dtype="float32", max_model_len=256), CPU).decoder
    sequences = make_sequences(prompts, NUM_NEW, 16)
    storage = storage_for(decoder.spec, num_blocks_for(sequences))
    assert run_to_end(ModelRunner(decoder, CpuBackend(storage), storage.layout), sequences) == expected


def test_a_sentence_is_continued_with_sense() -> None:
    folder = cached_model_path(MODEL)
    tokenizer = load_tokenizer(folder)
    decoder = load_decoder(ModelConfig(path=folder, dtype="float32", max_model_len=256), CPU).decoder
    prompt = tokenizer.encode("Paris is the capital of France. Rome is the capital of")
    sequences = make_sequences([prompt], 3, 16)
    storage = storage_for(decoder.spec, num_blocks_for(sequences))
    [ids] = run_to_end(ModelRunner(decoder, CpuBackend(storage), storage.layout), sequences)
    assert tokenizer.decode(ids[len(prompt) :]).startswith(" Italy")
