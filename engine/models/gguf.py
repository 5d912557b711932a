"""One GGUF file made into a model folder: weights de-quantized to fp32, the rest from its metadata.

GGUF is llama.cpp's format. Weights are read with that project's own package; what its metadata says and this
converter doesn't know is refused, not left out. fp32 holds every quantized value exactly, bfloat16 would not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file

from headrace.engine.config import SamplingDefaults
from headrace.engine.errors import ModelLoadError
from headrace.engine.models.checkpoint import CONFIG_FILE, INDEX_FILE, SINGLE_FILE
from headrace.engine.models.generation_defaults import write_generation_config
from headrace.engine.models.gguf_architectures import architecture_of, config_of, head_count
from headrace.engine.models.gguf_rope import ROPE_FACTOR_TENSORS, RopeFactors
from headrace.engine.models.gguf_tokenizer import write_gguf_tokenizer
from headrace.engine.models.json_file import JsonFields
from headrace.engine.runner.protocol import LoadProgress

FORMAT_VERSION = 2
"""Part of a converted folder's place in the cache: raised when conversion changes."""

MAX_SHARD_BYTES = 2 * 1024**3

_STAGE = "converting weights"


def convert_gguf(
    path: Path,
    folder: Path,
    progress: LoadProgress | None = None,
    sampling: SamplingDefaults | None = None,
) -> None:
    """Write a GGUF file as a model folder.

    Args:
        path: the file.
        folder: exists and is empty.
        progress: told the bytes written.
        sampling: what the folder is to suggest; None for nothing.

    Raises:
        ModelLoadError: the file is no GGUF file, is damaged, or holds what can't be converted exactly.
    """
    reader = _open(path)
    metadata = _metadata_of(reader, path)
    shapes = {tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in reader.tensors}
    weights = _TensorReader(path, metadata)
    config = config_of(metadata, shapes, weights.rope_factors(reader.tensors))
    write_gguf_tokenizer(metadata, folder)
    layers = [tensor for tensor in reader.tensors if tensor.name not in ROPE_FACTOR_TENSORS]
    _write_weights(layers, weights, folder, progress)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2))
    names: tuple[str, ...] = ("bos_token_id", "eos_token_id")
    ends = {name: config[name] for name in names if name in config}
    write_generation_config(folder, ends, sampling or SamplingDefaults())


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


def _write_weights(
    tensors: list[ReaderTensor], reader: _TensorReader, folder: Path, progress: LoadProgress | None
) -> None:
    reader.require_known(tensors)
    num_bytes = sum(_num_bytes(tensor) for tensor in tensors)
    num_written = 0
    shards = list(_sharded(tensors))
    files = [SINGLE_FILE] if len(shards) == 1 else _shard_names(len(shards))
    weight_map: dict[str, str] = {}
    for file, shard in zip(files, shards, strict=True):
        values: dict[str, NDArray[np.float32]] = {}
        for tensor in shard:
            values.update(reader.read(tensor))
            num_written += _num_bytes(tensor)
            if progress is not None:
                progress(_STAGE, num_written, num_bytes)
        save_file(values, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(values, file))
    if len(shards) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2))


class _TensorReader:
    """Gives tensors as the reference library keeps them."""

    def __init__(self, path: Path, metadata: JsonFields) -> None:
        self._path = path
        name, self._architecture = architecture_of(metadata)
        num_heads = head_count(metadata, name)
        num_kv_heads = metadata.integer(f"{name}.attention.head_count_kv", num_heads)
        self._paired = (
            {"attn_q": num_heads, "attn_k": num_kv_heads} if self._architecture.has_paired_rows else {}
        )

    def rope_factors(self, tensors: list[ReaderTensor]) -> RopeFactors:
        """What the tensors hold that no layer computes with."""
        return {
            tensor.name: tuple(self._dequantized(tensor).flatten().tolist())
            for tensor in tensors
            if tensor.name in ROPE_FACTOR_TENSORS
        }

    def require_known(self, tensors: list[ReaderTensor]) -> None:
        """Refuse a file that holds more than the architecture has."""
        names = sorted(tensor.name for tensor in tensors)
        if unknown := [name for name in names if self._architecture.target_name(name) is None]:
            raise ModelLoadError(f"{self._path}: tensors that can't be converted: {', '.join(unknown)}")

    def read(self, tensor: ReaderTensor) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """What the reference keeps in this tensor's place: itself, or one for each expert."""
        target = self._architecture.target_name(tensor.name)
        assert target is not None, tensor.name
        values = self._dequantized(tensor)
        part = tensor.name.split(".")[-2]
        if part in self._paired:
            values = _halves_from_pairs(values, self._paired[part])
        if part.endswith("_norm"):
            values = values - np.float32(self._architecture.norm_offset)
        if "{}" not in target:
            yield target, np.ascontiguousarray(values)
            return
        for expert, expert_values in enumerate(values):
            yield target.format(expert), np.ascontiguousarray(expert_values)

    def _dequantized(self, tensor: ReaderTensor) -> NDArray[np.float32]:
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ModelLoadError(
                f"{self._path}: {tensor.name} is stored as {kind}, which the gguf package does not read; "
                "convert the file to one of its other types, such as Q8_0, Q6_K, Q4_K or F16"
            ) from error
        except Exception as error:
            kind = tensor.tensor_type.name
            raise ModelLoadError(
                f"{self._path}: {tensor.name} ({kind}) can't be de-quantized: {error}"
            ) from error
        return values.astype(np.float32, copy=False)


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
