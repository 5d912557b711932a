"""The real default model against transformers: ids, weights, logits."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.engine.config import ModelConfig, SamplingDefaults
from headrace.engine.models.loader import load_decoder
from headrace.engine.models.tokenizer import load_tokenizer
from headrace.engine.tokenizer import Chat, ChatMessage
from tests.support.contiguous_attention import ContiguousAttention
from tests.support.default_model import default_model_path

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

CPU = torch.device("cpu")

# llama.cpp's ids. The spaces before a digit are what a plain byte-level tokenizer gets wrong.
LLAMA_CPP_IDS = {
    "In 2024 there are  3 items": [788, 216, 34, 32, 34, 36, 665, 359, 256, 35, 3723],
    "  12 34": [256, 33, 34, 216, 35, 36],
    "1 2  3": [33, 216, 34, 256, 35],
    "a 1": [81, 216, 33],
    "x=10": [104, 45, 33, 32],
}


@pytest.mark.parametrize("text", LLAMA_CPP_IDS)
def test_ids_of_digits_and_spaces_equal_llama_cpps(text: str) -> None:
    assert load_tokenizer(default_model_path()).encode(text) == LLAMA_CPP_IDS[text]


def test_the_description_is_the_published_one() -> None:
    info = load_decoder(ModelConfig(path=default_model_path(), dtype="bfloat16"), CPU).info
    assert (info.name, info.family) == ("smollm2-135m-instruct", "llama")
    assert (info.max_model_len, info.vocab_size, info.num_parameters) == (8192, 49152, 134_515_008)
    assert info.eos_token_ids == {2}
    assert info.bos_token_id == 1
    assert info.sampling_defaults == SamplingDefaults(temperature=0.2, top_p=0.9)


@torch.inference_mode()
def test_logits_of_a_chat_equal_the_references_at_every_position() -> None:
    folder = default_model_path()
    tokenizer = load_tokenizer(folder)
    chat = Chat((ChatMessage("user", "In 1851 a wheel of 9 metres was built. How wide was it, and when?"),))
    ids = torch.tensor(tokenizer.encode_chat(tokenizer.render_chat(chat)))
    positions = torch.arange(len(ids))
    decoder = load_decoder(ModelConfig(path=folder, dtype="float32"), CPU).decoder
    ours = decoder.forward(ids, positions, ContiguousAttention(), positions)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids[None]).logits[0]
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
