"""Builders of requests and configurations with short names for what a test is about."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

from headrace.engine import (
    BatchingPolicy,
    CompiledConstraint,
    EngineConfig,
    ModelConfig,
    OutputParams,
    Request,
    RequestId,
    SamplingParams,
    SchedulerConfig,
    Speculation,
    SpeculationConfig,
    SpeculationParams,
    StopConditions,
)

GREEDY = SamplingParams(temperature=0.0)
_ids = count()


def make_request(
    *,
    prompt: tuple[int, ...] | None = None,
    prompt_len: int = 4,
    max_tokens: int | None = 8,
    request_id: str | None = None,
    sampling: SamplingParams = GREEDY,
    stop_token_ids: frozenset[int] = frozenset(),
    ignore_eos: bool = False,
    stop_strings: tuple[str, ...] = (),
    is_stop_included: bool = False,
    time_limit_s: float | None = None,
    deadline_s: float | None = None,
    output: OutputParams | None = None,
    is_echoed: bool = False,
    min_tokens: int = 0,
    n: int = 1,
    best_of: int | None = None,
    isolation_key: str = "",
    uses_prefix_cache: bool = True,
    priority: int = 0,
    client: str = "",
    constraint: CompiledConstraint | None = None,
    speculation: SpeculationParams | None = None,
) -> Request:
    """A request; prompts of different requests differ unless given."""
    number = next(_ids)
    return Request(
        request_id=RequestId(request_id or f"r{number}"),
        prompt_token_ids=prompt
        if prompt is not None
        else tuple((number * 7 + i) % 97 for i in range(prompt_len)),
        sampling=sampling,
        stop=StopConditions(
            max_tokens, stop_token_ids, ignore_eos, stop_strings, is_stop_included, min_tokens
        ),
        output=output or OutputParams(is_echoed=is_echoed),
        time_limit_s=time_limit_s,
        deadline_s=deadline_s,
        n=n,
        best_of=n if best_of is None else best_of,
        isolation_key=isolation_key,
        uses_prefix_cache=uses_prefix_cache,
        priority=priority,
        client=client,
        constraint=constraint,
        speculation=speculation or SpeculationParams(),
    )


def make_config(
    *,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_prefill_chunk: int | None = None,
    max_num_waiting: int = 1024,
    max_num_skips: int = 64,
    batching: BatchingPolicy = BatchingPolicy.CONTINUOUS,
    max_waiting_tokens: int = 2**21,
    priority_ageing_s: float = 10.0,
    speculation: SpeculationConfig | None = None,
    **reading: Any,
) -> EngineConfig:
    """An engine configuration small enough for a test.

    Args:
        reading: what is done about readers that lag, by the names of `SchedulerConfig`.
    """
    return EngineConfig(
        model=ModelConfig(Path("unused")),
        scheduler=SchedulerConfig(
            max_num_seqs,
            max_num_batched_tokens,
            max_prefill_chunk,
            max_num_waiting,
            max_num_skips,
            batching,
            max_waiting_tokens,
            priority_ageing_s,
            **reading,
        ),
        speculation=speculation or SpeculationConfig(),
    )


def speculating(
    kind: Speculation, num_tokens: int | None = None, *, most: int = 8, **options: Any
) -> SpeculationConfig:
    """How a server speculates.

    Args:
        num_tokens: of each step; None lets it adapt.
        most: the most that any request may have.
        options: further fields of the configuration.
    """
    draft_model = Path("unused") if kind is Speculation.DRAFT_MODEL else None
    return SpeculationConfig(kind, draft_model, num_tokens, most, **options)
