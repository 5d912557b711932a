"""What a constraint costs per token: decode steps with and without one, on a real model.

    .venv/bin/python -m tests.benchmarks.constraints --model DIR --batch 1,16 --tokens 128

Rounds with and without alternate, so that what else the machine does falls on both. Steps are told by this
process's computing time, which a busy machine does not stretch (with one thread: more of them spin while
they wait); the columns are the lowest mean of a round, its ratio to the plain one, and the median and the
worst of the masks alone, for one sequence.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

from headrace.engine import (
    AsyncEngine,
    CompiledConstraint,
    Constraint,
    ConstraintKind,
    EngineConfig,
    ModelConfig,
    Request,
    RequestId,
    SamplingParams,
    StopConditions,
    TokenEvent,
    load_model,
)
from tests.benchmarks.options import add_model_options, model_path, numbers

_PROMPT = "Write a long list of things that a mill needs, as JSON:\n"
_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 30},
        "price": {"type": "number", "minimum": 0},
        "kind": {"enum": ["tool", "grain", "stone", "rope"]},
    },
    "required": ["name", "price", "kind"],
    "additionalProperties": False,
}
# None of them ends before the tokens do.
CONSTRAINTS: dict[str, Constraint | None] = {
    "none": None,
    "schema": Constraint(
        ConstraintKind.JSON_SCHEMA, json.dumps({"type": "array", "items": _ITEM, "minItems": 1000})
    ),
    "regex": Constraint(ConstraintKind.REGEX, "([A-Z][a-z]{2,10}[,;] ){1000}"),
    "grammar": Constraint(ConstraintKind.GRAMMAR, 'root ::= (item "\\n"){1000}\nitem ::= "- " [a-zA-Z ]+\n'),
}


async def step_time(
    engine: AsyncEngine, constraint: CompiledConstraint | None, batch: int, num_tokens: int, prompt: list[int]
) -> float:
    """Computing time of a step, mean of one round, seconds. The few that prefill count too."""
    requests = [
        Request(
            RequestId(f"{time.monotonic_ns()}-{i}"),
            tuple(prompt),
            SamplingParams(seed=i),
            StopConditions(num_tokens, ignore_eos=constraint is None),
            constraint=constraint,
        )
        for i in range(batch)
    ]

    async def drain(request: Request) -> None:
        async for _ in engine.submit(request):
            pass

    num_steps, started_s = engine.load().totals.num_steps, time.process_time()
    await asyncio.gather(*map(drain, requests))
    await engine.wait_idle()
    return (time.process_time() - started_s) / (engine.load().totals.num_steps - num_steps)


async def mask_times(
    engine: AsyncEngine, constraint: CompiledConstraint, num_tokens: int, prompt: list[int]
) -> list[float]:
    """Seconds of each mask along one real output."""
    request = Request(RequestId("masks"), tuple(prompt), SamplingParams(seed=99), StopConditions(num_tokens))
    output: tuple[int, ...] = ()
    async for event in engine.submit(replace(request, constraint=constraint)):
        if isinstance(event, TokenEvent):
            output += event.token_ids
    matcher, times = constraint.start(), []
    for length in range(len(output)):
        started = time.perf_counter()
        matcher.allowed(output[:length])
        times.append(time.perf_counter() - started)
    return times


async def measure(folder: Path, batches: list[int], num_tokens: int, num_rounds: int) -> None:
    config = EngineConfig(ModelConfig(folder), num_threads=1)
    async with AsyncEngine(load_model(config), config) as engine:
        prompt = engine.tokenizer.encode(_PROMPT)
        print(f"{'constraint':12}{'batch':>6}{'step ms':>9}{'ratio':>7}{'mask us':>9}{'worst us':>9}")
        for batch in batches:
            steps: dict[str, list[float]] = {name: [] for name in CONSTRAINTS}
            for _ in range(num_rounds):
                for name, constraint in CONSTRAINTS.items():
                    compiled = None if constraint is None else await engine.constraints.compile(constraint)
                    steps[name].append(await step_time(engine, compiled, batch, num_tokens, prompt))
            plain = min(steps["none"])
            for name, constraint in CONSTRAINTS.items():
                masks = [0.0]
                if constraint is not None:
                    compiled = await engine.constraints.compile(constraint)
                    masks = await mask_times(engine, compiled, num_tokens, prompt)
                step = min(steps[name])
                print(
                    f"{name:12}{batch:6}{step * 1e3:9.2f}{step / plain:7.3f}"
                    f"{statistics.median(masks) * 1e6:9.1f}{max(masks) * 1e6:9.1f}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--batch", type=numbers, default=[1, 16], help="sequences per step")
    parser.add_argument("--tokens", type=int, default=128, help="made by each sequence")
    parser.add_argument("--rounds", type=int, default=3, help="with each constraint")
    options = parser.parse_args()
    asyncio.run(measure(model_path(options), options.batch, options.tokens, options.rounds))


if __name__ == "__main__":
    main()
