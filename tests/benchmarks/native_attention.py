"""How long paged attention of one layer takes: compiled kernels, torch's operators, the memory's limit.

Run it from the repository root on an idle machine: ``python -m tests.benchmarks.native_attention``. The
model's attention is SmolLM2-135M's (9 query and 3 KV heads of 64); 30 layers take turns, so that the cache's
bytes come from memory and not from the processor's caches, as in a real step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from headrace.engine.attention.backend import AttentionBackend, AttentionMetadata, AttentionSpec
from headrace.engine.attention.cpu import CpuBackend
from headrace.engine.config import CacheLayout
from headrace.engine.kv.storage import KVShape, KVStorage
from headrace.engine.native.backend import NativeCpuBackend
from headrace.engine.native.library import NativeLibrary, find_library

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 30, 9, 3, 64, 16
SPEC = AttentionSpec(HEAD_DIM**-0.5)


@dataclass(frozen=True, slots=True)
class Case:
    """A step: KV length and number of query tokens of each row."""

    name: str
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]


CASES = (
    Case("decode, 16 rows, 64 ... 512", tuple(64 + 448 * i // 15 for i in range(16)), (1,) * 16),
    Case("decode, 16 rows of 257", (257,) * 16, (1,) * 16),
    Case("decode, 1 row of 257", (257,), (1,)),
    Case("decode, 1 row of 4,096", (4096,), (1,)),
    Case("decode, 1 row of 1", (1,), (1,)),
    Case("verify, 1 row of 257, 5 tokens", (257,), (5,)),
    Case("prefill, 1,024", (1024,), (1024,)),
    Case("chunk of 256 after 1,024", (1280,), (256,)),
    Case("15 rows of 257 and a chunk of 128", (*(257,) * 15, 128), (*(1,) * 15, 128)),
)


def main() -> None:
    """Print one line per case and type."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.5, help="time per measurement")
    parser.add_argument(
        "--bandwidth", type=float, default=72e9, help="bytes per second that the memory gives"
    )
    parser.add_argument("--variant", help="instruction set of the kernels")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    library = NativeLibrary(find_library(), options.variant)
    print(f"kernels {library.variant}, {options.threads} threads; microseconds per layer, best (median)")
    print(f"{'':46}{'native':>16}{'torch':>16}{'ratio of best':>15}{'memory':>8}")
    for dtype in (torch.bfloat16, torch.float32):
        for case in CASES:
            storage, metadata = make_step(case, dtype)
            query = torch.randn(sum(case.query_lens), NUM_HEADS, HEAD_DIM).to(dtype)
            native = times_us(NativeCpuBackend(storage, library), metadata, query, options.seconds)
            plain = times_us(CpuBackend(storage), metadata, query, options.seconds)
            num_bytes = sum(case.seq_lens) * 2 * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize
            floor = num_bytes / options.bandwidth * 1e6
            name = f"{case.name}, {str(dtype).removeprefix('torch.')}"
            columns = "".join(f"{best:8.0f} ({median:5.0f})" for best, median in (native, plain))
            print(f"{name:46}{columns}{plain[0] / native[0]:15.1f}{floor:8.0f}", flush=True)


def make_step(case: Case, dtype: torch.dtype) -> tuple[KVStorage, AttentionMetadata]:
    """A filled cache whose blocks lie anywhere, and the step over it."""
    num_blocks = [-(-seq_len // BLOCK_SIZE) for seq_len in case.seq_lens]
    layout = CacheLayout(max(sum(num_blocks) + 1, 512), BLOCK_SIZE)
    storage = KVStorage(layout, KVShape(NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, dtype), torch.device("cpu"))
    for tensor in (storage.key, storage.value):
        for layer in tensor:
            layer.copy_(torch.randn(layer.shape))
    block_ids = torch.randperm(layout.num_blocks - 1)[: sum(num_blocks)].int() + 1
    table = torch.zeros(len(num_blocks), max(num_blocks), dtype=torch.int32)
    for row, ids in enumerate(block_ids.split(num_blocks)):
        table[row, : len(ids)] = ids
    slots = [
        int(table[row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
        for row, (seq_len, query_len) in enumerate(zip(case.seq_lens, case.query_lens, strict=True))
        for position in range(seq_len - query_len, seq_len)
    ]
    return storage, AttentionMetadata(
        slot_mapping=torch.tensor(slots),
        block_table=table,
        seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32),
        cu_seqlens_q=cumulated(case.query_lens),
        cu_seqlens_k=cumulated(case.seq_lens),
        max_query_len=max(case.query_lens),
        max_seq_len=max(case.seq_lens),
    )


def cumulated(lens: tuple[int, ...]) -> Tensor:
    """Running totals with a leading 0, int32."""
    return torch.tensor(list(chain((0,), accumulate(lens))), dtype=torch.int32)


def times_us(
    backend: AttentionBackend, metadata: AttentionMetadata, query: Tensor, seconds: float
) -> tuple[float, float]:
    """Best and median time of one layer's `attend`, microseconds; planning included, layers take turns."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 4:
        begin = time.perf_counter()
        opened = backend.begin_step(metadata)
        for layer in range(NUM_LAYERS):
            opened.attend(layer, query, SPEC)
        times.append((time.perf_counter() - begin) / NUM_LAYERS * 1e6)
    return min(times), statistics.median(times[1:])


if __name__ == "__main__":
    main()
