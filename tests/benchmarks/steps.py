"""Where a step's time goes: decode steps at some batch sizes, and one long prompt, on a real model.

    .venv/bin/python -m tests.benchmarks.steps --model DIR --dtype bfloat16 --batch 1,8,16 --context 256

Every line is one kind of step. `best` and `median` are of whole steps; the other columns are means over the
same steps: plan to tensors, attention's shared work, KV writes, attention, the rest of the forward pass,
and what is left (sampling, results). To time the parts, the decoder is kept from running all layers in one
compiled call; `--whole` lets it, and times whole steps alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from headrace.engine.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    AttentionStep,
    Capabilities,
)
from headrace.engine.attention.select import select_backend
from headrace.engine.config import CacheLayout, ModelConfig
from headrace.engine.kv.storage import KVStorage
from headrace.engine.models.forward import ForwardModel
from headrace.engine.models.loader import load_decoder
from headrace.engine.runner.host import prepare_host
from headrace.engine.runner.model_runner import ModelRunner
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.scheduling.plan import ScheduledSequence, StepPlan
from headrace.engine.sequence import SequenceId
from tests.benchmarks.options import add_compute_options, add_model_options, model_path, numbers

T = TypeVar("T")


class Clock:
    """Seconds by part, since the last `reset`."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def time(self, part: str, work: Callable[[], T]) -> T:
        started = self.now()
        result = work()
        self.seconds[part] += self.now() - started
        return result


class TimedBackend:
    """Times another backend's calls."""

    def __init__(self, inner: AttentionBackend, clock: Clock) -> None:
        self._inner, self._clock = inner, clock

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def begin_step(self, metadata: AttentionMetadata) -> AttentionStep:
        return TimedStep(self._clock.time("begin", lambda: self._inner.begin_step(metadata)), self._clock)


class TimedStep:
    def __init__(self, inner: AttentionStep, clock: Clock) -> None:
        self._inner, self._clock = inner, clock

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._clock.time("write", lambda: self._inner.write_kv(layer, key, value))

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        return self._clock.time("attend", lambda: self._inner.attend(layer, query, spec))


class TimedModel:
    """Times a whole forward pass, attention included."""

    def __init__(self, inner: ForwardModel, clock: Clock) -> None:
        self._inner, self._clock = inner, clock

    @property
    def device(self) -> torch.device:
        return self._inner.device

    def hidden(self, input_ids: Tensor, positions: Tensor, attention: AttentionStep, rows: Tensor) -> Tensor:
        return self._clock.time("forward", lambda: self._inner.hidden(input_ids, positions, attention, rows))

    def logits(self, hidden: Tensor) -> Tensor:
        return self._clock.time("forward", lambda: self._inner.logits(hidden))


class Bench:
    """A model over a pool that is full of random KV."""

    def __init__(
        self, model: ModelConfig, num_tokens: int, block_size: int, clock: Clock, *, is_whole: bool
    ) -> None:
        device = torch.device("cpu")
        decoder = load_decoder(model, device).decoder
        layout = CacheLayout(num_tokens // block_size + 1, block_size)
        storage = KVStorage(layout, decoder.kv_shape, device)
        storage.key.normal_()
        storage.value.normal_()
        self._clock = clock
        self._block_size = block_size
        backend = select_backend(model.attention_backend, storage)
        self._is_whole = is_whole
        if is_whole:
            self._runner = ModelRunner(decoder, backend, layout)
        else:
            self._runner = ModelRunner(
                TimedModel(decoder, self._clock), TimedBackend(backend, self._clock), layout
            )

    def measure(self, name: str, plan: StepPlan, seconds: float) -> float:
        """Run `plan` again and again, and print a line.

        Returns:
            The median of whole steps, seconds.
        """
        for _ in range(2):
            self._runner.execute(plan)
        self._clock.seconds.clear()
        times: list[float] = []
        while sum(times) < seconds or len(times) < 3:
            started = self._clock.now()
            self._runner.execute(plan)
            times.append(self._clock.now() - started)
        columns = {"best": min(times), "median": statistics.median(times)}
        if not self._is_whole:
            part = {name: total / len(times) for name, total in self._clock.seconds.items()}
            columns |= {
                "begin": part["begin"],
                "write": part["write"],
                "attend": part["attend"],
                "other forward": part["forward"] - part["write"] - part["attend"],
                "rest": statistics.mean(times) - part["forward"] - part["begin"],
            }
        cells = "  ".join(f"{label} {1e3 * value:7.2f}" for label, value in columns.items())
        print(f"{name:24s} {cells}  ms  {plan.num_tokens / min(times):7.0f} tokens/s at best", flush=True)
        return columns["median"]

    def row(
        self, number: int, first_position: int, num_tokens: int, sampling: SamplingParams
    ) -> ScheduledSequence:
        """A row in its own part of the pool."""
        num_blocks = -(-(first_position + num_tokens) // self._block_size)
        first_block = 1 + number * num_blocks
        return ScheduledSequence(
            sequence_id=SequenceId(number),
            first_position=first_position,
            token_ids=tuple(100 + i % 1000 for i in range(num_tokens)),
            num_draft_tokens=0,
            block_ids=tuple(range(first_block, first_block + num_blocks)),
            is_sampled=True,
            sampling=sampling,
        )


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_model_options(parser)
    add_compute_options(parser, has_several=True)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--batch", type=numbers, default=[1, 8, 16], help="batch sizes of the decode steps")
    parser.add_argument("--context", type=int, default=256, help="KV tokens before each decode step")
    parser.add_argument("--prefill", type=numbers, default=[512, 1024], help="prompt lengths, each one step")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=2.0, help="per line")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--whole", action="store_true", help="time whole steps, not their parts")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu with --threads 1 suits a busy machine"
    )
    options = parser.parse_args()
    prepare_host(options.threads)
    path = model_path(options)
    clock = Clock(time.perf_counter if options.clock == "wall" else time.process_time)
    decoded = [num_rows * (options.context + 1 + options.block_size) for num_rows in options.batch]
    room = max([*decoded, *options.prefill]) + options.block_size
    sampling = SamplingParams(temperature=options.temperature, top_p=options.top_p)
    for weight_dtype in options.weight_dtype:
        model = ModelConfig(
            path,
            dtype=options.dtype,
            weight_dtype=weight_dtype,
            attention_backend=options.backend,
        )
        bench = Bench(model, room, options.block_size, clock, is_whole=options.whole)
        name = "" if weight_dtype == "same" else f"{weight_dtype} "
        for num_rows in options.batch:
            rows = tuple(bench.row(i, options.context, 1, sampling) for i in range(num_rows))
            bench.measure(f"{name}decode {num_rows} at {options.context}", StepPlan(0, rows), options.seconds)
        for length in options.prefill:
            plan = StepPlan(0, (bench.row(0, 0, length, sampling),))
            bench.measure(f"{name}prefill {length}", plan, options.seconds)


if __name__ == "__main__":
    main()
