"""How well the cost model foretells real steps: an engine under changing load, each step predicted first.

    .venv/bin/python -m tests.benchmarks.step_costs
    .venv/bin/python -m tests.benchmarks.step_costs --json steps.json

Errors are (predicted - measured) / measured of whole cycles, from the beginning of a step to that of the next
one. The first line is the machine's own restlessness, which no model can foretell: how far a decode step is
from the one before it with as many rows.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from headrace.engine import (
    CacheConfig,
    EngineConfig,
    LoadedModel,
    ModelConfig,
    Request,
    RequestId,
    SamplingParams,
    SchedulerConfig,
    StopConditions,
    load_model,
)
from headrace.engine.core import EngineCore
from headrace.engine.scheduling.cost_model import StepCostModel, StepShape
from tests.benchmarks.options import add_model_options, model_path

# Slots, token budget, seconds, requests per second, share of long prompts.
PHASES = (
    (16, 512, 20, 4.0, 0.0),
    (16, 64, 15, 8.0, 0.0),
    (32, 128, 20, 12.0, 0.0),
    (64, 256, 20, 30.0, 0.0),
    (8, 512, 15, 3.0, 0.3),
    (16, 256, 10, 12.0, 0.0),
)
NUM_FIRST = 50
"""Steps that teach and are not judged."""


def make_request(number: int, rng: random.Random, long_share: float) -> Request:
    """A request; half of them sample."""
    prompt_len = rng.randint(300, 1500) if rng.random() < long_share else rng.randint(16, 128)
    return Request(
        RequestId(str(number)),
        tuple(rng.randrange(100, 40_000) for _ in range(prompt_len)),
        SamplingParams(temperature=0.8 if number % 2 else 0.0, seed=number),
        StopConditions(min(256, max(8, round(rng.expovariate(1 / 70)))), ignore_eos=True),
    )


def cycles(model: LoadedModel, config: EngineConfig) -> Iterator[tuple[StepShape, float]]:
    """Shape and seconds of each step that another one followed at once."""
    rng, number = random.Random(1), 0
    for num_seqs, num_tokens, seconds, rate, long_share in PHASES:
        limits = EngineConfig(config.model, config.cache, SchedulerConfig(num_seqs, num_tokens))
        core = EngineCore(model.info, model.layout, model.tokenizer, limits, time.monotonic)
        end_s = time.monotonic() + seconds
        next_s, last = time.monotonic(), None
        while (now_s := time.monotonic()) < end_s:
            while next_s <= now_s:
                core.add(make_request(number, rng, long_share))
                number += 1
                next_s += rng.expovariate(rate)
            began_s = time.monotonic()
            if last is not None:
                yield last[0], began_s - last[1]
            plan = core.begin_step()
            if plan is None:
                last = None
                time.sleep(max(0.0, next_s - time.monotonic()))
                continue
            core.finish_step(model.runner.execute(plan))
            last = StepShape.of(plan), began_s


def spread(name: str, errors: Sequence[float]) -> str:
    """A line of quantiles."""
    sizes = sorted(abs(error) for error in errors)
    quantiles = "  ".join(
        f"p{p} {sizes[min(len(sizes) - 1, p * len(sizes) // 100)]:6.1%}" for p in (50, 75, 90, 95, 99)
    )
    median = sorted(errors)[len(errors) // 2]
    return f"{name:34s} {len(sizes):6d} steps  |error| {quantiles}  median {median:+.1%}"


def judge(steps: Sequence[tuple[StepShape, float]]) -> Iterator[str]:
    """Predict each step, then learn from it."""
    model = StepCostModel()
    errors: dict[bool, list[float]] = {False: [], True: []}
    restless: list[float] = []
    before: tuple[StepShape, float] | None = None
    for number, (shape, seconds) in enumerate(steps):
        has_prefill = shape.num_prefill_tokens > 0
        if number >= NUM_FIRST:
            errors[has_prefill].append(model.predict(shape) / seconds - 1)
        model.observe(shape, seconds)
        if before is not None and not has_prefill and _kind(before[0]) == _kind(shape):
            restless.append(before[1] / seconds - 1)
        before = shape, seconds
    yield spread("decode step from the one before", restless)
    for has_prefill, name in ((False, "decode steps, predicted"), (True, "steps with prompts, predicted")):
        if errors[has_prefill]:
            yield spread(name, errors[has_prefill])
    yield f"prices: {model.prices}"


def _kind(shape: StepShape) -> tuple[int, int]:
    return shape.num_prefill_tokens, shape.num_decode_tokens


def main() -> None:
    """Read the arguments, measure, judge."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_model_options(parser)
    parser.add_argument("--json", type=Path, help="keep the steps here, or judge those that are there")
    options = parser.parse_args()
    if options.json is not None and options.json.exists():
        steps = [(StepShape(**shape), seconds) for shape, seconds in json.loads(options.json.read_text())]
    else:
        config = EngineConfig(
            ModelConfig(model_path(options)), CacheConfig(4, memory_bytes=2**30), SchedulerConfig(64, 512)
        )
        steps = list(cycles(load_model(config), config))
        if options.json is not None:
            options.json.write_text(json.dumps([(asdict(shape), seconds) for shape, seconds in steps]))
    print("\n".join(judge(steps)))


if __name__ == "__main__":
    main()
