"""What a step costs beside the model, by what its requests ask for.

    .venv/bin/python -m tests.benchmarks.sampling --batch 16 --vocab 49152 --history 512

Every line is one kind of decode step, all of its rows alike, over a model that costs nothing: from the plan
to the results on the host. Median and best of `--steps`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from headrace.engine.attention.backend import (
    AttentionMetadata,
    AttentionSpec,
    AttentionStep,
    Capabilities,
)
from headrace.engine.config import CacheLayout
from headrace.engine.runner.host import prepare_host
from headrace.engine.runner.model_runner import ModelRunner
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.scheduling.plan import ScheduledSequence, StepPlan
from headrace.engine.sequence import SequenceId

BLOCK_SIZE = 16

KINDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top_k 50": SamplingParams(top_k=50),
    "top_p 0.95": SamplingParams(top_p=0.95),
    "typical_p 0.9": SamplingParams(typical_p=0.9),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "greedy, three penalties": SamplingParams(
        temperature=0.0, frequency_penalty=0.3, presence_penalty=0.3, repetition_penalty=1.1
    ),
    "greedy, bias of 300 ids": SamplingParams(
        temperature=0.0, logit_bias=tuple((i, 1.0) for i in range(300))
    ),
    "greedy, 10,000 banned": SamplingParams(temperature=0.0, banned_token_ids=frozenset(range(10_000))),
    "greedy, 10,000 allowed": SamplingParams(temperature=0.0, allowed_token_ids=frozenset(range(10_000))),
    "greedy, 20 bad words": SamplingParams(temperature=0.0, bad_words=tuple((i, i + 1) for i in range(20))),
    "greedy, logprobs 0": SamplingParams(temperature=0.0, num_logprobs=0),
    "greedy, logprobs 5": SamplingParams(temperature=0.0, num_logprobs=5),
    "all of it": SamplingParams(
        temperature=0.8,
        top_p=0.95,
        min_p=0.05,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        num_logprobs=5,
    ),
}


class GivenLogits:
    """A model whose logits are there already."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    @property
    def device(self) -> torch.device:
        return self._logits.device

    def hidden(self, input_ids: Tensor, positions: Tensor, attention: AttentionStep, rows: Tensor) -> Tensor:
        return self._logits[: rows.shape[0]]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


class NoAttention:
    """Attention over nothing."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities("none", frozenset())

    def begin_step(self, metadata: AttentionMetadata) -> AttentionStep:
        return self

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        raise NotImplementedError

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        raise NotImplementedError


def make_plan(params: SamplingParams, num_rows: int, num_known: int, vocab_size: int) -> StepPlan:
    """A decode step of alike rows; half of what each knows is its prompt."""
    chance = random.Random(5)
    known = [tuple(chance.choices(range(vocab_size), k=num_known)) for _ in range(num_rows)]
    return StepPlan(
        0,
        tuple(
            ScheduledSequence(
                sequence_id=SequenceId(i),
                first_position=num_known - 1,
                token_ids=known[i][-1:],
                num_draft_tokens=0,
                block_ids=(1,) * -(-num_known // BLOCK_SIZE),
                is_sampled=True,
                sampling=params,
                num_prompt_tokens=num_known // 2,
                known_token_ids=known[i] if params.needs_history else (),
                num_logprobs=params.num_logprobs,
            )
            for i in range(num_rows)
        ),
    )


def step_times(runner: ModelRunner, plan: StepPlan, num_steps: int, now: Callable[[], float]) -> list[float]:
    """Seconds of each step, after some that don't count."""
    times = []
    for i in range(num_steps + 3):
        started = now()
        runner.execute(plan)
        if i >= 3:
            times.append(now() - started)
    return times


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--history", type=int, default=512, help="known tokens of each row")
    parser.add_argument("--spread", type=float, default=5.0, help="standard deviation of the logits")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu with --threads 1 suits a busy machine"
    )
    options = parser.parse_args()
    prepare_host(options.threads)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(options.batch, options.vocab, generator=generator) * options.spread
    runner = ModelRunner(GivenLogits(logits), NoAttention(), CacheLayout(2, BLOCK_SIZE))
    now = time.perf_counter if options.clock == "wall" else time.process_time
    for name, params in KINDS.items():
        plan = make_plan(params, options.batch, options.history, options.vocab)
        times = step_times(runner, plan, options.steps, now)
        print(
            f"{name:26s} median {1e3 * statistics.median(times):7.2f} ms   best {1e3 * min(times):7.2f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
