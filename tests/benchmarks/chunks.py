"""What the token budget trades: long prompts' first tokens against the gaps of answers that run meanwhile.

    .venv/bin/python -m tests.benchmarks.chunks --budgets 64,128,256,512,1024,2048

For each `max_num_batched_tokens`: some requests decode all along, long prompts arrive one after the other.
Told are the long prompts' TTFT (median), the longest gap of the others while such a prompt was computed,
their ITL while none was (median), and all tokens of the run over its time, those of prompts included.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass, field

from headrace.engine import (
    AsyncEngine,
    CacheConfig,
    EngineConfig,
    LoadedModel,
    ModelConfig,
    SchedulerConfig,
    load_model,
)
from tests.benchmarks.options import add_compute_options, add_model_options, model_path, numbers
from tests.support.requests import make_request

MAX_LEN = 4096


@dataclass(slots=True)
class Run:
    """Moments of one run, seconds.

    Args:
        gaps: of each token of the running answers: when it came, and how long after the one before.
        prefills: when a long prompt was sent and when its first token came.
    """

    gaps: list[tuple[float, float]] = field(default_factory=list)
    prefills: list[tuple[float, float]] = field(default_factory=list)
    num_tokens: int = 0
    duration_s: float = 0.0

    def line(self, budget: int) -> str:
        """A row of the table."""
        beside = [gap for end, gap in self.gaps if self._is_beside_a_prefill(end - gap, end)]
        alone = [gap for end, gap in self.gaps if not self._is_beside_a_prefill(end - gap, end)]
        ttft_s = statistics.median(first - sent for sent, first in self.prefills)
        cells = (ttft_s, max(beside), statistics.median(alone))
        told = " | ".join(f"{1e3 * cell:.0f}" for cell in cells)
        return f"| {budget} | {told} | {self.num_tokens / self.duration_s:.0f} |"

    def _is_beside_a_prefill(self, begin: float, end: float) -> bool:
        return any(begin < first and end > sent for sent, first in self.prefills)


async def measure(model: LoadedModel, config: EngineConfig, options: argparse.Namespace) -> Run:
    """Let answers run, and send long prompts until all are through."""
    run = Run()
    async with AsyncEngine(model, config) as engine:
        running = [asyncio.Event() for _ in range(options.running)]

        async def answer(number: int) -> None:
            before_s = 0.0
            request = make_request(prompt=_prompt(32, number), max_tokens=MAX_LEN - 32, ignore_eos=True)
            async for _ in engine.submit(request):
                now_s = time.perf_counter()
                if before_s:
                    run.gaps.append((now_s, now_s - before_s))
                before_s = now_s
                running[number].set()

        answers = [asyncio.create_task(answer(number)) for number in range(options.running)]
        await asyncio.gather(*(event.wait() for event in running))
        began_s = time.perf_counter()
        run.gaps.clear()
        for number in range(options.prompts):
            request = make_request(prompt=_prompt(options.prompt_len, 100 + number), max_tokens=1)
            sent_s = time.perf_counter()
            async for _ in engine.submit(request):
                # Its one token.
                run.prefills.append((sent_s, time.perf_counter()))
                break
            await asyncio.sleep(options.pause)
        run.duration_s = time.perf_counter() - began_s
        run.num_tokens = len(run.gaps) + options.prompts * options.prompt_len
        for task in answers:
            task.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
    return run


def _prompt(length: int, number: int) -> tuple[int, ...]:
    return tuple(1_000 + (number * 7919 + i * 31) % 40_000 for i in range(length))


def main() -> None:
    """Read the arguments, measure, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_options(parser)
    add_compute_options(parser)
    parser.add_argument(
        "--budgets", type=numbers, default=[64, 128, 256, 512, 1024, 2048], help="max_num_batched_tokens"
    )
    parser.add_argument("--running", type=int, default=8, help="answers that run all along")
    parser.add_argument("--prompts", type=int, default=4, help="long prompts, one after the other")
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two of them")
    options = parser.parse_args()
    path = model_path(options)
    print("| budget | TTFT, ms | longest gap beside it, ms | ITL alone, ms | tokens/s |")
    print("|---" * 5 + "|")
    for budget in options.budgets:
        config = EngineConfig(
            model=ModelConfig(
                path, dtype=options.dtype, weight_dtype=options.weight_dtype, max_model_len=MAX_LEN
            ),
            cache=CacheConfig(block_size=4, num_blocks=12_000, prefix_caching=False),
            scheduler=SchedulerConfig(options.running + 1, budget),
            num_threads=options.threads,
        )
        run = asyncio.run(measure(load_model(config), config, options))
        print(run.line(budget), flush=True)


if __name__ == "__main__":
    main()
