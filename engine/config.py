"""How an engine is set up: frozen, checked when built, never filled in later."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from headrace.engine.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
WEIGHT_DTYPES = ("same", "int8", "int4")


class BatchingPolicy(StrEnum):
    """When waiting requests may join the batch."""

    CONTINUOUS = "continuous"
    """At every step (iteration-level scheduling, Orca, OSDI '22)."""
    STATIC = "static"
    """Only when the last batch is finished whole. Kept to be measured against."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which weights, and how they are computed.

    Args:
        path: a model folder (config.json, safetensors, tokenizer files) or one GGUF file.
        name: what clients call the model; empty takes the folder's or file's name.
        dtype: compute and KV type; "auto" takes what is fast and right on this device.
        weight_dtype: how the weights of linear layers are kept: "same" as `dtype`, or in eight or four bits
            with a scale for every 32 of them, which is faster, smaller, and changes the output a little.
        max_model_len: longest sequence, prompt and output together, tokens; None takes the model's own limit.
        attention_backend: name of a backend of `headrace.engine.attention`; "auto" picks for the device.
    """

    path: Path
    name: str = ""
    dtype: str = "auto"
    weight_dtype: str = "same"
    max_model_len: int | None = None
    attention_backend: str = "auto"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r} is not known: use one of {', '.join(DTYPES)}")
        if self.weight_dtype not in WEIGHT_DTYPES:
            raise ConfigError(
                f"weight_dtype={self.weight_dtype!r} is not known: use one of {', '.join(WEIGHT_DTYPES)}"
            )
        _require_at_least("max_model_len", self.max_model_len, 2)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Size of the paged KV pool.

    Args:
        block_size: tokens per block.
        num_blocks: blocks to allocate, the null block not counted; None derives it from `memory_bytes`.
        memory_bytes: memory for K and V together; None derives it from what is free.
        prefix_caching: whether full blocks are kept and shared between requests that begin alike.
    """

    block_size: int = 16
    num_blocks: int | None = None
    memory_bytes: int | None = None
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        _require_at_least("block_size", self.block_size, 1)
        _require_at_least("num_blocks", self.num_blocks, 1)
        _require_at_least("memory_bytes", self.memory_bytes, 1)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step and of the queue.

    Args:
        max_num_seqs: slots: most sequences in one step.
        max_num_batched_tokens: token budget: most tokens in one step, prefill and decode together.
        max_prefill_chunk: most prompt tokens of one sequence in one step; None leaves it to the budget.
        max_num_waiting: most requests in the queue; one more is refused as overloaded.
        max_num_skips: how many later requests may be admitted before one that doesn't fit yet;
            after that nobody passes it.
        batching: see `BatchingPolicy`.
    """

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_prefill_chunk: int | None = None
    max_num_waiting: int = 1024
    max_num_skips: int = 64
    batching: BatchingPolicy = BatchingPolicy.CONTINUOUS

    def __post_init__(self) -> None:
        _require_at_least("max_num_seqs", self.max_num_seqs, 1)
        _require_at_least("max_prefill_chunk", self.max_prefill_chunk, 1)
        _require_at_least("max_num_waiting", self.max_num_waiting, 1)
        _require_at_least("max_num_skips", self.max_num_skips, 0)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below "
                f"max_num_seqs={self.max_num_seqs}: a step could not hold one token of every running "
                "sequence; raise the first or lower the second"
            )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine.

    Args:
        num_threads: compute threads; None takes the number of usable cores.
        check_integrity: audit the KV pool each time the engine goes idle.
    """

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    num_threads: int | None = None
    check_integrity: bool = True

    def __post_init__(self) -> None:
        _require_at_least("num_threads", self.num_threads, 1)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The KV pool as allocated.

    Args:
        num_blocks: all block ids, the null block 0 included.
        block_size: tokens per block.
    """

    num_blocks: int
    block_size: int

    def __post_init__(self) -> None:
        if self.num_blocks < 2:
            raise ConfigError("the KV pool needs the null block and at least one more: give it more memory")
        _require_at_least("block_size", self.block_size, 1)

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that sequences can hold."""
        return self.num_blocks - 1

    @property
    def num_tokens(self) -> int:
        """Tokens that all sequences together can hold."""
        return self.num_usable_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens of one sequence take."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a model's files suggest for sampling; what they leave open is neutral.

    Whether they apply to requests that leave a control open is the server's to decide.

    Args:
        temperature, top_k, top_p, min_p, repetition_penalty: as `SamplingParams` has them.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is served, as read from the model's files.

    Args:
        family: architecture family, such as "llama".
        max_model_len: longest sequence that is served, tokens.
        vocab_size: rows of the embedding; every token id is below it.
        eos_token_ids: union of the end ids that any of the model's files declares.
        sampling_defaults: what the files suggest; nothing applies it by itself.
    """

    name: str
    family: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    dtype: str
    num_parameters: int
    sampling_defaults: SamplingDefaults = SamplingDefaults()


def _require_at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{name}={value} is too small: use {least} or more")
