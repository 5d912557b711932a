"""One GGUF file made into a model folder: weights de-quantized to fp32, the rest from its metadata.

GGUF is llama.cpp's format. Weights are read with that project's own package; what its metadata says and this
converter doesn't know is refused, not left out. fp32 holds every quantized value exactly, bfloat16 would not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file

from headrace.engine.errors import ModelLoadError
from headrace.engine.models.checkpoint import CONFIG_FILE, INDEX_FILE, SINGLE_FILE
from headrace.engine.models.generation_defaults import GENERATION_CONFIG_FILE
from headrace.engine.models.gguf_tokenizer import write_gguf_tokenizer
from headrace.engine.models.json_file import JsonFields
from headrace.engine.runner.protocol import LoadProgress

FORMAT_VERSION = 1
"""Part of a converted folder's place in the cache: raised when conversion changes."""

MAX_SHARD_BYTES = 2 * 1024**3

_STAGE = "converting weights"

_GLOBAL_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_KNOWN_KEYS = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
}


def convert_gguf(path: Path, folder: Path, progress: LoadProgress | None = None) -> None:
    """Write a GGUF file as a model folder.

    Args:
        path: the file.
        folder: exists and is empty.
        progress: told the bytes written.

    Raises:
        ModelLoadError: the file is no GGUF file, is damaged, or holds what can't be converted exactly.
    """
    reader = _open(path)
    metadata = _metadata_of(reader, path)
    config = _config_of(metadata, reader.tensors)
    write_gguf_tokenizer(metadata, folder)
    _write_weights(path, reader.tensors, config, folder, progress)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2))
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    (folder / GENERATION_CONFIG_FILE).write_text(json.dumps(generation, indent=2))


def _open(path: Path) -> GGUFReader:
    try:
        return GGUFReader(path)
    except FileNotFoundError:
        raise ModelLoadError(f"{path} is missing") from None
    except Exception as error:
        # The reader walks offsets that it takes from the file: on a damaged one it may fail in any way.
        raise ModelLoadError(f"{path} is no GGUF file, or is damaged or cut short: {error}") from error


def _metadata_of(reader: GGUFReader, path: Path) -> JsonFields:
    try:
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:
        raise ModelLoadError(f"{path}: the metadata is damaged: {error}") from error
    return JsonFields(fields, str(path))


def _config_of(metadata: JsonFields, tensors: list[ReaderTensor]) -> dict[str, object]:
    """The config.json that the reference library would use for this file."""
    architecture = metadata.text("general.architecture")
    if architecture != "llama":
        raise metadata.error(f"the architecture {architecture!r} is not supported as GGUF; supported: llama")
    unknown = {
        key
        for key in metadata.keys
        if key.startswith("llama.")
        and key.removeprefix("llama.") not in _KNOWN_KEYS
        and metadata.raw(key) != 0
    }
    if unknown:
        raise metadata.error(f"{', '.join(sorted(unknown))} can't be converted")
    heads = metadata.integer("llama.attention.head_count")
    hidden_size = metadata.integer("llama.embedding_length")
    head_dim = metadata.integer("llama.attention.key_length", hidden_size // heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if metadata.integer(key, head_dim) != head_dim:
            raise metadata.error(f"{key} differs from the head width {head_dim}, which is not supported")
    shapes = {tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in tensors}
    if "token_embd.weight" not in shapes:
        raise metadata.error("the tensor token_embd.weight is missing")
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden_size,
        "intermediate_size": metadata.integer("llama.feed_forward_length"),
        "num_hidden_layers": metadata.integer("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.integer("llama.context_length"),
        "rms_norm_eps": _shortest(metadata.number("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(metadata.number("llama.rope.freq_base", 10_000.0)),
        "rope_scaling": _rope_scaling(metadata),
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        # A file without a head computes it from the embedding.
        "tie_word_embeddings": "output.weight" not in shapes,
        "eos_token_id": _eos_token_ids(metadata),
    }
    for name, key in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        if metadata.raw(f"tokenizer.ggml.{key}") is not None:
            config[name] = metadata.integer(f"tokenizer.ggml.{key}", at_least=0)
    return config


def _shortest(value: float) -> float:
    """The decimal number that was meant: the file holds its rounding to 32 bits."""
    return float(str(np.float32(value)))


def _eos_token_ids(metadata: JsonFields) -> list[int]:
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    return sorted({token_id for key in keys for token_id in metadata.integers(key)})


def _rope_scaling(metadata: JsonFields) -> dict[str, object] | None:
    kind = metadata.text("llama.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise metadata.error(f"rope scaling {kind!r} can't be converted exactly; supported: none, linear")
    return {"rope_type": kind, "factor": _shortest(metadata.number("llama.rope.scaling.factor"))}


def _target_name(name: str) -> str | None:
    """What the reference library calls a tensor; None for one that it doesn't have."""
    stem, _, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):
        return None
    if stem in _GLOBAL_TENSORS:
        return f"{_GLOBAL_TENSORS[stem]}.{suffix}"
    match stem.split("."):
        case ["blk", index, part] if index.isdecimal() and part in _LAYER_TENSORS:
            return f"model.layers.{int(index)}.{_LAYER_TENSORS[part]}.{suffix}"
        case _:
            return None


def _write_weights(
    path: Path,
    tensors: list[ReaderTensor],
    config: Mapping[str, object],
    folder: Path,
    progress: LoadProgress | None,
) -> None:
    named = {tensor.name: target for tensor in tensors if (target := _target_name(tensor.name)) is not None}
    if unknown := sorted(tensor.name for tensor in tensors if tensor.name not in named):
        raise ModelLoadError(f"{path}: tensors that can't be converted: {', '.join(unknown)}")
    num_bytes = sum(_num_bytes(tensor) for tensor in tensors)
    num_written = 0
    shards = list(_sharded(tensors))
    files = [SINGLE_FILE] if len(shards) == 1 else _shard_names(len(shards))
    weight_map: dict[str, str] = {}
    for file, shard in zip(files, shards, strict=True):
        values: dict[str, NDArray[np.float32]] = {}
        for tensor in shard:
            values[named[tensor.name]] = _values_of(path, tensor, config)
            num_written += _num_bytes(tensor)
            if progress is not None:
                progress(_STAGE, num_written, num_bytes)
        save_file(values, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(values, file))
    if len(shards) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2))


def _values_of(path: Path, tensor: ReaderTensor, config: Mapping[str, object]) -> NDArray[np.float32]:
    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except Exception as error:
        kind = tensor.tensor_type.name
        raise ModelLoadError(f"{path}: {tensor.name} ({kind}) can't be de-quantized: {error}") from error
    values = values.astype(np.float32, copy=False)
    part = tensor.name.split(".")[-2]
    if part in ("attn_q", "attn_k"):
        num_heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        assert isinstance(num_heads, int)
        values = _halves_from_pairs(values, num_heads)
    return np.ascontiguousarray(values)


def _halves_from_pairs(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's order of a head's rows: it turns pairs (0, 1), the reference turns (0, D/2)."""
    paired = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def _num_bytes(tensor: ReaderTensor) -> int:
    return math.prod(int(size) for size in tensor.shape) * np.dtype(np.float32).itemsize


def _sharded(tensors: list[ReaderTensor]) -> Iterator[list[ReaderTensor]]:
    """Cut the tensors into runs that fit a file, so that one file's worth is in memory at once."""
    shard: list[ReaderTensor] = []
    shard_bytes = 0
    for tensor in tensors:
        if shard and shard_bytes + _num_bytes(tensor) > MAX_SHARD_BYTES:
            yield shard
            shard, shard_bytes = [], 0
        shard.append(tensor)
        shard_bytes += _num_bytes(tensor)
    yield shard


def _shard_names(count: int) -> list[str]:
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
