"""Ten times more than a server can do: how fast are most turned away, and how long do the others wait?

python -m tests.benchmarks.overload --model smollm2-135m-instruct --seconds 60 --times 10

First it measures what the server can do of short requests. Then come

- `flood`: so many times as much, at even intervals, whatever becomes of those before;
- `huge`: few prompts, so long that they are so many times too many tokens;
- `clients`: the flood once more, by one client, while another one asks once a second.

Refusals are timed by the client from the call to its end, waits from the call to the first token. A refusal
counts as a fault unless it is RESOURCE_EXHAUSTED and says when to come back.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import math
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from grpc_health.v1.health_pb2 import HealthCheckResponse

from headrace.clients import ControlClient, Delta, HeadraceError, InferenceClient, Overloaded, RetryPolicy
from tests.benchmarks.options import add_model_options, model_path, words
from tests.support.server_process import ServerProcess, server_process

NUM_PLACES, MOST_WAITING, MOST_WAITING_TOKENS = 16, 64, 32_768
PROMPT_LEN, NUM_TOKENS = 8, 16
HUGE_LEN = 3_000
NUM_BLOCKS, BLOCK_SIZE = 256, 16
FLOOD, POLITE = "flood", "polite"
_ONCE = RetryPolicy(max_attempts=1)
_LOOK_EVERY_S = 0.1


@dataclass
class Outcomes:
    """What became of one client's requests.

    Args:
        refusals_s: from the call to its refusal, seconds.
        firsts_s: from the call to its first token, seconds, of those that were served.
        num_cut: taken back by their client before an end.
        faults: other ends, in words.
    """

    refusals_s: list[float] = field(default_factory=list)
    firsts_s: list[float] = field(default_factory=list)
    num_cut: int = 0
    faults: list[str] = field(default_factory=list)


@dataclass
class Phase:
    """One kind of load.

    Args:
        offered_per_s: requests per second of all clients; 0 where all come at once.
        by_client: outcomes by name.
        mib: resident memory of the server before, at most, and when all had gone.
        idle_again_s: from the last call until nobody runs or waits, seconds.
    """

    name: str
    offered_per_s: float
    by_client: dict[str, Outcomes]
    mib: tuple[float, float, float] = (0.0, 0.0, 0.0)
    idle_again_s: float = 0.0


class Load:
    """Clients of one server.

    Args:
        server: the program.
        clients: connections by the client's name.
        control: the operator's.
        vocab_size: of its model.
    """

    def __init__(
        self,
        server: ServerProcess,
        clients: dict[str, InferenceClient],
        control: ControlClient,
        vocab_size: int,
    ) -> None:
        self._clients = clients
        self._control = control
        self._rng = random.Random(1)
        self._vocab_size = vocab_size
        self._process = psutil.Process(server.process.pid)

    async def capacity_per_s(self, num_rounds: int = 10) -> float:
        """Requests per second with all places taken."""
        outcomes, began_s = Outcomes(), time.monotonic()

        async def one_place() -> None:
            for _ in range(num_rounds):
                await self._ask(FLOOD, self._prompt(PROMPT_LEN), outcomes)

        await asyncio.gather(*(one_place() for _ in range(NUM_PLACES)))
        if outcomes.faults or outcomes.refusals_s:
            raise RuntimeError(f"not even so many are served: {outcomes}")
        return num_rounds * NUM_PLACES / (time.monotonic() - began_s)

    async def flood(self, per_s: float, seconds: float) -> Phase:
        """Short requests of one client."""
        phase = Phase("flood", per_s, {FLOOD: Outcomes()})
        async with self._watched(phase):
            await self._arrive(phase, FLOOD, per_s, seconds)
        return phase

    async def two_clients(self, per_s: float, seconds: float) -> Phase:
        """The same, and another client beside it."""
        phase = Phase("clients", per_s + 1, {FLOOD: Outcomes(), POLITE: Outcomes()})
        async with self._watched(phase):
            await asyncio.gather(
                self._arrive(phase, FLOOD, per_s, seconds), self._arrive(phase, POLITE, 1, seconds)
            )
        return phase

    async def huge(self, per_s: float, seconds: float) -> Phase:
        """Long prompts; what is not served when no more come is taken back."""
        phase = Phase("huge", per_s, {FLOOD: Outcomes()})
        async with self._watched(phase):
            await self._arrive(phase, FLOOD, per_s, seconds, HUGE_LEN, are_cut=True)
        return phase

    async def _arrive(
        self,
        phase: Phase,
        name: str,
        per_s: float,
        seconds: float,
        prompt_len: int = PROMPT_LEN,
        *,
        are_cut: bool = False,
    ) -> None:
        """At even intervals, whatever becomes of those before.

        Args:
            are_cut: whether those who still wait at the end are taken back, not waited for.
        """
        began_s, outcomes = time.monotonic(), phase.by_client[name]
        asked: list[asyncio.Task[None]] = []
        for number in range(math.ceil(per_s * seconds)):
            await asyncio.sleep(max(0.0, began_s + number / per_s - time.monotonic()))
            asked.append(asyncio.create_task(self._ask(name, self._prompt(prompt_len), outcomes)))
        if are_cut:
            outcomes.num_cut = sum(task.cancel() for task in asked)
        await asyncio.gather(*asked, return_exceptions=True)

    async def _ask(self, name: str, prompt: list[int], outcomes: Outcomes) -> None:
        began_s, first_s = time.monotonic(), None
        try:
            async for event in self._clients[name].generate(
                prompt, max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0
            ):
                if first_s is None and isinstance(event, Delta):
                    first_s = time.monotonic() - began_s
        except Overloaded as refusal:
            outcomes.refusals_s.append(time.monotonic() - began_s)
            if not refusal.retry_after_s:
                outcomes.faults.append(f"a refusal does not say when to come back: {refusal}")
        except HeadraceError as error:
            outcomes.faults.append(f"{type(error).__name__}: {error}")
        else:
            if first_s is None:
                outcomes.faults.append("an answer without a token")
            else:
                outcomes.firsts_s.append(first_s)

    def _prompt(self, num_tokens: int) -> list[int]:
        """Of its own: nothing of it is cached."""
        return [self._rng.randrange(2, self._vocab_size) for _ in range(num_tokens)]

    @asynccontextmanager
    async def _watched(self, phase: Phase) -> AsyncIterator[None]:
        """Watch the server's memory meanwhile, and wait until it is idle."""
        before = most = self._mib()

        async def look() -> None:
            nonlocal most
            while True:
                most = max(most, self._mib())
                await asyncio.sleep(_LOOK_EVERY_S)

        looking = asyncio.create_task(look())
        try:
            yield
        finally:
            looking.cancel()
        began_s = time.monotonic()
        while (load := await self._control.load()).num_running or load.num_waiting:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_EVERY_S)
        phase.idle_again_s = time.monotonic() - began_s
        phase.mib = (before, max(most, self._mib()), self._mib())

    def _mib(self) -> float:
        return float(self._process.memory_info().rss) / 2**20


async def overload(
    model: Path, flags: Sequence[str], times: float, seconds: float, phases: Sequence[str]
) -> tuple[float, list[Phase]]:
    """Capacity, requests per second, and what came of each kind of load."""
    tokens = {name: f"{name}-token" for name in (FLOOD, POLITE)}
    with tempfile.TemporaryDirectory() as folder:
        auth = Path(folder) / "tokens"
        auth.write_text(
            "".join(
                f"{name}:sha256${hashlib.sha256(token.encode()).hexdigest()}:generate,control\n"
                for name, token in tokens.items()
            )
        )
        own = (
            *(f"--model={model}", f"--max-num-seqs={NUM_PLACES}", f"--max-num-waiting={MOST_WAITING}"),
            *(f"--max-waiting-tokens={MOST_WAITING_TOKENS}", f"--auth-tokens={auth}"),
            # So few that all are touched before memory is looked at.
            *(f"--num-blocks={NUM_BLOCKS}", f"--block-size={BLOCK_SIZE}"),
        )
        async with (
            server_process(
                "serve", Path(folder) / "ready.json", *own, *flags, module="headrace.service"
            ) as server,
            InferenceClient(f"127.0.0.1:{server.port}", token=tokens[FLOOD], retry=_ONCE) as flooding,
            InferenceClient(f"127.0.0.1:{server.port}", token=tokens[POLITE], retry=_ONCE) as polite,
            ControlClient(f"127.0.0.1:{server.control_port}", token=tokens[POLITE]) as control,
        ):
            await server.until_health(HealthCheckResponse.SERVING)
            vocab_size = (await polite.models())[0].vocabulary_size
            load = Load(server, {FLOOD: flooding, POLITE: polite}, control, vocab_size)
            await load.capacity_per_s(1)
            per_s = await load.capacity_per_s()
            huge_per_s = per_s * (PROMPT_LEN + NUM_TOKENS) / (HUGE_LEN + NUM_TOKENS)
            kinds = {
                "flood": lambda: load.flood(times * per_s, seconds),
                "huge": lambda: load.huge(times * huge_per_s, seconds),
                "clients": lambda: load.two_clients(times * per_s, seconds),
            }
            return per_s, [await kinds[name]() for name in phases]


def table(per_s: float, phases: Sequence[Phase]) -> str:
    """For a person."""
    heads = ("load", "client", "offered", "served", "cut short", "refused", "refusal p50", "p99", "most")
    more = ("first token p50", "p99", "most", "MiB before, most, after", "idle again")
    bound_s = (MOST_WAITING + NUM_PLACES) / per_s
    can_do = f"{per_s:.1f} requests/s of {PROMPT_LEN} + {NUM_TOKENS} tokens are all that it can do"
    lines = [
        f"{can_do}: at that rate the last of {MOST_WAITING} in the queue would begin within {bound_s:.1f} s"
    ]
    lines.append(
        "{:8} {:6} {:>8} {:>6} {:>9} {:>7} {:>11} {:>6} {:>6}".format(*heads)
        + "  {:>15} {:>6} {:>6}  {:>23}  {:>10}".format(*more)
    )
    for phase in phases:
        for name, outcomes in phase.by_client.items():
            refused, first = _spread(outcomes.refusals_s, 1e3), _spread(outcomes.firsts_s, 1.0)
            lines.append(
                f"{phase.name:8} {name:6} {phase.offered_per_s:6.1f}/s {len(outcomes.firsts_s):6} "
                f"{outcomes.num_cut:9} {len(outcomes.refusals_s):7} "
                f"{refused[0]:>8} ms {refused[1]:>6} {refused[2]:>6}  "
                f"{first[0]:>13} s {first[1]:>6} {first[2]:>6}  "
                f"{'{:.0f}, {:.0f}, {:.0f}'.format(*phase.mib):>23}  {phase.idle_again_s:8.1f} s"
            )
            lines += [f"! {fault}" for fault in outcomes.faults[:10]]
    return "\n".join(lines)


def _spread(seconds: Sequence[float], unit: float) -> tuple[str, str, str]:
    """Median, the 99th of 100, and the most."""
    if not seconds:
        return "-", "-", "-"
    last = max(seconds)
    p99 = statistics.quantiles(seconds, n=100, method="inclusive")[98] if len(seconds) > 1 else last
    return f"{unit * statistics.median(seconds):.1f}", f"{unit * p99:.1f}", f"{unit * last:.1f}"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        "python -m tests.benchmarks.overload", description=__doc__.split("\n")[0]
    )
    add_model_options(parser)
    parser.add_argument("--seconds", type=float, default=60, help="of each kind of load")
    parser.add_argument("--times", type=float, default=10, help="more than it can do")
    parser.add_argument(
        "--loads", type=words, default=["flood", "huge", "clients"], help="which kinds, comma-separated"
    )
    parser.add_argument("flags", nargs="*", help="of `headrace serve`, behind --")
    arguments = parser.parse_args()
    per_s, phases = asyncio.run(
        overload(model_path(arguments), arguments.flags, arguments.times, arguments.seconds, arguments.loads)
    )
    print(table(per_s, phases))
    if any(outcomes.faults for phase in phases for outcomes in phase.by_client.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
