"""What has to hold on a GPU, as plain functions: they need torch and transformers, and no test runner.

Each takes the device. On a CPU the same bodies run with the kernels emulated, so that what a GPU will
execute is executed everywhere.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from headrace.engine.attention import flash, torch_varlen
from headrace.engine.attention.backend import AttentionBackend, AttentionMetadata, AttentionSpec
from headrace.engine.attention.reference import ReferenceBackend
from headrace.engine.batch import build_batch
from headrace.engine.config import CacheConfig, CacheLayout, EngineConfig, ModelConfig, SchedulerConfig
from headrace.engine.errors import ConfigError
from headrace.engine.kv.storage import KVStorage
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.loader import load_decoder
from headrace.engine.runner.cuda_graphs import CudaGraphMaker, DecodeGraphs, GraphMaker
from headrace.engine.runner.loading import load
from headrace.engine.runner.model_runner import ModelRunner
from headrace.engine.runner.placement import Placement
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.scheduling.plan import ScheduledSequence, StepPlan
from headrace.engine.sequence import SequenceId
from tests.support.attention_cases import AttentionCase, make_case
from tests.support.emulated_kernels import EmulatedKernels
from tests.support.greedy_margin import assert_greedy
from tests.support.plan_loop import GREEDY, make_sequences, num_blocks_for, run_to_end
from tests.support.tiny_models import tiny_family, write_tiny_family

BLOCK = 256
MARGIN = 0.3
"""Of logits, for models whose logits spread over several units: far above rounding, far below chance."""
PROMPTS = [tuple(range(3, 40)), (5,), tuple(range(100, 390)), (42, 42, 42), tuple(range(200, 456))]
NUM_NEW = 12

ROWS = {
    "prompts": [(0, 7), (0, 300), (0, 1)],
    "chunks with a past": [(255, 3), (256, 40), (511, 90)],
    "decodes": [(0, 1), (255, 1), (256, 1), (700, 1)],
    "verification": [(9, 5), (254, 5), (300, 5)],
    "mixed": [(0, 70), (300, 1), (12, 5), (511, 1)],
}
SPECS = {
    "plain": AttentionSpec(scale=0.125),
    "window": AttentionSpec(scale=0.125, window=100),
    "soft cap": AttentionSpec(scale=1.0, soft_cap=5.0),
}

Build = Callable[[KVStorage], AttentionBackend]


def paged_backends(device: torch.device) -> Mapping[str, Build]:
    """The backends with kernels that can be had: real ones on a GPU, emulated ones on a CPU."""
    if device.type == "cpu":
        kernels = EmulatedKernels()
        return {
            "flash": lambda storage: flash.FlashBackend(storage, kernels.flash),
            "torch_varlen": lambda storage: torch_varlen.TorchVarlenBackend(storage, kernels.varlen_attn),
        }
    found: dict[str, Build] = {}
    if flash.missing() is None:
        loaded = flash.load_kernels()
        found["flash"] = lambda storage: flash.FlashBackend(storage, loaded)
    if torch_varlen.missing() is None:
        kernel = torch_varlen.load_kernel()
        found["torch_varlen"] = lambda storage: torch_varlen.TorchVarlenBackend(storage, kernel)
    return found


def check_backends_agree(device: torch.device) -> str:
    """Every backend gives what the reference gives, over kinds of rows, heads, widths, types and layers."""
    backends = paged_backends(device)
    assert backends, "no attention kernels here: neither flash-attn nor torch's own"
    num_compared, worst = 0, 0.0
    for name, build in backends.items():
        for dtype in (torch.bfloat16, torch.float16):
            for num_heads, num_kv_heads, head_dim in ((4, 4, 64), (8, 2, 128), (6, 1, 64)):
                for kind, rows in ROWS.items():
                    case = make_case(
                        rows,
                        block_size=BLOCK,
                        num_heads=num_heads,
                        num_kv_heads=num_kv_heads,
                        head_dim=head_dim,
                        dtype=dtype,
                        table_padding=1,
                        device=device,
                    )
                    for layer, spec in SPECS.items():
                        backend = build(case.storage)
                        if spec.soft_cap is not None and not backend.capabilities.supports_soft_cap:
                            continue
                        out = case.run(backend, spec)
                        expected = case.run(ReferenceBackend(case.storage), spec)
                        heads = f"{num_heads}/{num_kv_heads} heads of {head_dim}"
                        label = f"{name}, {dtype}, {heads}, {kind}, {layer}"
                        worst = max(worst, _require_close(out, expected, label))
                        num_compared += 1
    return f"{num_compared} comparisons of {', '.join(backends)}; largest difference {worst:.4f}"


def check_padding_rows(device: torch.device) -> str:
    """Rows of length 0 over the null block, as graphs are padded with: zero, and nobody's harm."""
    for name, build in paged_backends(device).items():
        case = make_case(
            ROWS["decodes"],
            block_size=BLOCK,
            head_dim=64,
            dtype=torch.bfloat16,
            table_padding=1,
            device=device,
        )
        alone = case.run(build(case.storage), SPECS["plain"])
        padded = _padded(case, num_padding=3)
        out = padded.run(build(case.storage), SPECS["plain"])
        _require_close(out[: len(case.rows)], alone, f"{name}: rows beside padding")
        assert not bool(out[len(case.rows) :].any()), f"{name}: padding gives something else than zero"
    return "zero"


def check_garbage_in_unused_slots(device: torch.device) -> str:
    """What is finite in slots that no row uses changes nothing."""
    for name, build in paged_backends(device).items():
        outs = []
        for filler in (0.0, 1000.0):
            case = make_case(
                ROWS["mixed"],
                block_size=BLOCK,
                head_dim=64,
                dtype=torch.bfloat16,
                filler=filler,
                table_padding=1,
                device=device,
            )
            outs.append(case.run(build(case.storage), SPECS["plain"]))
        _require_close(outs[1], outs[0], f"{name}: unused slots")
    return "masked"


def check_graphs_replay(device: torch.device) -> str:
    """Captured decode steps give the hidden states of plain ones, at every padding, step after step."""
    with decoder_on(device, torch.bfloat16) as decoder:
        worst, num_steps = 0.0, 0
        for name, build in paged_backends(device).items():
            layout = CacheLayout(40, BLOCK)
            placement = placement_of(decoder)
            storage = KVStorage(layout, placement.shape, device)
            attention = build(storage)
            storage.key.normal_()
            storage.value.normal_()
            maker: GraphMaker = CudaGraphMaker(device) if device.type == "cuda" else _Repeating()
            graphs = DecodeGraphs(decoder, attention, layout, max_num_seqs=12, max_model_len=900, maker=maker)
            graphs.capture()
            for num_rows in (12, 1, 5, 12, 3, 8):
                plan = StepPlan(0, tuple(_decode_row(i, 40 + 61 * i) for i in range(num_rows)))
                # The graph writes the step's K and V, and then the plain step writes the same again.
                replayed = graphs.hidden(plan)
                assert replayed is not None
                got = replayed.clone()
                plain = _plain_hidden(decoder, attention, plan, device)
                worst = max(worst, _require_close(got, plain, f"{name}, {num_rows} rows", 5e-2))
                num_steps += 1
    return f"{num_steps} steps; largest difference {worst:.4f}"


def check_greedy(device: torch.device) -> str:
    """Whole models, loaded as the server loads them, say what transformers says, within a margin."""
    told = []
    names = ["reference", *(paged_backends(device) if device.type == "cuda" else ())]
    for variant, overrides in (
        ("llama", {"head_dim": 64}),
        ("qwen3", {"head_dim": 128}),
        ("mistral", {"head_dim": 64, "sliding_window": 24}),
        ("gemma2", {"head_dim": 64}),
    ):
        reference = tiny_family(variant, max_position_embeddings=1024, **overrides).to(device)  # type: ignore[arg-type]
        with tempfile.TemporaryDirectory() as folder:
            write_tiny_family(Path(folder), variant, max_position_embeddings=1024, **overrides)
            for name in names:
                config = _config(Path(folder), name, device)
                if (variant, name) == ("gemma2", "torch_varlen"):
                    assert "caps attention scores" in _refusal(config)
                    continue
                loaded = load(config)
                sequences = make_sequences(PROMPTS, NUM_NEW, loaded.layout.block_size)
                outputs = run_to_end(loaded.runner, sequences, chunk=100)
                loaded.runner.close()
                for prompt, output in zip(PROMPTS, outputs, strict=True):
                    assert_greedy(reference, prompt, output[len(prompt) :], MARGIN)
                told.append(f"{variant} by {name}")
    return ", ".join(told)


def check_nothing_leaks(device: torch.device) -> str:
    """After a first round, more rounds leave neither tensors nor memory behind."""
    with decoder_on(device, torch.bfloat16) as decoder:
        sampling = [GREEDY, SamplingParams(temperature=0.8, top_p=0.9, seed=3, num_logprobs=2)] * 3
        sequences = make_sequences(PROMPTS, NUM_NEW, BLOCK, sampling)
        layout = CacheLayout(num_blocks_for(sequences), BLOCK)
        placement = placement_of(decoder)
        attention = ReferenceBackend(KVStorage(layout, placement.shape, device))
        runner = ModelRunner(decoder, attention, layout)
        counts = []
        for _ in range(4):
            run_to_end(runner, make_sequences(PROMPTS, NUM_NEW, BLOCK, sampling), chunk=100)
            gc.collect()
            num_tensors = sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
            num_bytes = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
            counts.append((num_tensors, num_bytes))
    assert counts[1] == counts[2] == counts[3], f"tensors and bytes grow: {counts}"
    return f"{counts[-1][0]} tensors, {counts[-1][1]} bytes, round after round"


def check_memory_is_bounded(device: torch.device) -> str:
    """The pool keeps to its share, and one that can't be had is refused in words."""
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_family(Path(folder), "llama", head_dim=64)
        config = _config(Path(folder), "reference", device)
        assert "num_blocks" in _refusal(replace(config, cache=CacheConfig(BLOCK, num_blocks=2**40)))
        if device.type == "cpu":
            return "refused in words; there is no share of a CPU"
        torch.cuda.empty_cache()
        loaded = load(replace(config, cache=CacheConfig(None, gpu_memory_utilization=0.25)))
        free, total = torch.cuda.mem_get_info(device)
        loaded.runner.close()
    share = (total - free) / total
    assert 0.15 < share < 0.27, f"{share:.3f} of the GPU are taken where 0.25 were allowed"
    return f"{share:.3f} of the GPU taken where 0.25 were allowed"


CHECKS: Mapping[str, Callable[[torch.device], str]] = {
    "backends agree": check_backends_agree,
    "padding rows": check_padding_rows,
    "garbage in unused slots": check_garbage_in_unused_slots,
    "graphs replay": check_graphs_replay,
    "greedy": check_greedy,
    "nothing leaks": check_nothing_leaks,
    "memory is bounded": check_memory_is_bounded,
}


class _Repeating:
    """In place of graphs on a CPU: runs the launch again."""

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        launch()
        return launch

    def num_bytes(self) -> int:
        return 0


def _require_close(out: Tensor, expected: Tensor, label: str, tolerance: float = 2e-2) -> float:
    assert bool(torch.isfinite(out).all()), f"{label}: not finite"
    difference = (out.float() - expected.float()).abs()
    allowed = tolerance * (1 + expected.float().abs())
    worst = float(difference.max())
    assert bool((difference <= allowed).all()), f"{label}: {worst:.4f} away"
    return worst


def _padded(case: AttentionCase, num_padding: int) -> AttentionCase:
    old, num_rows = case.metadata, len(case.rows)
    device = old.seq_lens.device

    def more(tensor: Tensor) -> Tensor:
        return torch.cat((tensor, tensor[:1].expand(num_padding, *tensor.shape[1:])))

    metadata = AttentionMetadata(
        slot_mapping=torch.nn.functional.pad(old.slot_mapping, (0, num_padding)),
        block_table=torch.nn.functional.pad(old.block_table, (0, 0, 0, num_padding)),
        seq_lens=torch.nn.functional.pad(old.seq_lens, (0, num_padding)),
        cu_seqlens_q=torch.arange(num_rows + num_padding + 1, dtype=torch.int32, device=device),
        cu_seqlens_k=torch.cat((old.cu_seqlens_k, old.cu_seqlens_k[-1:].expand(num_padding))),
        max_query_len=1,
        max_seq_len=old.block_table.shape[1] * BLOCK,
    )
    return replace(
        case, metadata=metadata, query=more(case.query), key=more(case.key), value=more(case.value)
    )


def _decode_row(number: int, position: int) -> ScheduledSequence:
    blocks = tuple(1 + 3 * number + i for i in range(position // BLOCK + 1))
    return ScheduledSequence(SequenceId(number), position, (7 + number,), 0, blocks, True, GREEDY)


@torch.inference_mode()
def _plain_hidden(
    decoder: Decoder, attention: AttentionBackend, plan: StepPlan, device: torch.device
) -> Tensor:
    batch = build_batch(plan, BLOCK, device)
    return decoder.hidden(
        batch.input_ids, batch.positions, attention.begin_step(batch.attention), batch.logits_rows
    )


@contextmanager
def decoder_on(device: torch.device, dtype: torch.dtype) -> Iterator[Decoder]:
    """A tiny model."""
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_family(Path(folder), "llama", head_dim=64, max_position_embeddings=1024)
        name = str(dtype).removeprefix("torch.")
        yield load_decoder(ModelConfig(Path(folder), dtype=name), device).decoder


def _refusal(config: EngineConfig) -> str:
    """What is said to a configuration that can't be had; nothing if it can."""
    try:
        load(config)
    except ConfigError as error:
        return str(error)
    return ""


def placement_of(decoder: Decoder) -> Placement:
    """Where it is."""
    config = EngineConfig(ModelConfig(Path(), attention_backend="reference"), CacheConfig(BLOCK))
    return Placement(config, decoder, 900)


def _config(folder: Path, backend: str, device: torch.device) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(folder, dtype="bfloat16", attention_backend=backend, device=device.type),
        cache=CacheConfig(BLOCK, num_blocks=40, gpu_memory_utilization=0.25),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512),
        num_threads=torch.get_num_threads(),
    )
