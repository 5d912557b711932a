"""Two hundred generations within ten JSON schemas by a real model: how many are valid, and how fast.

    .venv/bin/python -m tests.benchmarks.json_schemas --model DIR

Each schema has as many sequences of one request; all ten run at once. A line for each schema, then the sum.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path

import jsonschema

from headrace.engine import (
    AsyncEngine,
    CacheConfig,
    Constraint,
    ConstraintKind,
    EngineConfig,
    FinishEvent,
    FinishReason,
    ModelConfig,
    Request,
    RequestId,
    SamplingParams,
    SchedulerConfig,
    StopConditions,
    TokenEvent,
    load_model,
)
from tests.benchmarks.options import add_model_options, model_path
from tests.support.schemas import SCHEMAS


@dataclass
class Tally:
    """What became of one schema's sequences."""

    num_valid: int = 0
    num_cut: int = 0
    num_faulty: int = 0
    num_tokens: int = 0


async def tally_of(engine: AsyncEngine, name: str, num_each: int, max_tokens: int) -> Tally:
    """Generate within one schema, and judge each text by `jsonschema`."""
    source = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMAS[name], ensure_ascii=False))
    prompt = f"Write a JSON value, such as a form about '{name}' would hold:\n"
    request = Request(
        RequestId(name),
        tuple(engine.tokenizer.encode(prompt)),
        sampling=SamplingParams(temperature=1.0, seed=len(name)),
        stop=StopConditions(max_tokens),
        n=num_each,
        best_of=num_each,
        constraint=await engine.constraints.compile(source),
    )
    texts, tally = [""] * num_each, Tally()
    async for event in engine.submit(request):
        match event:
            case TokenEvent():
                texts[event.index] += event.text
                tally.num_tokens += len(event.token_ids)
            case FinishEvent(reason=FinishReason.STOP):
                is_valid = _is_valid(texts[event.index], name)
                tally.num_valid += is_valid
                tally.num_faulty += not is_valid
            case FinishEvent():
                tally.num_cut += 1
            case _:
                raise SystemExit(f"{name}: {event}")
    return tally


def _is_valid(text: str, name: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), SCHEMAS[name], format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


async def measure(model: Path, num_each: int, max_tokens: int) -> None:
    """Run all and print."""
    config = EngineConfig(ModelConfig(model), CacheConfig(num_blocks=512), SchedulerConfig(max_num_seqs=20))
    async with AsyncEngine(await asyncio.to_thread(load_model, config), config) as engine:
        await engine.constraints.prepare()
        started = time.perf_counter()
        tallies = dict(
            zip(
                SCHEMAS,
                await asyncio.gather(*(tally_of(engine, name, num_each, max_tokens) for name in SCHEMAS)),
                strict=True,
            )
        )
        seconds = time.perf_counter() - started
    print(f"{'schema':<20} {'valid':>6} {'cut':>5} {'faulty':>7} {'tokens':>7}")
    for name, tally in tallies.items():
        print(
            f"{name:<20} {tally.num_valid:>6} {tally.num_cut:>5} {tally.num_faulty:>7} {tally.num_tokens:>7}"
        )
    num_tokens = sum(tally.num_tokens for tally in tallies.values())
    num_valid = sum(tally.num_valid for tally in tallies.values())
    print(
        f"{num_valid} of {num_each * len(SCHEMAS)} valid; {num_tokens} tokens in {seconds:.1f} s, "
        f"{num_tokens / seconds:.0f} tokens/s"
    )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_model_options(parser)
    parser.add_argument("--each", type=int, default=20, help="sequences of each schema")
    parser.add_argument("--tokens", type=int, default=400, help="most tokens of a sequence")
    options = parser.parse_args()
    asyncio.run(measure(model_path(options), options.each, options.tokens))


if __name__ == "__main__":
    main()
