"""What can be known before weights are fetched or read: whether the machine can do what is asked of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headrace.engine.attention.select import check_backend
from headrace.engine.config import EngineConfig
from headrace.engine.errors import ConfigError, ModelLoadError
from headrace.engine.kv.storage import KVShape, available_memory, gib, plan_layout
from headrace.engine.models.checkpoint import Checkpoint
from headrace.engine.models.layers import is_packed
from headrace.engine.models.loader import (
    DTYPES,
    check_dtype,
    choose_max_len,
    choose_weight_kind,
    read_spec,
    settle_weight_kind,
    suits_kept,
)
from headrace.engine.models.reduced_head import REDUCED_HEAD_FILE
from headrace.engine.models.rope import rotary_bytes
from headrace.engine.models.spec import EMBEDDING, DecoderSpec
from headrace.engine.native.quantised import WeightKind
from headrace.engine.runner.device import find_device
from headrace.engine.runner.placement import attention_task

_LEAST_BYTES = {WeightKind.INT8: 1.0, WeightKind.INT4: 0.5, WeightKind.KEPT_BF16: 2.0}
"""Of a weight: what is beside the linear layers takes more."""
_MOST_OF_LEAST = 1.25
"""Numbers of four bits have a scale for every 32 or more."""
_LEAST_LEN = 256


def check_machine(config: EngineConfig) -> None:
    """Check what needs no file of the model: device, types, attention backend, and memory given in bytes.

    Raises:
        ConfigError: this machine can't do it; it says what it can.
    """
    device = find_device(config.model.device)
    wanted = config.model.dtype
    check_dtype(wanted, device)
    choose_weight_kind(config.model.weight_dtype, device)
    if config.speculation.draft_model is not None:
        choose_weight_kind(config.speculation.draft_weight_dtype, device)
    check_backend(config.model.attention_backend, attention_task(config, device, dtype=DTYPES.get(wanted)))
    pool, free = config.cache.memory_bytes, available_memory(device)
    # Of a model that is here, more is known soon: with its weights, how large the pool may be.
    if pool is not None and pool > free and not config.model.path.is_dir():
        raise ConfigError(
            f"memory_bytes={pool} ({gib(pool)}) is more than the {gib(free)} that are free: "
            "use less by what weights and activations take, free memory, or leave it out for what fits"
        )


def check_room(config: EngineConfig, device: torch.device, dtype: torch.dtype, available_bytes: int) -> None:
    """Check what config.json tells: whether the attention backend suits, and whether weights, rotary tables
    and a useful KV pool find room. What they take at least is counted, so nothing is refused that would fit.

    Args:
        dtype: to compute in.
        available_bytes: memory that may be taken now.

    Raises:
        ModelLoadError: a config.json can't be served.
        ConfigError: it can't work; where a shorter sequence would, the longest that does is named.
    """
    _, spec = read_spec(config.model.path)
    check_backend(config.model.attention_backend, attention_task(config, device, spec, dtype))
    wanted_len = config.model.max_model_len
    max_len = spec.default_len if wanted_len is None else choose_max_len(wanted_len, spec)
    kind = _weight_kind(config.model.path, spec, config.model.weight_dtype, dtype, device)
    model = _Planned(spec, dtype, kind, max_len, device)
    draft_path = config.speculation.draft_model
    draft = None if draft_path is None else _draft(config, draft_path, device, dtype)
    problem = _lack_of_memory(config, device, available_bytes, model, draft)
    if problem is None:
        return
    for shorter in _shorter(max_len):
        planned = replace(model, max_len=shorter)
        if _lack_of_memory(config, device, available_bytes, planned, draft) is None:
            raise ConfigError(
                f"{problem}. Sequences of up to {max_len} tokens alone take {gib(model.rotary_bytes)} for "
                f"their rotary tables: --max-model-len {shorter} fits, with the KV memory as it is "
                "(--kv-memory)"
            )
    raise problem


@dataclass(frozen=True, slots=True)
class _Planned:
    """A decoder that is not there yet."""

    spec: DecoderSpec
    dtype: torch.dtype
    kind: WeightKind
    max_len: int
    device: torch.device
    has_reduced_head: bool = False

    @property
    def weight_bytes(self) -> int:
        """At least."""
        shapes = self.spec.tensors()
        num_weights = sum(math.prod(shape) for shape in shapes.values())
        if self.spec.tied_head and not self.has_reduced_head:
            # The embedding is looked up row by row, so a packed head is a second one.
            num_weights += math.prod(shapes[EMBEDDING]) * is_packed(self.dtype, self.device, self.kind)
        return int(num_weights * _LEAST_BYTES.get(self.kind, self.dtype.itemsize))

    @property
    def most_weight_bytes(self) -> int:
        """About at most: embeddings and heads may stay as they are, and packed numbers have scales."""
        if self.kind is WeightKind.SAME:
            return self.weight_bytes
        at_the_ends = 2 * math.prod(self.spec.tensors()[EMBEDDING]) * self.dtype.itemsize
        return int(_MOST_OF_LEAST * self.weight_bytes) + at_the_ends

    @property
    def rotary_bytes(self) -> int:
        """For all positions."""
        return len(self.spec.ropes) * self.max_len * rotary_bytes(self.spec.head_dim, self.dtype)

    @property
    def kv_shape(self) -> KVShape:
        """K and V of one of its tokens."""
        return KVShape(self.spec.num_layers, self.spec.num_kv_heads, self.spec.head_dim, self.dtype)


def _draft(config: EngineConfig, path: Path, device: torch.device, dtype: torch.dtype) -> _Planned:
    _, spec = read_spec(path)
    check_backend(config.model.attention_backend, attention_task(config, device, spec, dtype))
    has_reduced_head = (path / REDUCED_HEAD_FILE).is_file()
    if has_reduced_head:
        # A head of its own that lies in the folder, too, is not read.
        spec = replace(spec, tied_head=True)
    kind = _weight_kind(path, spec, config.speculation.draft_weight_dtype, dtype, device)
    return _Planned(spec, dtype, kind, spec.default_len, device, has_reduced_head)


def _weight_kind(
    folder: Path, spec: DecoderSpec, weight_dtype: str, dtype: torch.dtype, device: torch.device
) -> WeightKind:
    """How weights are going to be kept."""
    kind = choose_weight_kind(weight_dtype, device)
    try:
        with Checkpoint(folder) as checkpoint:
            return settle_weight_kind(kind, checkpoint, spec, dtype, device)
    except ModelLoadError:
        # Whoever reads the weights says what is wrong with them: until then they count as little as they may.
        may_be_kept = kind is WeightKind.SAME and suits_kept(dtype, device)
        return WeightKind.KEPT_BF16 if may_be_kept else kind


def _lack_of_memory(
    config: EngineConfig, device: torch.device, free: int, model: _Planned, draft: _Planned | None
) -> ConfigError | None:
    planned = [model] if draft is None else [model, draft]
    weights = sum(each.weight_bytes for each in planned)
    if weights > free:
        return ConfigError(
            f"the weights take {gib(weights)}, but {gib(free)} are free: free memory, take a smaller model "
            "or type (--dtype bfloat16), or fewer bits (--weight-dtype)"
        )
    rotary = sum(each.rotary_bytes for each in planned)
    left = free - weights - rotary
    if left < 0:
        return ConfigError(
            f"{gib(free)} are free: too little for weights of {gib(weights)} and rotary tables of "
            f"{gib(rotary)}"
        )
    try:
        plan_layout(
            config.cache,
            model.kv_shape,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=model.max_len,
            available_bytes=left,
            device=device,
            draft_shape=None if draft is None else draft.kv_shape,
            unsure_bytes=sum(each.most_weight_bytes - each.weight_bytes for each in planned),
        )
    except ConfigError as error:
        return error
    return None


def _shorter(max_len: int) -> Iterator[int]:
    """Powers of two below, the greatest first."""
    length = 1 << max(0, max_len - 1).bit_length()
    while (length := length // 2) >= _LEAST_LEN:
        yield length
