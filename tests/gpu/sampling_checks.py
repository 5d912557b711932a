"""What has to hold of sampling on a GPU; see `tests.gpu.checks`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch

from headrace.engine import transfer
from headrace.engine.attention.backend import AttentionBackend
from headrace.engine.config import CacheLayout
from headrace.engine.kv.storage import KVStorage
from headrace.engine.runner import results
from headrace.engine.runner.model_runner import ModelRunner
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.row import SampledRow
from headrace.engine.sampling.sampler import sample
from headrace.engine.scheduling.plan import StepPlan, StepResult
from tests.gpu.checks import BLOCK, NUM_NEW, PROMPTS, decoder_on, paged_backends, placement_of
from tests.support.plan_loop import (
    GREEDY,
    LoopSequence,
    make_sequences,
    num_blocks_for,
    run_ahead_to_end,
    run_to_end,
)

CONTROLS = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=1),
    SamplingParams(temperature=0.9, seed=2, top_k=5),
    SamplingParams(temperature=0.9, seed=3, top_p=0.8, num_logprobs=3),
    SamplingParams(temperature=0.9, seed=4, typical_p=0.8),
    SamplingParams(temperature=0.9, seed=5, min_p=0.1, banned_token_ids=frozenset({7})),
    SamplingParams(temperature=0.9, seed=6, repetition_penalty=1.2, frequency_penalty=0.3),
    SamplingParams(temperature=0.0, logit_bias=((9, 2.0),), num_logprobs=0),
    SamplingParams(temperature=0.0, bad_words=((42, 42), (5,)), presence_penalty=0.4),
    SamplingParams(
        temperature=0.9, seed=7, allowed_token_ids=frozenset(range(50, 90)), num_prompt_logprobs=2
    ),
]
"""Of each kind of sampling one."""


def check_nothing_waits(device: torch.device) -> str:
    """Whatever a step draws by, nobody waits for the device before its results are fetched, once."""
    names = {}
    with decoder_on(device, torch.bfloat16) as decoder:
        for name, build in paged_backends(device).items():
            sequences = make_sequences(PROMPTS * 2, NUM_NEW, BLOCK, CONTROLS)
            layout = CacheLayout(num_blocks_for(sequences), BLOCK)
            attention = build(KVStorage(layout, placement_of(decoder).shape, device))
            steps: list[StepPlan] = []
            runner = ModelRunner(decoder, attention, layout)
            # What the device has to learn once, it learns here: masks and biases of requests are kept.
            run_to_end(runner, make_sequences(PROMPTS * 2, NUM_NEW, BLOCK, CONTROLS), chunk=100)
            with _waiting_refused(device) as fetched:
                run_to_end(runner, sequences, chunk=100, on_step=_noting(steps))
            assert len(fetched) == len(steps), f"{name}: {len(fetched)} fetches in {len(steps)} steps"
            names[name] = len(steps)
    return ", ".join(f"{count} steps by {name}" for name, count in names.items())


def check_tokens_stay_there(device: torch.device) -> str:
    """Steps that are launched before the ones that they follow are fetched draw what known tokens give."""
    names = {}
    plain = [
        controls
        for controls in CONTROLS
        if not controls.needs_history and controls.num_prompt_logprobs is None
    ]
    with decoder_on(device, torch.bfloat16) as decoder:
        for name, build in paged_backends(device).items():

            def outputs(
                run: Callable[[ModelRunner, list[LoopSequence]], list[list[int]]],
                build: Callable[[KVStorage], AttentionBackend] = build,
            ) -> list[list[int]]:
                sequences = make_sequences(PROMPTS, NUM_NEW, BLOCK, plain)
                layout = CacheLayout(num_blocks_for(sequences), BLOCK)
                attention = build(KVStorage(layout, placement_of(decoder).shape, device))
                return run(ModelRunner(decoder, attention, layout), sequences)

            expected = outputs(run_to_end)
            with _waiting_refused(device) as fetched:
                made = outputs(run_ahead_to_end)
            assert made == expected, f"{name}: other tokens"
            names[name] = len(fetched)
    return ", ".join(f"{count} steps by {name}" for name, count in names.items())


def check_draws_agree(device: torch.device) -> str:
    """The device draws what a CPU draws, but for where two tokens meet within rounding."""
    num_each, vocab_size = 64, 9000
    rows = [
        SampledRow(replace(params, seed=seed), 0, 30, 4, tuple(range(3, 33)))
        for params in CONTROLS
        for seed in range(num_each)
    ]
    logits = torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(2)) * 4
    logits[::2] = logits[::2].round()
    expected = sample(logits, rows).token_ids
    drawn = sample(logits.to(device), rows).token_ids.cpu()
    num_other = int((drawn != expected).sum())
    assert num_other <= len(rows) // 100, f"{num_other} of {len(rows)} draws are others than on a CPU"
    return f"{len(rows) - num_other} of {len(rows)} draws are those of a CPU"


SAMPLING_CHECKS: Mapping[str, Callable[[torch.device], str]] = {
    "nothing waits": check_nothing_waits,
    "tokens stay there": check_tokens_stay_there,
    "draws agree": check_draws_agree,
}


def _noting(steps: list[StepPlan]) -> Callable[[StepPlan, StepResult], None]:
    def note(plan: StepPlan, _: StepResult) -> None:
        steps.append(plan)

    return note


@contextmanager
def _waiting_refused(device: torch.device) -> Iterator[list[int]]:
    """While it lasts, whoever waits for a GPU but to fetch results raises; how many numbers were fetched each
    time."""
    fetched: list[int] = []

    class Counted(transfer.Download):
        def numbers(self) -> list[float]:
            if device.type == "cpu":
                numbers = super().numbers()
            else:
                torch.cuda.set_sync_debug_mode("default")
                try:
                    numbers = super().numbers()
                finally:
                    torch.cuda.set_sync_debug_mode("error")
            fetched.append(len(numbers))
            return numbers

    with patch.object(results, "Download", Counted):
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield fetched
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
