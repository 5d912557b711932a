"""Where a step's time goes, from one step of the whole engine to the next.

    .venv/bin/python -m tests.benchmarks.step_parts
    .venv/bin/python -m tests.benchmarks.step_parts --weight-dtype same,int8,int4 --json parts.json

An engine serves as many requests as there are slots, each read by a task of its own, as a server's are. What
is timed is a cycle: from the beginning of a step that only decodes to that of the next. The model is its
layers and its head. The rest is what serving them costs.

| part | what it is |
|---|---|
| schedule | who computes what, and blocks for them |
| hand over | to the model's thread and back, with what else the event loop does |
| batch | the plan as tensors |
| layers | embedding, all layers, attention in them |
| head | hidden states to logits |
| sample | draws, and the results as the core takes them |
| update | results into sequences: text, stops, ends |
| publish | into the requests' streams, and what their readers do with it |
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headrace.engine import (
    AsyncEngine,
    CacheConfig,
    EngineConfig,
    LoadedModel,
    ModelConfig,
    Request,
    RequestId,
    SamplingParams,
    SchedulerConfig,
    StopConditions,
)
from headrace.engine.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionStep,
    Capabilities,
)
from headrace.engine.attention.select import select_backend
from headrace.engine.config import CacheLayout
from headrace.engine.kv.storage import KVStorage
from headrace.engine.models.forward import ForwardModel
from headrace.engine.models.loader import load_decoder
from headrace.engine.models.tokenizer import load_tokenizer
from headrace.engine.runner.host import prepare_host
from headrace.engine.runner.model_runner import ModelRunner
from headrace.engine.scheduling.plan import StepPlan, StepResult
from tests.benchmarks.options import add_compute_options, add_model_options, model_path, numbers
from tests.support.blocking import Blocking

PARTS = ("schedule", "hand over", "batch", "layers", "head", "sample", "update", "publish")
MODEL_PARTS = frozenset({"layers", "head"})
BLOCK_SIZE = 4
WARM_STEPS = 8


@dataclass(slots=True)
class Moments:
    """When the current step's parts began and ended, seconds."""

    executed: float = 0.0
    batched: float = 0.0
    layered: float = 0.0
    headed: float = 0.0
    done: float = 0.0


class MarkedModel:
    """Notes when the layers and the head are through."""

    def __init__(self, inner: ForwardModel, moments: Moments) -> None:
        self._inner, self._moments = inner, moments

    @property
    def device(self) -> torch.device:
        return self._inner.device

    def hidden(self, input_ids: Tensor, positions: Tensor, attention: AttentionStep, rows: Tensor) -> Tensor:
        hidden = self._inner.hidden(input_ids, positions, attention, rows)
        self._moments.layered = time.monotonic()
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._inner.logits(hidden)
        self._moments.headed = time.monotonic()
        return logits


class MarkedBackend:
    """Notes when the batch is laid out. Its steps are the backend's own, so layers run as they always do."""

    def __init__(self, inner: AttentionBackend, moments: Moments) -> None:
        self._inner, self._moments = inner, moments

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def begin_step(self, metadata: AttentionMetadata) -> AttentionStep:
        self._moments.batched = time.monotonic()
        return self._inner.begin_step(metadata)


@dataclass(frozen=True, slots=True)
class MarkedStep:
    """What the runner saw of a step."""

    plan: StepPlan
    moments: Moments


class MarkedRunner(Blocking):
    """Keeps each step's moments."""

    def __init__(self, inner: ModelRunner, moments: Moments) -> None:
        self._inner, self._moments = inner, moments
        self.steps: dict[int, MarkedStep] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        self._moments.executed = time.monotonic()
        result = self._inner.execute(plan)
        moments = self._moments
        kept = Moments(
            moments.executed, moments.batched, moments.layered, moments.headed, done=time.monotonic()
        )
        self.steps[plan.step] = MarkedStep(plan, kept)
        return result

    def close(self) -> None:
        self._inner.close()


def load(config: EngineConfig) -> tuple[LoadedModel, MarkedRunner]:
    """A model whose runner takes notes, over a pool with room for all slots."""
    device = torch.device("cpu")
    loaded = load_decoder(config.model, device)
    decoder = loaded.decoder
    layout = CacheLayout((config.cache.num_blocks or 1) + 1, BLOCK_SIZE)
    moments = Moments()
    backend = MarkedBackend(select_backend("auto", KVStorage(layout, decoder.kv_shape, device)), moments)
    runner = MarkedRunner(ModelRunner(MarkedModel(decoder, moments), backend, layout), moments)
    tokenizer = load_tokenizer(config.model.path)
    return LoadedModel(loaded.info, layout, runner, tokenizer), runner


async def cycles(
    model: LoadedModel,
    runner: MarkedRunner,
    config: EngineConfig,
    sampling: SamplingParams,
    lengths: tuple[int, int],
) -> list[dict[str, float]]:
    """The parts of each cycle in which all slots decode, seconds.

    Args:
        lengths: tokens of each prompt, and of each answer.
    """
    prompt_len, num_steps = lengths
    async with AsyncEngine(model, config) as engine:

        async def read(number: int) -> None:
            request = Request(
                RequestId(str(number)),
                tuple(100 + (number * 7919 + i * 31) % 40_000 for i in range(prompt_len)),
                sampling,
                StopConditions(num_steps, ignore_eos=True),
            )
            async for _ in engine.submit(request):
                pass

        watch = engine.watch_steps()
        await asyncio.gather(*(read(number) for number in range(config.scheduler.max_num_seqs)))
        await engine.wait_idle()
        watch.close()
        stats = [stats async for _, stats in watch]
    num_slots = config.scheduler.max_num_seqs
    full = [
        (now, then)
        for now, then in itertools.pairwise(stats)
        if len(now.rows) == len(then.rows) == num_slots
        and then.step == now.step + 1
        and now.num_prefill_tokens == then.num_prefill_tokens == 0
    ]
    timed = []
    for now, then in full[WARM_STEPS:]:
        seen = runner.steps[now.step].moments
        planned = now.started_s + now.schedule_s
        updating = planned + now.execute_s
        timed.append(
            {
                "schedule": now.schedule_s,
                "hand over": (seen.executed - planned) + (updating - seen.done),
                "batch": seen.batched - seen.executed,
                "layers": seen.layered - seen.batched,
                "head": seen.headed - seen.layered,
                "sample": seen.done - seen.headed,
                "update": now.update_s,
                "publish": then.started_s - updating - now.update_s,
            }
        )
    return timed


def medians(timed: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each part, milliseconds."""
    return {part: 1e3 * statistics.median(cycle[part] for cycle in timed) for part in PARTS}


def line(name: str, parts: Mapping[str, float]) -> str:
    """A row of the table."""
    total = sum(parts.values())
    beside = total - sum(parts[part] for part in MODEL_PARTS)
    cells = " | ".join(f"{parts[part]:.2f}" for part in PARTS)
    return f"| {name} | {total:.2f} | {cells} | {beside / total:.1%} |"


def main() -> None:
    """Read the arguments, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_model_options(parser)
    add_compute_options(parser, has_several=True)
    parser.add_argument("--batch", type=numbers, default=[1, 16], help="slots")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=100, help="tokens of each answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--json", type=Path, help="write the table's numbers here, milliseconds")
    options = parser.parse_args()
    prepare_host(options.threads)
    path = model_path(options)
    sampling = SamplingParams(temperature=options.temperature, top_p=options.top_p)
    num_blocks = max(options.batch) * -(-(options.prompt + options.steps + 1) // BLOCK_SIZE)
    print(f"| medians, ms | cycle | {' | '.join(PARTS)} | beside the model |")
    print("|---" * (len(PARTS) + 3) + "|")
    results = {}
    for weight_dtype in options.weight_dtype:
        model_config = ModelConfig(path, dtype=options.dtype, weight_dtype=weight_dtype)
        for num_slots in options.batch:
            config = EngineConfig(
                model_config, CacheConfig(BLOCK_SIZE, num_blocks=num_blocks), SchedulerConfig(num_slots, 512)
            )
            model, runner = load(config)
            timed = asyncio.run(cycles(model, runner, config, sampling, (options.prompt, options.steps)))
            name = f"{model.info.dtype if weight_dtype == 'same' else weight_dtype}, {num_slots} rows"
            results[name] = medians(timed)
            print(line(name, results[name]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
