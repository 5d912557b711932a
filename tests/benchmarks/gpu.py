"""How fast steps are on a GPU, on a model of random weights: nothing is fetched.

    .venv/bin/python -m tests.benchmarks.gpu --batch 1,8,64,256 --context 1024

Decode lines say, for steps as the engine runs them (plan to result): the time per output token (TPOT), tokens
per second, the share of the memory bandwidth that reading weights and KV once would take, and how much of the
step the GPU was not computing: the engine's own overhead. Prompt lines say the time to the first token of a
prompt alone on the machine (TTFT without queue or wire). `--device cpu` shows that it runs, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from headrace.engine.attention.backend import AttentionBackend
from headrace.engine.attention.select import select_backend
from headrace.engine.config import CacheLayout
from headrace.engine.kv.storage import KVStorage
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.loader import read_spec
from headrace.engine.runner.cuda_graphs import CudaGraphMaker, DecodeGraphs
from headrace.engine.runner.model_runner import ModelRunner
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.scheduling.plan import ScheduledSequence, StepPlan
from headrace.engine.sequence import SequenceId
from tests.benchmarks.options import numbers

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Options:
    """What is measured.

    Args:
        hidden_size, num_layers, num_heads, num_kv_heads, head_dim, vocab_size: of a Llama-like model.
        batches: rows of the decode steps.
        context: KV tokens before each decode step.
        prompts: lengths, each one step.
        seconds: per line.
    """

    device: str = "cuda"
    backend: str = "auto"
    hidden_size: int = 2048
    num_layers: int = 16
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 64
    vocab_size: int = 128_256
    batches: Sequence[int] = (1, 8, 64, 256)
    context: int = 1024
    prompts: Sequence[int] = (512, 2048, 8192)
    seconds: float = 2.0

    @classmethod
    def quick(cls, device: str) -> Options:
        """Two minutes on a GPU; on a CPU a toy."""
        if device == "cuda":
            return cls()
        return cls(
            device="cpu",
            hidden_size=64,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            vocab_size=500,
            batches=(1, 4),
            context=20,
            prompts=(32,),
            seconds=0.0,
        )


class RandomWeights:
    """A `WeightSource` of small random numbers."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        self._shapes, self._dtype, self._device = shapes, dtype, device
        self.num_bytes = 0

    def read(self, name: str) -> Tensor:
        weight = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device).normal_(0.0, 0.02)
        self.num_bytes += weight.nbytes
        return weight


class Bench:
    """A model over a pool that holds every sequence's context."""

    def __init__(self, options: Options) -> None:
        self._options, self._device = options, torch.device(options.device)
        is_cuda = self._device.type == "cuda"
        dtype, self._block_size = (torch.bfloat16, 256) if is_cuda else (torch.float32, 16)
        self._max_len = max(options.context + 1, *options.prompts)
        decoder, self._weight_bytes = self._make_decoder(dtype)
        self._kv_bytes = decoder.kv_shape.bytes_per_token
        blocks = max(
            max(options.batches) * self._blocks_for(options.context + 1),
            *(self._blocks_for(n) for n in options.prompts),
        )
        layout = CacheLayout(blocks + 1, self._block_size)
        attention = select_backend(options.backend, KVStorage(layout, decoder.kv_shape, self._device))
        self.backend_name = attention.capabilities.name
        self.plain = ModelRunner(decoder, attention, layout)
        self.graphed = self._make_graphed(decoder, attention, layout) if is_cuda else None

    def _make_decoder(self, dtype: torch.dtype) -> tuple[Decoder, int]:
        options = self._options
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": options.hidden_size,
            "intermediate_size": 4 * options.hidden_size,
            "num_hidden_layers": options.num_layers,
            "num_attention_heads": options.num_heads,
            "num_key_value_heads": options.num_kv_heads,
            "head_dim": options.head_dim,
            "vocab_size": options.vocab_size,
            "max_position_embeddings": self._max_len,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
        }
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
            _, spec = read_spec(Path(folder))
        weights = RandomWeights(dict(spec.tensors()), dtype, self._device)
        return Decoder(spec, weights, max_len=self._max_len), weights.num_bytes

    def _make_graphed(
        self, decoder: Decoder, attention: AttentionBackend, layout: CacheLayout
    ) -> ModelRunner | None:
        if not attention.capabilities.supports_graphs:
            return None
        graphs = DecodeGraphs(
            decoder,
            attention,
            layout,
            max_num_seqs=max(self._options.batches),
            max_model_len=self._max_len,
            maker=CudaGraphMaker(self._device),
        )
        started_s = time.perf_counter()
        graphs.capture()
        took_s = time.perf_counter() - started_s
        mebibytes = graphs.num_bytes / 2**20
        print(f"{len(graphs.sizes)} graphs captured in {took_s:.1f} s, {mebibytes:.0f} MiB")
        return ModelRunner(decoder, attention, layout, graphs=graphs)

    def measure_decode(self, label: str, runner: ModelRunner, num_rows: int, bandwidth: float) -> None:
        """Print a line on decode steps of so many rows."""
        plan = StepPlan(0, tuple(self._row(i, self._options.context, 1) for i in range(num_rows)))
        wall_s, busy_s = self._time(lambda: runner.execute(plan))
        read_bytes = self._weight_bytes + num_rows * (self._options.context + 1) * self._kv_bytes
        share = read_bytes / bandwidth / wall_s
        overhead = "" if busy_s is None else f"  not computing {1e3 * max(0.0, wall_s - busy_s):6.2f} ms"
        print(
            f"decode {num_rows:4d} at {self._options.context} {label:7s} TPOT {1e3 * wall_s:8.2f} ms  "
            f"{num_rows / wall_s:9.0f} tokens/s  {share:6.1%} of the bandwidth{overhead}",
            flush=True,
        )

    def measure_prompt(self, length: int) -> None:
        """Print a line on a prompt of so many tokens in one step."""
        plan = StepPlan(0, (self._row(0, 0, length),))
        wall_s, _ = self._time(lambda: self.plain.execute(plan))
        print(f"prompt {length:5d}  TTFT {1e3 * wall_s:8.2f} ms  {length / wall_s:9.0f} tokens/s", flush=True)

    def count_waits(self, runner: ModelRunner, num_rows: int) -> int:
        """How often a greedy decode step makes the host wait for the GPU; its result alone should."""
        import warnings  # noqa: PLC0415  for this one count

        plan = StepPlan(0, tuple(self._row(i, self._options.context, 1) for i in range(num_rows)))
        runner.execute(plan)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                runner.execute(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(warning.message) for warning in caught)

    def bandwidth(self) -> float:
        """Bytes per second that a large copy reads and writes: what this device can be asked for."""
        size = 2**30 if self._device.type == "cuda" else 2**24
        source = torch.empty(size, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        wall_s, busy_s = self._time(lambda: target.copy_(source))
        return 2 * size / (wall_s if busy_s is None else busy_s)

    def _time(self, work: Callable[[], object]) -> tuple[float, float | None]:
        """Median seconds of a call until the device is done, and of the GPU's own computing meanwhile."""
        for _ in range(3):
            work()
        times: list[float] = []
        until_s = time.perf_counter() + self._options.seconds
        while time.perf_counter() < until_s or len(times) < 3:
            self._wait()
            started_s = time.perf_counter()
            work()
            self._wait()
            times.append(time.perf_counter() - started_s)
        return statistics.median(times), self._busy_s(work)

    def _busy_s(self, work: Callable[[], object]) -> float | None:
        """Seconds that kernels and copies take in one call; None where nothing tells."""
        if self._device.type != "cuda":
            return None
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            work()
            self._wait()
        return sum(event.self_device_time_total for event in profile.key_averages()) / 1e6

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _row(self, number: int, first_position: int, num_tokens: int) -> ScheduledSequence:
        num_blocks = self._blocks_for(first_position + num_tokens)
        first_block = 1 + number * num_blocks
        return ScheduledSequence(
            sequence_id=SequenceId(number),
            first_position=first_position,
            token_ids=tuple(100 + i % 300 for i in range(num_tokens)),
            num_draft_tokens=0,
            block_ids=tuple(range(first_block, first_block + num_blocks)),
            is_sampled=True,
            sampling=GREEDY,
        )


def run(options: Options) -> None:
    """Measure and print."""
    bench = Bench(options)
    bandwidth = bench.bandwidth()
    print(f"attention by {bench.backend_name}; a copy moves {bandwidth / 1e9:.0f} GB/s")
    runners = {"plain": bench.plain} | ({} if bench.graphed is None else {"graphs": bench.graphed})
    for num_rows in options.batches:
        for label, runner in runners.items():
            bench.measure_decode(label, runner, num_rows, bandwidth)
    for length in options.prompts:
        bench.measure_prompt(length)
    if options.device == "cuda":
        for label, runner in runners.items():
            print(f"a greedy step, {label}: the host waits {bench.count_waits(runner, 1)} times for the GPU")


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--batch", type=numbers, default=[1, 8, 64, 256], help="rows of the decode steps")
    parser.add_argument("--context", type=int, default=1024, help="KV tokens before each decode step")
    parser.add_argument("--prompts", type=numbers, default=[512, 2048, 8192], help="lengths, each one step")
    parser.add_argument("--seconds", type=float, default=2.0, help="per line")
    given = parser.parse_args()
    run(
        replace(
            Options.quick(given.device),
            backend=given.backend,
            batches=given.batch,
            context=given.context,
            prompts=given.prompts,
            seconds=given.seconds,
        )
    )


if __name__ == "__main__":
    main()
