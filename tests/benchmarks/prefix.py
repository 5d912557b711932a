"""What the prefix cache saves: requests that begin with the same tokens, with the cache and without.

    .venv/bin/python -m tests.benchmarks.prefix --prefix-len 512 --requests 32

Two figures for each: prompt tokens that were computed over all prompt tokens, all requests at once; and time
to first token, one request at a time, the first of them (cold) and the median of the others (warm).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

from headrace.engine import (
    AsyncEngine,
    CacheConfig,
    EngineConfig,
    FinishEvent,
    ModelConfig,
    Request,
    SchedulerConfig,
    TokenEvent,
    load_model,
)
from tests.benchmarks.options import add_compute_options, add_model_options, model_path
from tests.support.requests import make_request

SUFFIX_LEN = 16


def main() -> None:
    """Print a line for each of the two."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_options(parser)
    add_compute_options(parser)
    parser.add_argument("--prefix-len", type=int, default=512, help="tokens that all requests begin with")
    parser.add_argument("--requests", type=int, default=32, help="how many there are")
    args = parser.parse_args()
    print(f"{'cache':>6} {'computed':>9} {'of':>7} {'share':>6} {'cold':>9} {'warm':>9} {'warm/cold':>9}")
    for is_on in (True, False):
        asyncio.run(_measure(args, prefix_caching=is_on))


async def _measure(args: argparse.Namespace, *, prefix_caching: bool) -> None:
    config = EngineConfig(
        model=ModelConfig(
            model_path(args), dtype=args.dtype, weight_dtype=args.weight_dtype, max_model_len=2048
        ),
        cache=CacheConfig(block_size=4, num_blocks=8192, prefix_caching=prefix_caching),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512),
        num_threads=args.threads,
    )
    async with AsyncEngine(load_model(config), config) as engine:
        requests = [_request(i, args.prefix_len) for i in range(args.requests)]
        first_s = [await _ttft(engine, request) for request in requests]
        engine.flush_cache()
        before = engine.load().totals.num_prefill_tokens
        # What is computed in one step is shared from the next one on.
        await asyncio.gather(*(_ttft(engine, _request(i, args.prefix_len)) for i in range(args.requests)))
        computed = engine.load().totals.num_prefill_tokens - before
        total = sum(len(request.prompt_token_ids) for request in requests)
    warm_s = statistics.median(first_s[1:])
    print(
        f"{'on' if prefix_caching else 'off':>6} {computed:9} {total:7} {computed / total:6.3f} "
        f"{1e3 * first_s[0]:6.0f} ms {1e3 * warm_s:6.0f} ms {warm_s / first_s[0]:9.3f}"
    )


def _request(number: int, prefix_len: int) -> Request:
    prefix = tuple(1_000 + i * 37 % 20_000 for i in range(prefix_len))
    return make_request(
        prompt=prefix + tuple(2_000 + number * 101 + i for i in range(SUFFIX_LEN)), max_tokens=2
    )


async def _ttft(engine: AsyncEngine, request: Request) -> float:
    began_s, first_s = time.perf_counter(), 0.0
    async for event in engine.submit(request):
        if isinstance(event, TokenEvent) and not first_s:
            first_s = time.perf_counter() - began_s
        assert isinstance(event, TokenEvent | FinishEvent)
    return first_s


if __name__ == "__main__":
    main()
