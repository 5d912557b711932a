"""The real program over a tiny model, and what it says when nobody means harm."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from grpc_health.v1.health_pb2 import HealthCheckResponse

from headrace.v1.generation_pb2 import GenerateRequest
from tests.support.aftermath import assert_as_new, canary_ids
from tests.support.server_process import ServerProcess, server_process
from tests.support.service import ids_of, make_start
from tests.support.tiny_models import write_tiny_llama

LONG_PROMPT = tuple(range(30, 50))
LONG_TOKENS = 100


@dataclass(frozen=True)
class ServedTiny:
    """A server, and the right answers.

    Args:
        canary: see `tests.support.aftermath`.
        long: what `long_ids` is alone.
    """

    process: ServerProcess
    canary: list[int]
    long: list[int]

    @property
    def address(self) -> str:
        """Of the callers' port."""
        return f"127.0.0.1:{self.process.port}"

    @property
    def control_address(self) -> str:
        """Of the operator's port."""
        return f"127.0.0.1:{self.process.control_port}"

    @property
    def rss_bytes(self) -> int:
        """Memory that it has."""
        return int(psutil.Process(self.process.process.pid).memory_info().rss)

    async def assert_unharmed(self) -> None:
        """See `assert_as_new`."""
        await assert_as_new(self.address, self.control_address, self.canary)


async def ids_over(
    process: ServerProcess, prompt: Sequence[int] = LONG_PROMPT, max_tokens: int = LONG_TOKENS
) -> list[int]:
    """A well-behaved client's answer."""
    start = make_start(prompt=prompt, max_tokens=max_tokens)
    call = process.generation.Generate(GenerateRequest(start=start), wait_for_ready=True, timeout=120)
    return ids_of([response.event async for response in call])


@asynccontextmanager
async def served_tiny(folder: Path, *flags: str) -> AsyncIterator[ServedTiny]:
    """Start the program over a tiny model; it is ended with the block.

    Args:
        folder: for its files.
        flags: of ``headrace serve``, besides.
    """
    model = folder / "tiny"
    if not model.exists():
        write_tiny_llama(model)
    own = ("--model", str(model), "--dtype", "float32", "--num-blocks", "400", "--drain-grace-s", "1")
    async with server_process(
        "serve", folder / "ready.json", *own, *flags, module="headrace.service"
    ) as process:
        await process.until_health(HealthCheckResponse.SERVING)
        canary = await canary_ids(f"127.0.0.1:{process.port}")
        yield ServedTiny(process, canary, await ids_over(process))
