"""What it gains to prepare the next step while a device runs one: tokens per second with and without.

    python -m tests.benchmarks.ahead --rows 64 --step-ms 5

The device is simulated: a step takes it so many milliseconds, without this machine's processor, and it takes
steps in the order in which they were launched. All that the host does is real: scheduling, laying out the
batch, taking in what was drawn, telling it to as many readers. The ideal is a device that never waits.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from headrace.engine import (
    AsyncEngine,
    AsyncScheduling,
    CacheLayout,
    EngineConfig,
    LoadedModel,
    ModelConfig,
    ModelInfo,
    SchedulerConfig,
    TokenStream,
)
from headrace.engine.batch import build_batch
from headrace.engine.scheduling.plan import RowResult, StepPlan, StepResult
from tests.support.fake_runner import FakeTokenizer
from tests.support.requests import make_request

BLOCK_SIZE = 16
PROMPT_LEN = 32


@dataclass(frozen=True)
class SimulatedStep:
    """A step on the simulated device, and when it is through."""

    plan: StepPlan
    due_s: float

    def fetch(self) -> StepResult:
        time.sleep(max(0.0, self.due_s - time.monotonic()))
        step = self.plan.step
        return StepResult(
            tuple(
                RowResult((97 + (step + i) % 26,) if row.is_sampled else ())
                for i, row in enumerate(self.plan.rows)
            )
        )


class SimulatedDevice:
    """See `Runner`.

    Args:
        step_s: what each step takes.
    """

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._idle_from_s = 0.0

    def launch(self, plan: StepPlan) -> SimulatedStep:
        build_batch(plan, BLOCK_SIZE)
        self._idle_from_s = max(self._idle_from_s, time.monotonic()) + self._step_s
        return SimulatedStep(plan, self._idle_from_s)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).fetch()

    def close(self) -> None:
        """Nothing is held."""


def make_model(step_s: float, num_rows: int, num_tokens: int) -> LoadedModel:
    """A model of the simulated device with room for all rows."""
    longest = PROMPT_LEN + num_tokens
    layout = CacheLayout(1 + num_rows * -(-longest // BLOCK_SIZE), BLOCK_SIZE)
    info = ModelInfo("simulated", "none", longest, 258, frozenset(), None, "none", 0)
    return LoadedModel(info, layout, SimulatedDevice(step_s), FakeTokenizer(), computes_apart=True)


async def read(stream: TokenStream) -> None:
    """Take all that is told."""
    async for _ in stream:
        pass


async def tokens_per_second(
    scheduling: AsyncScheduling, step_s: float, num_rows: int, num_tokens: int
) -> float:
    """Of steps in which all rows decode."""
    config = EngineConfig(
        ModelConfig(Path("unused")),
        scheduler=SchedulerConfig(
            max_num_seqs=num_rows,
            max_num_batched_tokens=num_rows * PROMPT_LEN,
            async_scheduling=scheduling,
        ),
    )
    model = make_model(step_s, num_rows, num_tokens)
    async with AsyncEngine(model, config) as engine:
        streams = [
            engine.submit(make_request(prompt_len=PROMPT_LEN, max_tokens=num_tokens)) for _ in range(num_rows)
        ]
        began_s = time.perf_counter()
        await asyncio.gather(*(read(stream) for stream in streams))
        return num_rows * num_tokens / (time.perf_counter() - began_s)


def main() -> None:
    """Measure both in turn, and print medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=64, help="sequences that decode together")
    parser.add_argument("--step-ms", type=float, default=5.0, help="what the device takes for a step")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each sequence")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    measured: dict[AsyncScheduling, list[float]] = {AsyncScheduling.OFF: [], AsyncScheduling.ON: []}
    for _ in range(args.rounds):
        for scheduling, rates in measured.items():
            rates.append(
                asyncio.run(tokens_per_second(scheduling, args.step_ms / 1e3, args.rows, args.tokens))
            )
    off, on = (statistics.median(rates) for rates in measured.values())
    ideal = 1e3 * args.rows / args.step_ms
    print(f"{args.rows} rows, {args.step_ms:g} ms per step on the device, {args.tokens} tokens each")
    print(f"  ideal    {ideal:10.0f} tokens/s")
    for name, rate in (("off", off), ("on", on)):
        step_ms, share = 1e3 * args.rows / rate, 100 * rate / ideal
        print(f"  {name:8} {rate:10.0f} tokens/s, {step_ms:.2f} ms per step, {share:.0f} % of ideal")
    print(f"  on / off {on / off:10.2f}")


if __name__ == "__main__":
    main()
