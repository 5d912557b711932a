"""Tiny GGUF files, written with llama.cpp's own package in the layout that its converter gives a Llama."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, TokenType
from gguf.quants import quantize
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

from tests.support.tiny_models import (
    CHAT_TEMPLATE,
    END_OF_TEXT_ID,
    IM_END_ID,
    IM_START_ID,
    SPECIAL_TOKENS,
    tiny_llama,
    tiny_tokenizer,
)

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_tiny_gguf(
    path: Path,
    *,
    model: LlamaForCausalLM | None = None,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    pre: str | None = "smollm",
    tokenizer_model: str = "gpt2",
    add_bos: bool | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    linear_rope_factor: float | None = None,
    extra_numbers: Mapping[str, int] | None = None,
    extra_tensors: Mapping[str, NDArray[np.float32]] | None = None,
) -> Path:
    """Write a file.

    Args:
        model: whose weights; None takes `tiny_llama` with a tied head.
        kind: how matrices are stored; vectors stay fp32.
        pre, tokenizer_model, add_bos, chat_template: tokenizer metadata; None leaves it out.
        linear_rope_factor: declares linear rope scaling.
        extra_numbers, extra_tensors: further metadata and tensors, under these names.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    model = model or tiny_llama(tie_word_embeddings=True)
    writer = GGUFWriter(path, "llama")
    _add_shape(writer, model)
    _add_tokenizer(writer, pre, tokenizer_model, add_bos, chat_template)
    if linear_rope_factor is not None:
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(linear_rope_factor)
    for key, number in (extra_numbers or {}).items():
        writer.add_uint32(key, number)
    _add_tensors(writer, model, kind)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_shape(writer: GGUFWriter, model: LlamaForCausalLM) -> None:
    config: Any = model.config
    writer.add_name("Tiny mill")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(
    writer: GGUFWriter, pre: str | None, tokenizer_model: str, add_bos: bool | None, chat_template: str | None
) -> None:
    fields = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    tokens = sorted(fields["model"]["vocab"], key=fields["model"]["vocab"].__getitem__)
    writer.add_tokenizer_model(tokenizer_model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [TokenType.CONTROL if token in SPECIAL_TOKENS else TokenType.NORMAL for token in tokens]
    )
    writer.add_token_merges([" ".join(merge) for merge in fields["model"]["merges"]])
    writer.add_bos_token_id(IM_START_ID)
    writer.add_eos_token_id(IM_END_ID)
    writer.add_unk_token_id(END_OF_TEXT_ID)
    writer.add_pad_token_id(IM_END_ID)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    if chat_template is not None:
        writer.add_chat_template(chat_template)


def _add_tensors(writer: GGUFWriter, model: LlamaForCausalLM, kind: GGMLQuantizationType) -> None:
    config: Any = model.config
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values: NDArray[np.float32] = tensor.float().numpy()
        if "q_proj" in name:
            values = _pairs_from_halves(values, config.num_attention_heads)
        elif "k_proj" in name:
            values = _pairs_from_halves(values, config.num_key_value_heads)
        if values.ndim == 1 or kind is GGMLQuantizationType.F32:
            writer.add_tensor(_gguf_name(name), values)
        else:
            writer.add_tensor(_gguf_name(name), quantize(values, kind), raw_dtype=kind)


def _pairs_from_halves(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """llama.cpp turns neighbouring rows of a head together, transformers those half a head apart."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def _gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        index, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{index}.{_NAMES[part]}.{suffix}"
    return f"{_NAMES[stem]}.{suffix}"
