"""Tiny random models of every family, written by transformers itself, with a tiny tokenizer for any text.

Seeded: the same arguments write the same weights. Small enough to be made anew in each test.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

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

WINDOW = 24
"""Of the tiny models that have a sliding window: much shorter than what tests generate."""

_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.5, 4.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 12.0, 16.0],
}

FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "mistral, no window": ("Mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, upper layers windowed": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
            "num_hidden_layers": 4,
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3, biases": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "gemma": ("Gemma", {"head_dim": 24, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 24,
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 40,
            # Low enough to bend what random weights give.
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 24,
            "num_hidden_layers": 7,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 40,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "phi3": ("Phi3", {"sliding_window": WINDOW}),
    "phi3, longrope": (
        "Phi3",
        {
            "rope_parameters": _LONGROPE,
            "original_max_position_embeddings": 200,
            "max_position_embeddings": 800,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.22,
            "logits_scaling": 2.5,
            "attention_bias": True,
        },
    ),
    "smollm3": (
        "SmolLM3",
        {"num_hidden_layers": 5, "no_rope_layer_interval": 2, "tie_word_embeddings": True},
    ),
    "smollm3, windowed": (
        "SmolLM3",
        {
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "no_rope_layers": [1, 0, 1, 0],
        },
    ),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "stablelm, parallel": (
        "StableLm",
        {
            "use_parallel_residual": True,
            "qk_layernorm": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "mixtral": ("Mixtral", {**_EXPERTS, "sliding_window": WINDOW}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            **_EXPERTS,
            "head_dim": 24,
            "moe_intermediate_size": 48,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe, not normalised": (
        "Qwen3Moe",
        {**_EXPERTS, "head_dim": 16, "moe_intermediate_size": 48, "num_experts_per_tok": 3},
    ),
}
"""Name of a variant: its class in transformers without what all classes end in, and its settings."""

CORPUS = (
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


def write_tiny_family(folder: Path, variant: str, *, seed: int = 0, **config_overrides: Any) -> Path:
    """Write a checkpoint of one of `FAMILIES`, with config and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_family(variant, seed=seed, **config_overrides).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_family(variant: str, *, seed: int = 0, **config_overrides: Any) -> PreTrainedModel:
    """The model that `write_tiny_family` writes: as `tiny_llama`, of another family."""
    stem, settings = FAMILIES[variant]
    config_class = getattr(transformers, f"{stem}Config" if stem != "Gemma3" else "Gemma3TextConfig")
    model_class = getattr(transformers, f"{stem}ForCausalLM")
    return _tiny(config_class, model_class, seed, {**settings, **config_overrides})


def tiny_llama(*, seed: int = 0, **config_overrides: Any) -> LlamaForCausalLM:
    """The model that `write_tiny_llama` writes: 2 layers, 64 wide, 4 query heads over 2 KV heads, fp32."""
    model = _tiny(LlamaConfig, LlamaForCausalLM, seed, config_overrides)
    assert isinstance(model, LlamaForCausalLM)
    return model


def _tiny(
    config_class: type[Any], model_class: type[Any], seed: int, overrides: Mapping[str, Any]
) -> PreTrainedModel:
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
    config = config_class(**{**settings, **overrides})
    stored_from_one = config.model_type.startswith("gemma")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # transformers starts norms at one, or at nothing beside one, and biases at zero: a decoder
                # without either would pass.
                if name.endswith(".bias"):
                    parameter.normal_(0.0, 0.3)
                elif "norm" in name:
                    low, high = (-0.5, 0.5) if stored_from_one else (0.5, 1.5)
                    parameter.uniform_(low, high)
                elif name.endswith("mlp.gate.weight"):
                    parameter.normal_(0.0, 0.5)
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
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()
