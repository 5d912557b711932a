"""How long a health check takes while a long prompt is prefilled: is the event loop free?

python -m tests.benchmarks.health --model smollm2-135m-instruct --prompt-tokens 2000
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from grpc_health.v1 import health_pb2

from headrace.v1.generation_pb2 import (
    GenerateRequest,
    SamplingOptions,
    StartGeneration,
    StopOptions,
    TokenIds,
)
from tests.support.server_process import ServerProcess, server_process

POLL_EVERY_S = 0.01
SOME_TOKEN = 338


async def measure(arguments: argparse.Namespace) -> None:
    """Poll health while `repeats` prompts are prefilled one after the other; print what it took."""
    flags = ("--model", arguments.model, "--dtype", arguments.dtype, "--no-prefix-caching")
    with tempfile.TemporaryDirectory() as folder:
        ready_file = Path(folder) / "ready.json"
        async with server_process("serve", ready_file, *flags, module="headrace.service") as server:
            await server.until_health(health_pb2.HealthCheckResponse.SERVING)
            await measure_server(server, arguments)


async def measure_server(server: ServerProcess, arguments: argparse.Namespace) -> None:
    """The same with a server that is ready."""
    latencies_s: list[float] = []

    async def poll() -> None:
        while True:
            started = time.perf_counter()
            await server.health()
            latencies_s.append(time.perf_counter() - started)
            await asyncio.sleep(POLL_EVERY_S)

    start = StartGeneration(
        token_ids=TokenIds(ids=[SOME_TOKEN] * arguments.prompt_tokens),
        sampling=SamplingOptions(temperature=0),
        stop=StopOptions(max_tokens=1, ignore_eos=True),
    )
    polling = asyncio.create_task(poll())
    started = time.perf_counter()
    for _ in range(arguments.repeats):
        async for _ in server.generation.Generate(GenerateRequest(start=start)):
            pass
    prefill_s = (time.perf_counter() - started) / arguments.repeats
    polling.cancel()
    cuts = statistics.quantiles(latencies_s, n=100)
    print(
        f"{arguments.prompt_tokens} tokens prefilled in {prefill_s:.2f} s; "
        f"{len(latencies_s)} health checks meanwhile: p50 {cuts[49] * 1e3:.1f} ms, "
        f"p99 {cuts[98] * 1e3:.1f} ms, longest {max(latencies_s) * 1e3:.1f} ms"
    )


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
