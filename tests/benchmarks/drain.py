"""Drain under load, again and again: does any client see its stream cut within the grace?

python -m tests.benchmarks.drain --times 50
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse

from headrace.v1.generation_pb2 import GenerateRequest
from tests.support.fake_runner import expected_output
from tests.support.server_process import ServerProcess, server_process
from tests.support.service import RawSession, ids_of, make_start

NUM_TOKENS = 60


@dataclass
class Drains:
    """What became of the streams that ran, and of those that came too late.

    Args:
        whole: streams that were told every token, once and in order.
        cut: streams that were not.
        late: codes of requests that came after the signal.
        exits: exit codes.
    """

    whole: int = 0
    cut: int = 0
    late: Counter[str] = field(default_factory=Counter)
    exits: Counter[int] = field(default_factory=Counter)
    longest_s: float = 0.0


async def ending_of(server: ServerProcess, prompt: tuple[int, ...], begun: asyncio.Event) -> list[int] | str:
    """The ids of a stream, or the code that it ended with."""
    call = server.generation.Generate(GenerateRequest(start=make_start(prompt=prompt, max_tokens=NUM_TOKENS)))
    events = []
    try:
        async for response in call:
            events.append(response.event)
            begun.set()
    except grpc.aio.AioRpcError as error:
        return error.code().name
    finally:
        begun.set()
    return ids_of(events)


async def drain_once(number: int, num_streams: int, drains: Drains, *, module: str, plan: str) -> None:
    """Start a server, fill it, tell it to go, and see what everybody gets."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--max-num-seqs", "8", "--drain-grace-s", "60")
        async with server_process(plan, Path(folder) / "ready.json", *flags, module=module) as server:
            await server.until_health(HealthCheckResponse.SERVING)
            prompts = [(number % 97 + 1, i + 2, 3) for i in range(num_streams)]
            begun = [asyncio.Event() for _ in prompts]
            streams = [
                asyncio.create_task(ending_of(server, prompt, event))
                for prompt, event in zip(prompts, begun, strict=True)
            ]
            session = RawSession(server.generation)
            labels = [f"s{i}" for i in range(4)]
            await session.start(*(make_start(label, max_tokens=NUM_TOKENS) for label in labels))
            # Half of them run, the others wait; all have been taken. The moment is another one each time.
            await asyncio.wait([asyncio.create_task(event.wait()) for event in begun])
            while {label for label in labels if session.events.get(label)} != set(labels):
                await session.next()
            for _ in range(number % 20):
                await session.next()
            signalled_s = time.monotonic()
            server.send(signal.SIGTERM)
            late = await ending_of(server, (5, 5), asyncio.Event())
            drains.late[late if isinstance(late, str) else "OK"] += 1
            ended = await asyncio.gather(*streams)
            # A session that stays open is ended when all is told.
            with suppress(grpc.aio.AioRpcError):
                await session.half_close()
            told = [*ended, *(ids_of(session.events[label]) for label in labels)]
            right = [expected_output(prompt, NUM_TOKENS) for prompt in prompts]
            right += [expected_output(make_start().token_ids.ids, NUM_TOKENS)] * len(labels)
            for got, wanted in zip(told, right, strict=True):
                drains.whole += got == wanted
                drains.cut += got != wanted
            drains.exits[await server.exit_code()] += 1
            drains.longest_s = max(drains.longest_s, time.monotonic() - signalled_s)


async def drain_often(
    times: int, num_streams: int = 16, module: str = "tests.support.serve_fake", plan: str = "fine"
) -> Drains:
    """Drain so many servers, one after the other."""
    drains = Drains()
    for number in range(times):
        await drain_once(number, num_streams, drains, module=module, plan=plan)
    return drains


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--streams", type=int, default=16)
    arguments = parser.parse_args()
    drains = asyncio.run(drain_often(arguments.times, arguments.streams))
    print(
        f"{arguments.times} drains under load: {drains.whole} streams whole, {drains.cut} cut; "
        f"requests after the signal: {dict(drains.late)}; exit codes {dict(drains.exits)}; "
        f"longest drain {drains.longest_s:.1f} s"
    )
    if drains.cut or set(drains.exits) != {0}:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
