"""Tiny GGUF files, written with llama.cpp's own package in the layout that its converter gives."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, RopeScalingType, TokenType
from gguf.quants import quantize
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedModel

from tests.support.tiny_models import (
    CHAT_TEMPLATE,
    CORPUS,
    END_OF_TEXT_ID,
    IM_END_ID,
    IM_START_ID,
    SPECIAL_TOKENS,
    tiny_family,
    tiny_llama,
    tiny_tokenizer,
)

_ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
}
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
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_GEMMA_NAMES = {
    **_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_tiny_gguf(
    path: Path,
    *,
    model: PreTrainedModel | None = None,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    pre: str | None = "smollm",
    tokenizer_model: str = "gpt2",
    add_bos: bool | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    linear_rope_factor: float | None = None,
    extra_numbers: Mapping[str, int | float | str] | None = None,
    extra_tensors: Mapping[str, NDArray[Any]] | None = None,
) -> Path:
    """Write a file.

    Args:
        model: whose weights; None takes `tiny_llama` with a tied head.
        kind: how matrices are stored; vectors stay fp32. Some types can only be stored with random values.
        pre, tokenizer_model, add_bos, chat_template: tokenizer metadata; None leaves it out.
        linear_rope_factor: declares linear rope scaling.
        extra_numbers, extra_tensors: further metadata, of texts too, and tensors, under these names.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    model = model or tiny_llama(tie_word_embeddings=True)
    writer = GGUFWriter(path, _ARCHITECTURES[model.config.model_type])
    _add_shape(writer, model)
    _add_tokenizer(writer, pre, tokenizer_model, add_bos, chat_template)
    if linear_rope_factor is not None:
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(linear_rope_factor)
    for key, number in (extra_numbers or {}).items():
        if isinstance(number, str):
            writer.add_string(key, number)
        elif isinstance(number, float):
            writer.add_float32(key, number)
        else:
            writer.add_uint32(key, number)
    _add_tensors(writer, model, kind)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_shape(writer: GGUFWriter, model: PreTrainedModel) -> None:
    config: Any = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_name("Tiny mill")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    if head_dim * config.num_attention_heads == config.hidden_size:
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if config.model_type.startswith("gemma") or config.model_type == "phi3":
        writer.add_sliding_window(config.sliding_window or 0)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_vocab_size(config.vocab_size)


def sentencepiece_metadata(*, has_prefix: bool = False) -> dict[str, Any]:
    """`tokenizer.ggml` fields of a small SentencePiece vocabulary.

    Args:
        has_prefix: as files of Llama 2 have them; otherwise as those of Gemma do.
    """
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    if has_prefix:
        # Of these vocabularies no piece goes over the border between two words.
        trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False)
    # What is found whole is never part of a piece.
    trained.train_from_iterator([" ".join(text.split()) for text in CORPUS], trainer)
    vocabulary = trained.get_vocab()
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    control = ["<pad>", "<eos>", "<bos>", "<unk>"]
    # Tokens that are found whole; spaces stand in them as they are.
    whole = [] if has_prefix else ["\n", "\n\n", "  ", "   ", "<b>"]
    in_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    return {
        "model": "llama",
        "pre": "default",
        "tokens": [*control, *whole, *in_bytes, *pieces],
        "scores": [
            *[-1000.0] * (len(control) + len(whole)),
            *[0.0] * len(in_bytes),
            *[-float(rank) for rank in range(len(pieces))],
        ],
        "token_type": [
            *[TokenType.CONTROL.value] * len(control),
            *[TokenType.USER_DEFINED.value] * len(whole),
            *[TokenType.BYTE.value] * len(in_bytes),
            *[TokenType.NORMAL.value] * len(pieces),
        ],
        "padding_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "unknown_token_id": 3,
        "add_bos_token": True,
        "add_eos_token": False,
        "add_space_prefix": has_prefix,
    }


def write_sentencepiece_gguf(path: Path, architecture: str = "gemma3", **changes: Any) -> Path:
    """Write a file with that tokenizer, and with a model of as many tokens.

    Args:
        architecture: "gemma3", or "llama" or "phi3", which put a space before a text.
        changes: tokenizer fields in place of those.
    """
    fields = sentencepiece_metadata(has_prefix=architecture != "gemma3") | changes
    size = {"vocab_size": len(fields["tokens"])}
    model = (
        tiny_family("gemma3", query_pre_attn_scalar=24, **size)
        if architecture == "gemma3"
        else tiny_family(architecture, **size)
    )
    writer = GGUFWriter(path, architecture)
    _add_shape(writer, model)
    writer.add_tokenizer_model(fields["model"])
    writer.add_tokenizer_pre(fields["pre"])
    writer.add_token_list(fields["tokens"])
    writer.add_token_scores(fields["scores"])
    writer.add_token_types(fields["token_type"])
    for name in ("padding", "eos", "bos", "unknown"):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", fields[f"{name}_token_id"])
    for name in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        writer.add_bool(f"tokenizer.ggml.{name}", fields[name])
    _add_tensors(writer, model, GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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


def _add_tensors(writer: GGUFWriter, model: PreTrainedModel, kind: GGMLQuantizationType) -> None:
    config: Any = model.config
    is_gemma = config.model_type.startswith("gemma")
    for name, values in _split_tensors(model):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if config.model_type == "llama" and "q_proj" in name:
            values = _pairs_from_halves(values, config.num_attention_heads)  # noqa: PLW2901
        elif config.model_type == "llama" and "k_proj" in name:
            values = _pairs_from_halves(values, config.num_key_value_heads)  # noqa: PLW2901
        if is_gemma and name.endswith("norm.weight"):
            values = values + np.float32(1)  # noqa: PLW2901
        target = _gguf_name(name, _GEMMA_NAMES if is_gemma else _NAMES)
        if values.ndim == 1 or kind is GGMLQuantizationType.F32:
            writer.add_tensor(target, values)
        else:
            writer.add_tensor(target, _stored(values, kind), raw_dtype=kind)


def _stored(values: NDArray[np.float32], kind: GGMLQuantizationType) -> NDArray[Any]:
    """A matrix as a file keeps it; random, where the package reads a type and doesn't write it."""
    try:
        return quantize(values, kind)
    except NotImplementedError:
        block_size, type_size = GGML_QUANT_SIZES[kind]
        num_bytes = values.shape[-1] // block_size * type_size
        # Bytes so small make no infinite scale, wherever in a block it may stand.
        random = np.random.default_rng(values.size)
        return random.integers(0, 0x40, (*values.shape[:-1], num_bytes), dtype=np.uint8)


def _split_tensors(model: PreTrainedModel) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Tensors as the converter sees them: experts' gate and up apart."""
    for name, tensor in model.state_dict().items():
        values: NDArray[np.float32] = tensor.float().numpy()
        if name.endswith("experts.gate_up_proj"):
            gate, up = np.split(values, 2, axis=1)
            stem = name.removesuffix("gate_up_proj")
            yield f"{stem}gate_proj.weight", np.ascontiguousarray(gate)
            yield f"{stem}up_proj.weight", np.ascontiguousarray(up)
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", values
        else:
            yield name, values


def _pairs_from_halves(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """llama.cpp turns neighbouring rows of a head together, transformers those half a head apart."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def _gguf_name(name: str, names: Mapping[str, str]) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        index, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{index}.{names[part]}.{suffix}"
    return f"{names[stem]}.{suffix}"
