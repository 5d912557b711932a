"""How an engine is set up: frozen, checked when built, never filled in later."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from headrace.engine.async_scheduling import AsyncScheduling, check_suits
from headrace.engine.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
MIN_LATENCY_TARGET_S, MAX_LATENCY_TARGET_S = 1e-4, 3600.0
MAX_LATENCY_CLASSES = 64
"""Most priority classes with latency targets of their own."""
MAX_SPECULATIVE_TOKENS = 32
"""Most draft tokens of one sequence in one step that any configuration allows."""
WEIGHT_DTYPES = ("same", "int8", "int4")
MAX_THREADS = 1024
"""Most compute threads: far more than that end the process without a word where there are too few cores."""


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
        device: where to compute: "cpu", "cuda" (the first visible GPU), or "auto", which is the CPU for now.
        cuda_graphs: whether decode steps on a GPU are captured once and replayed.
        kv_splits: whether attention on a GPU may cut a text into parts that are computed at once: faster for
            few long texts; the last bits then depend on what shares the step.
    """

    path: Path
    name: str = ""
    dtype: str = "auto"
    weight_dtype: str = "same"
    max_model_len: int | None = None
    attention_backend: str = "auto"
    device: str = "auto"
    cuda_graphs: bool = True
    kv_splits: bool = True

    def __post_init__(self) -> None:
        _require_one_of("dtype", self.dtype, DTYPES)
        _require_one_of("device", self.device, DEVICES)
        _require_one_of("weight_dtype", self.weight_dtype, WEIGHT_DTYPES)
        _require_at_least("max_model_len", self.max_model_len, 2)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Size of the paged KV pool.

    Args:
        block_size: tokens per block; None takes what suits the device: 4 on a CPU, 256 on a GPU.
        num_blocks: blocks to allocate, the null block not counted; None derives it from `memory_bytes`.
        memory_bytes: memory for K and V together; None derives it from what is free.
        prefix_caching: whether full blocks are kept and shared between requests that begin alike.
        gpu_memory_utilization: how much of a GPU's memory the whole server may take, weights and all, as a
            share of 1; what is left beside weights and activations becomes the pool. No meaning on a CPU.
    """

    block_size: int | None = 16
    num_blocks: int | None = None
    memory_bytes: int | None = None
    prefix_caching: bool = True
    gpu_memory_utilization: float = 0.9

    def __post_init__(self) -> None:
        # A value that is no number fails the comparison, too.
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization={self.gpu_memory_utilization} is out of range: use more than 0, "
                "at most 1"
            )
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
        max_num_waiting: most sequences in the queue; what exceeds it is refused as overloaded.
        max_waiting_tokens: most tokens of those in the queue together, prompts and all that may be made;
            what exceeds it is refused as overloaded.
        max_num_skips: how many requests behind one that doesn't fit yet may be admitted before it;
            after that nobody passes it.
        priority_ageing_s: waiting time after which a request counts as one class higher, seconds.
        client_weights: share of a client relative to others, 0.001 to 1000; 1 for whoever is not in it.
        batching: see `BatchingPolicy`.
        static_batch_wait_s: with `BatchingPolicy.STATIC`, for how long the oldest request waits for others to
            fill up the batch that it is to be in, seconds; a batch that is full begins at once.
        max_unread_tokens: output of one request that its reader has not taken by the next step, tokens and
            logprobs, beyond which it is paused until half of that is left.
        paused_hold_s: how long a paused sequence holds its blocks though nobody needs them, seconds.
        max_num_paused: most sequences that are paused; beyond that the longest paused request of the client
            that has the most of them is ended as overloaded.
        async_scheduling: see `AsyncScheduling`.
    """

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_prefill_chunk: int | None = None
    max_num_waiting: int = 1024
    max_num_skips: int = 64
    batching: BatchingPolicy = BatchingPolicy.CONTINUOUS
    max_waiting_tokens: int = 2**21
    priority_ageing_s: float = 10.0
    client_weights: Mapping[str, float] = field(default_factory=dict)
    static_batch_wait_s: float = 0.05
    max_unread_tokens: int = 1024
    paused_hold_s: float = 10.0
    max_num_paused: int = 1024
    async_scheduling: AsyncScheduling = AsyncScheduling.AUTO

    def __post_init__(self) -> None:
        _require_at_least("max_unread_tokens", self.max_unread_tokens, 1)
        _require_at_least("max_num_paused", self.max_num_paused, 1)
        _require_within("paused_hold_s", self.paused_hold_s, 0.0, 1e9)
        if not 0.0 <= self.static_batch_wait_s < math.inf:
            raise ConfigError(
                f"static_batch_wait_s={self.static_batch_wait_s}: must be a time of 0 s or more, and finite"
            )
        _require_at_least("max_num_seqs", self.max_num_seqs, 1)
        _require_at_least("max_prefill_chunk", self.max_prefill_chunk, 1)
        _require_at_least("max_num_waiting", self.max_num_waiting, 1)
        _require_at_least("max_waiting_tokens", self.max_waiting_tokens, 1)
        _require_at_least("max_num_skips", self.max_num_skips, 0)
        # Beyond these, what a client has had, or how often one has aged, is no exact number any more.
        _require_within("priority_ageing_s", self.priority_ageing_s, 1e-3, 1e9)
        for client, weight in self.client_weights.items():
            _require_within(f"client_weights[{client!r}]", weight, 1e-3, 1e3)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below "
                f"max_num_seqs={self.max_num_seqs}: a step could not hold one token of every running "
                "sequence; raise the first or lower the second"
            )


class Speculation(StrEnum):
    """Who proposes tokens for the model to verify, several in one step (Leviathan et al., 2023)."""

    NONE = "none"
    """Nobody: every step makes one token per sequence."""
    PROMPT_LOOKUP = "prompt_lookup"
    """What followed the same words before, in prompt or output."""
    DRAFT_MODEL = "draft_model"
    """A small model of the same vocabulary."""


class DraftSampling(StrEnum):
    """How drafts of a draft model are judged for a request that is not greedy."""

    AUTO = "auto"
    """Coupled for requests that bring a seed, for they want to be answered alike again; else rejection."""
    COUPLED = "coupled"
    """The target draws each token as it would without drafts, and a draft is kept where it is that token; the
    draft model draws by the same random numbers. A seed gives the same text with and without speculation."""
    REJECTION = "rejection"
    """Rejection sampling: more drafts are kept; the distribution is the same, the text of a seed is not."""


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How several tokens are made in one step.

    Args:
        kind: who proposes.
        draft_model: model folder or GGUF file of the draft model, for `Speculation.DRAFT_MODEL` alone.
        num_speculative_tokens: how many tokens are proposed per step; None lets acceptance and the cost of a
            step decide, from none to `max_speculative_tokens`.
        max_speculative_tokens: most tokens that may be proposed per step, by any request.
        draft_sampling: see `DraftSampling`.
        draft_weight_dtype: how the draft model keeps its weights, as `ModelConfig.weight_dtype`: what it gets
            wrong for that costs drafts, never the output.
    """

    kind: Speculation = Speculation.NONE
    draft_model: Path | None = None
    num_speculative_tokens: int | None = None
    max_speculative_tokens: int = 8
    draft_sampling: DraftSampling = DraftSampling.AUTO
    draft_weight_dtype: str = "same"

    def __post_init__(self) -> None:
        _require_one_of("draft_weight_dtype", self.draft_weight_dtype, WEIGHT_DTYPES)
        _require_at_least("num_speculative_tokens", self.num_speculative_tokens, 1)
        _require_at_least("max_speculative_tokens", self.max_speculative_tokens, 1)
        if self.max_speculative_tokens > MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"max_speculative_tokens={self.max_speculative_tokens} is too large: "
                f"use {MAX_SPECULATIVE_TOKENS} or less"
            )
        if (self.num_speculative_tokens or 0) > self.max_speculative_tokens:
            raise ConfigError(
                f"num_speculative_tokens={self.num_speculative_tokens} is more than "
                f"max_speculative_tokens={self.max_speculative_tokens} allows"
            )
        if (self.kind is Speculation.DRAFT_MODEL) != (self.draft_model is not None):
            raise ConfigError(
                "speculation=draft_model needs a draft_model"
                if self.draft_model is None
                else f"draft_model is given, but speculation={self.kind.value}: use speculation=draft_model"
            )
        if self.num_speculative_tokens is not None and self.kind is Speculation.NONE:
            raise ConfigError("num_speculative_tokens is given, but speculation=none: nobody proposes tokens")


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """Latencies that are promised; None promises nothing.

    Args:
        tpot_s: time per output token: (last token - first token) / (tokens - 1), a figure for each sequence.
        ttft_s: time from a request's arrival to its first token.
    """

    tpot_s: float | None = None
    ttft_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("tpot_s", self.tpot_s), ("ttft_s", self.ttft_s)):
            # A value that is no number fails the comparison, too.
            if value is not None and not MIN_LATENCY_TARGET_S <= value <= MAX_LATENCY_TARGET_S:
                raise ConfigError(
                    f"{name}={value} can't be promised: use {MIN_LATENCY_TARGET_S:g} to "
                    f"{MAX_LATENCY_TARGET_S:g} seconds, or none"
                )

    @property
    def has_any(self) -> bool:
        """Whether anything is promised."""
        return self.tpot_s is not None or self.ttft_s is not None


@dataclass(frozen=True, slots=True)
class LatencyConfig:
    """What is promised to whom, until it is changed at run time.

    Args:
        default: to requests of every priority that is not in `by_priority`.
        by_priority: to requests of a priority class; its targets stand in place of the default's.
        refuses_late: whether a request that can't have its first token in time is refused as overloaded
            when it comes, rather than served late; an idle engine serves it all the same, and learns from it.
    """

    default: LatencyTargets = LatencyTargets()
    by_priority: Mapping[int, LatencyTargets] = field(default_factory=dict)
    refuses_late: bool = False

    def __post_init__(self) -> None:
        if len(self.by_priority) > MAX_LATENCY_CLASSES:
            raise ConfigError(
                f"{len(self.by_priority)} priority classes have latency targets: "
                f"use {MAX_LATENCY_CLASSES} or fewer"
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
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    latency: LatencyConfig = field(default_factory=LatencyConfig)
    check_integrity: bool = True

    def __post_init__(self) -> None:
        _require_at_least("num_threads", self.num_threads, 1)
        if self.num_threads is not None and self.num_threads > MAX_THREADS:
            raise ConfigError(f"num_threads={self.num_threads} is too many: use {MAX_THREADS} or fewer")
        check_suits(self.scheduler.async_scheduling, self.speculation.kind)


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

    def longest(self, max_model_len: int) -> int:
        """The longest sequence that can be served, tokens: what the context and the whole pool allow."""
        return min(max_model_len, self.num_tokens)

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


def _require_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name}={value!r} is not known: use one of {', '.join(known)}")


def _require_at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{name}={value} is too small: use {least} or more")


def _require_within(name: str, value: float, low: float, high: float) -> None:
    # A value that is no number fails the comparison, too.
    if not low <= value <= high:
        raise ConfigError(f"{name}={value:g} can't be: use a number from {low:g} to {high:g}")
