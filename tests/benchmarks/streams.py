"""What the front end costs: a thousand streams over an engine that computes nothing, and a real model's tax.

    .venv/bin/python -m tests.benchmarks.streams --streams 1000 --step-ms 100,50,20
    .venv/bin/python -m tests.benchmarks.streams tax --model smollm2-135m-instruct --streams 16,64

Over the fake engine each step takes `--step-ms` and gives every stream a token that holds the moment at
which its step was over. So the delay of a token is all that comes after the model: bookkeeping, text,
messages, gRPC, and the client of this benchmark, a process of its own beside the server's. `offered` is
streams / step. Where the front end can't keep up, several tokens wait for each other and come in one
message: `tokens/msg` rises instead of the delay.

`tax` is a real model's tokens per second, end to end over gRPC and from the bare engine, each in a process
of its own, in turn; their quotient is what the front end, and a client on the same machine, leave of it. The
quotient of the median gaps between two tokens says the same of steps that all take part in, on a machine of
whatever moods. The CPU time of the thread that the event loop runs in, and of the client, says who takes it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path

import psutil

from headrace.engine import (
    AsyncEngine,
    LoadedModel,
    LoadProgress,
    Request,
    RequestId,
    SamplingParams,
    StopConditions,
    TokenEvent,
)
from headrace.service.commands import serve
from headrace.service.config import ServiceConfig, let_threads_sleep, load_config
from headrace.service.lifecycle import model_from_files
from headrace.v1.generation_pb2 import (
    GenerateRequest,
    GenerationEvent,
    SamplingOptions,
    SessionRequest,
    StartGeneration,
    StopOptions,
    TokenIds,
)
from headrace.v1.generation_pb2_grpc import GenerationServiceStub
from tests.benchmarks.options import numbers, reals, words
from tests.support.child_process import child_process
from tests.support.clock_model import make_clock_model, seconds_since
from tests.support.server_process import ServerProcess, server_process

PROMPT_LEN = 16
MODULE = "tests.benchmarks.streams"
SERVING = 1


@dataclass
class Tally:
    """What the client has read.

    Args:
        delays_s: of each message's newest token, from the end of its step, seconds.
        first_s, last_s: monotonic moments of the first and the last message, seconds.
        eldest_s: of all messages of the first request.
    """

    num_tokens: int = 0
    num_messages: int = 0
    delays_s: list[float] = field(default_factory=list)
    first_s: float = 0.0
    last_s: float = 0.0
    eldest_s: list[float] = field(default_factory=list)

    def add(self, event: GenerationEvent) -> None:
        """Count one event."""
        if not event.HasField("delta"):
            return
        token_ids = event.delta.token_ids
        self.last_s = time.monotonic()
        self.first_s = self.first_s or self.last_s
        self.num_tokens += len(token_ids)
        self.num_messages += 1
        self.delays_s.append(seconds_since(token_ids[-1]))
        if event.request_id == "r0":
            self.eldest_s.append(self.last_s)


def start_of(number: int, max_tokens: int, vocab_size: int = 1000) -> StartGeneration:
    """One request; no two begin alike."""
    prompt = [2 + (number * 7 + i * 13) % (vocab_size - 2) for i in range(PROMPT_LEN)]
    return StartGeneration(
        request_id=f"r{number}",
        token_ids=TokenIds(ids=prompt),
        sampling=SamplingOptions(temperature=0),
        stop=StopOptions(max_tokens=max_tokens, ignore_eos=True),
    )


async def by_generate(stub: GenerationServiceStub, starts: Sequence[StartGeneration], tally: Tally) -> None:
    """Each request is an RPC."""

    async def one(start: StartGeneration) -> None:
        async for response in stub.Generate(GenerateRequest(start=start)):
            tally.add(response.event)

    await asyncio.gather(*(one(start) for start in starts))


async def by_session(stub: GenerationServiceStub, starts: Sequence[StartGeneration], tally: Tally) -> None:
    """All requests share one RPC."""
    call = stub.Session()

    async def send() -> None:
        for start in starts:
            await call.write(SessionRequest(start=start))
        await call.done_writing()

    sending = asyncio.create_task(send())
    async for response in call:
        for event in response.events:
            if event.HasField("error"):
                raise RuntimeError(f"a request failed: {event.error.message}")
            tally.add(event)
    await sending


WAYS = {"generate": by_generate, "session": by_session}


async def measure_load(arguments: argparse.Namespace) -> None:
    """Print a line for each way and load."""
    print(
        f"{'way':9} {'streams':>7} {'step':>7} {'offered':>9} {'tokens/s':>9} {'tokens/msg':>10} "
        f"{'server CPU':>11} {'client CPU':>11} {'delay p50':>10} {'p99':>8}"
    )
    for way in arguments.ways:
        for num_streams in arguments.streams:
            for step_ms in arguments.step_ms:
                await _measure_one(way, num_streams, step_ms, arguments.tokens)


async def _measure_one(way: str, num_streams: int, step_ms: float, max_tokens: int) -> None:
    flags = (f"--max-num-seqs={num_streams}", f"--max-num-batched-tokens={32 * num_streams}")
    with tempfile.TemporaryDirectory() as folder:
        ready_file = Path(folder) / "ready.json"
        async with server_process(f"clock:{step_ms:g}", ready_file, *flags, module=MODULE) as server:
            await server.until_health(SERVING)
            process, us = psutil.Process(server.process.pid), psutil.Process()
            tally = Tally()
            before_s, our_before_s = _cpu_s(process), _cpu_s(us)
            await WAYS[way](server.generation, [start_of(n, max_tokens) for n in range(num_streams)], tally)
            cpu_s, our_cpu_s = _cpu_s(process) - before_s, _cpu_s(us) - our_before_s
    delays_ms = [1e3 * delay_s for delay_s in tally.delays_s]
    assert tally.num_tokens == num_streams * max_tokens, "tokens were lost"
    print(
        f"{way:9} {num_streams:7} {step_ms:4g} ms {1e3 * num_streams / step_ms:9,.0f} "
        f"{tally.num_tokens / (tally.last_s - tally.first_s):9,.0f} "
        f"{tally.num_tokens / tally.num_messages:10.2f} "
        f"{1e6 * cpu_s / tally.num_tokens:5.1f} ms/1k {1e6 * our_cpu_s / tally.num_tokens:5.1f} ms/1k "
        f"{statistics.median(delays_ms):7.1f} ms {statistics.quantiles(delays_ms, n=100)[98]:5.0f} ms",
        flush=True,
    )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


# ---- the tax of a real model ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pace:
    """What one run of all requests together came to.

    Args:
        gap_ms: between two tokens of the first request, the median.
        loop_ms, client_ms: CPU time for 1,000 tokens of the thread that the event loop and the engine's
            bookkeeping have to themselves, and of the client.
    """

    tokens_per_s: float
    gap_ms: float
    loop_ms: float
    client_ms: float = 0.0


async def measure_tax(arguments: argparse.Namespace) -> None:
    """Print a line for each number of streams and way."""
    print(
        f"{'streams':>7} {'way':9} {'engine alone':>14} {'over gRPC':>14} {'left':>6} {'gap alone':>11} "
        f"{'over gRPC':>11} {'left':>6} {'loop CPU alone':>15} {'over gRPC':>13} {'client CPU':>13}"
    )
    for num_streams in arguments.streams:
        flags = (f"--model={arguments.model}", f"--dtype={arguments.dtype}", f"--max-num-seqs={num_streams}")
        for way, runs in (await _runs_in_turn(flags, num_streams, arguments)).items():
            alone, over = zip(*runs, strict=True)
            left = statistics.median(o.tokens_per_s / a.tokens_per_s for a, o in runs)
            gap_ms, gap_over_ms = (statistics.median(each.gap_ms for each in side) for side in (alone, over))
            print(
                f"{num_streams:7} {way:9} {statistics.median(a.tokens_per_s for a in alone):10,.1f} t/s "
                f"{statistics.median(o.tokens_per_s for o in over):10,.1f} t/s {left:6.3f} "
                f"{gap_ms:8.2f} ms {gap_over_ms:8.2f} ms {gap_ms / gap_over_ms:6.3f} "
                f"{statistics.median(a.loop_ms for a in alone):9.1f} ms/1k "
                f"{statistics.median(o.loop_ms for o in over):7.1f} ms/1k "
                f"{statistics.median(o.client_ms for o in over):7.1f} ms/1k",
                flush=True,
            )


async def _runs_in_turn(
    flags: Sequence[str], num_streams: int, arguments: argparse.Namespace
) -> dict[str, list[tuple[Pace, Pace]]]:
    """Runs over gRPC by way, each with the one of the bare engine just before it.

    Both programs stay up and take turns: a machine that is slower for a while is so for both.
    """
    runs: dict[str, list[tuple[Pace, Pace]]] = {way: [] for way in arguments.ways}
    with tempfile.TemporaryDirectory() as folder:
        async with (
            _engine_alone(flags) as run_alone,
            server_process("serve", Path(folder) / "r.json", *flags, module="headrace.service") as server,
        ):
            await server.until_health(SERVING)
            await run_alone(num_streams, 8)
            await _pace_over_grpc("generate", server, num_streams, max_tokens=8)
            for _ in range(arguments.repeats):
                alone = await run_alone(num_streams, arguments.tokens)
                for way in arguments.ways:
                    over = await _pace_over_grpc(way, server, num_streams, arguments.tokens)
                    runs[way].append((alone, over))
    return runs


async def _pace_over_grpc(way: str, server: ServerProcess, num_streams: int, max_tokens: int) -> Pace:
    process, us, tally = psutil.Process(server.process.pid), psutil.Process(), Tally()
    before_s, our_before_s, began_s = _loop_cpu_s(process), _cpu_s(us), time.monotonic()
    await WAYS[way](server.generation, [start_of(n, max_tokens) for n in range(num_streams)], tally)
    took_s = time.monotonic() - began_s
    assert tally.num_tokens == num_streams * max_tokens, "tokens were lost"
    return Pace(
        tally.num_tokens / took_s,
        _median_gap_ms(tally.eldest_s),
        1e6 * (_loop_cpu_s(process) - before_s) / tally.num_tokens,
        1e6 * (_cpu_s(us) - our_before_s) / tally.num_tokens,
    )


def _median_gap_ms(moments_s: Sequence[float]) -> float:
    """A machine that others use, too, takes much longer for some steps: of the median that is no part."""
    return 1e3 * statistics.median(after - before for before, after in pairwise(moments_s))


def _loop_cpu_s(process: psutil.Process) -> float:
    """Of its main thread."""
    return sum(times.user_time + times.system_time for times in process.threads() if times.id == process.pid)


@asynccontextmanager
async def _engine_alone(flags: Sequence[str]) -> AsyncIterator[Callable[[int, int], Awaitable[Pace]]]:
    """An engine in a process of its own, which runs so many requests of so many tokens each time it is told
    to."""
    async with child_process(
        *(sys.executable, "-m", MODULE, "engine", *flags), stdin=PIPE, stdout=PIPE, stderr=DEVNULL
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        told, heard = process.stdin, process.stdout

        async def run(num_streams: int, max_tokens: int) -> Pace:
            told.write(f"{num_streams} {max_tokens}\n".encode())
            return Pace(*json.loads(await heard.readline()))

        yield run


async def engine_alone(flags: Sequence[str]) -> None:
    """For each line on stdin, a number of streams and of tokens, print the pace of an engine that nothing
    stands in front of."""
    config = load_config(flags)
    model = model_from_files(config, lambda stage, done, total: None)
    numbers = count()

    async def one(engine: AsyncEngine, number: int, max_tokens: int) -> list[float]:
        """The moments at which its tokens came."""
        request = Request(
            request_id=RequestId(f"r{next(numbers)}"),
            prompt_token_ids=tuple(start_of(number, max_tokens).token_ids.ids),
            sampling=SamplingParams(temperature=0.0),
            stop=StopConditions(max_tokens=max_tokens, ignore_eos=True),
        )
        stream = engine.submit(request)
        return [time.monotonic() async for event in stream if isinstance(event, TokenEvent)]

    async with AsyncEngine(model, config.engine_config(Path(config.model))) as engine:
        while line := await asyncio.to_thread(sys.stdin.readline):
            num_streams, max_tokens = map(int, line.split())
            began_s, cpu_before_s = time.monotonic(), time.thread_time()
            # The first begins a step alone, as of requests that don't come all at the same moment.
            running = [asyncio.create_task(one(engine, 0, max_tokens))]
            for _ in range(2):  # it is submitted; the engine takes it up
                await asyncio.sleep(0)
            running += [asyncio.create_task(one(engine, n, max_tokens)) for n in range(1, num_streams)]
            eldest_s, *_ = await asyncio.gather(*running)
            num_tokens = num_streams * max_tokens
            pace = Pace(
                num_tokens / (time.monotonic() - began_s),
                _median_gap_ms(eldest_s),
                1e6 * (time.thread_time() - cpu_before_s) / num_tokens,
            )
            print(json.dumps([pace.tokens_per_s, pace.gap_ms, pace.loop_ms]), flush=True)


def clock_server(step_ms: float, flags: Sequence[str]) -> int:
    """The real service program over a `ClockRunner`."""

    def source(config: ServiceConfig, progress: LoadProgress) -> LoadedModel:
        return make_clock_model(step_ms / 1e3, config.max_num_seqs)

    return serve(["--model", "clock", *flags], source)


def main() -> None:
    """Read the flags, and measure."""
    match sys.argv[1:]:
        case [clock, *flags] if clock.startswith("clock:"):
            sys.exit(clock_server(float(clock.removeprefix("clock:")), flags))
        case ["engine", *flags]:
            let_threads_sleep()
            asyncio.run(engine_alone(flags))
            return
    parser = argparse.ArgumentParser("python -m tests.benchmarks.streams", description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="?", choices=["load", "tax"], default="load")
    parser.add_argument("--streams", type=numbers, help="how many at once, comma-separated")
    parser.add_argument("--tokens", type=int, help="of each answer")
    parser.add_argument("--step-ms", type=reals, default=[100.0], help="comma-separated")
    parser.add_argument("--ways", type=words, default=list(WAYS), help=", ".join(WAYS))
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=1)
    arguments = parser.parse_args()
    is_tax = arguments.what == "tax"
    arguments.streams = arguments.streams or ([16, 64] if is_tax else [1000])
    arguments.tokens = arguments.tokens or (64 if is_tax else 100)
    asyncio.run((measure_tax if is_tax else measure_load)(arguments))


if __name__ == "__main__":
    main()
