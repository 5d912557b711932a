"""Tiny random Llamas, written by transformers itself, with a tiny tokenizer that can spell any text.

Seeded: the same arguments write the same weights. Small enough to be made anew in each test.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 512
END_OF_TEXT_ID = 0
IM_START_ID = 1
IM_END_ID = 2
MAX_POSITIONS = 256

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = (
    "The mill stands where the river bends, and the wheel turns as long as the channel is full.",
    "A keeper opens the gate in the morning and closes it when the grain has been ground.",
    "When three carts wait, the miller fills every hopper and leaves no stone idle.",
    "Water that runs past the wheel does no work; water that waits behind the gate does none either.",
    "How many sacks of flour are 12 sacks and 30 sacks? The answer is 42 sacks of flour.",
    "In 1847 the old wheel broke, and in 1851 a new one of iron was built at 9 metres across.",
    "Zürich, Łódź, São Paulo and Малага are cities; 水車 is a water wheel, and 🌊 is a wave.",
    "def turn(wheel, water):\n    while water.level > 0:\n        wheel.step()\n    return wheel\n",
)


def write_tiny_llama(
    folder: Path, *, seed: int = 0, max_shard_size: str = "5GB", **config_overrides: Any
) -> Path:
    """Write a checkpoint that the engine and transformers both load: weights in fp32, config, tokenizer.

    Args:
        folder: made if it's missing.
        seed: of the weights.
        max_shard_size: as `save_pretrained` takes it; "50KB" gives several shards.
        config_overrides: arguments of `LlamaConfig` in place of the tiny ones.

    Returns:
        `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tiny_llama(seed=seed, **config_overrides).save_pretrained(folder, max_shard_size=max_shard_size)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_llama(*, seed: int = 0, **config_overrides: Any) -> LlamaForCausalLM:
    """The model that `write_tiny_llama` writes: 2 layers, 64 wide, 4 query heads over 2 KV heads, fp32."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        # Wide enough that the best two logits are seldom close and that positions matter.
        "initializer_range": 0.15,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": IM_END_ID,
        "pad_token_id": IM_END_ID,
        "attn_implementation": "eager",
    }
    config = LlamaConfig(**{**settings, **config_overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # transformers starts norms at one and biases at zero: a decoder without either would pass.
                if name.endswith("norm.weight"):
                    parameter.uniform_(0.5, 1.5)
                elif name.endswith(".bias"):
                    parameter.normal_(0.0, 0.3)
    return model.eval()


def tiny_tokenizer(*, chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `VOCAB_SIZE` entries: every text round-trips; ids 0, 1, 2 are special."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained_tokenizer_json()),
        bos_token=SPECIAL_TOKENS[END_OF_TEXT_ID],
        eos_token=SPECIAL_TOKENS[IM_END_ID],
        pad_token=SPECIAL_TOKENS[IM_END_ID],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template
    return fast


@cache
def _trained_tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer.to_str()
