"""`headrace bench`: puts load on a server and measures what its callers would see."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from headrace.clients.bench_arrivals import arrival_times
from headrace.clients.bench_backend import Ask, Backend, BackendError, Connection, RequestFailedError, Server
from headrace.clients.bench_dataset import read_workload
from headrace.clients.bench_load import LoadOptions, LoadRun
from headrace.clients.bench_stats import RequestRecord, Summary, Targets, summarize
from headrace.clients.bench_view import watched
from headrace.clients.bench_workload import (
    Lengths,
    SyntheticOptions,
    Workload,
    WorkloadError,
    synthetic,
    warm_up_turn,
)
from headrace.clients.errors import HeadraceError

DEFAULT_PROMPT_LEN = "128"
DEFAULT_OUTPUT_LEN = "64"
DEFAULT_NUM_REQUESTS = 64
WARM_UP_LEN = 16
"""Most tokens made for a warm-up request."""


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """A load test. None of `concurrency`, `rate_per_s` and recorded arrivals: a closed loop of 16.

    Args:
        dataset: file of a workload; None: a synthetic one.
        prompt_len, output_len: distributions of lengths, see `Lengths`.
        shared_prefix_len, num_prefixes, num_turns: of a synthetic workload, see `SyntheticOptions`.
        vocabulary_size: of a synthetic workload; None: as the server says; a server that says nothing gets
            texts.
        num_requests: conversations to send; None: as many as the file has, or 64, or what `duration_s`
            allows.
        duration_s: no conversation begins later.
        concurrency: see `LoadOptions`.
        rate_per_s: mean arrivals per second (open loop); infinity: all at once.
        arrivals: "poisson", "constant", or "recorded": when the dataset says.
        burstiness: see `arrival_times`.
        num_warm_up: requests sent before, which count nowhere.
        is_length_forced: answers are exactly as long as the workload says; otherwise at most.
        targets: for goodput.
        timeout_s: see `LoadOptions`.
        seed: of everything that is drawn.
    """

    dataset: Path | None = None
    prompt_len: str | None = None
    output_len: str | None = None
    shared_prefix_len: int = 0
    num_prefixes: int = 1
    num_turns: int = 1
    vocabulary_size: int | None = None
    num_requests: int | None = None
    duration_s: float | None = None
    concurrency: int | None = None
    rate_per_s: float | None = None
    arrivals: str = "poisson"
    burstiness: float = 1.0
    num_warm_up: int = 4
    is_length_forced: bool = True
    targets: Targets = field(default_factory=Targets)
    timeout_s: float | None = None
    seed: int = 0

    def check(self) -> None:
        """Check what can be checked without a server.

        Raises:
            WorkloadError: two settings don't go together, or one is out of its range.
        """
        for word in (self.prompt_len, self.output_len):
            if word is not None:
                Lengths(word)
        if self.arrivals == "recorded" and (self.rate_per_s is not None or self.dataset is None):
            raise WorkloadError(
                "recorded arrivals come from a dataset, and it alone says when: leave out the rate"
            )
        if self.dataset is not None and (
            self.prompt_len is not None
            or self.shared_prefix_len
            or self.num_turns > 1
            or self.num_prefixes > 1
        ):
            raise WorkloadError(
                "a dataset has its own prompts: leave out their length, shared prefixes and turns"
            )
        if self.rate_per_s is None and self.burstiness != 1.0:
            raise WorkloadError("only arrivals at a rate can be bursty: give a rate, too")
        if self.rate_per_s == math.inf and self.num_requests is None and self.duration_s is not None:
            raise WorkloadError("an infinite rate never ends: give a number of requests")
        for name, value in (("duration", self.duration_s), ("timeout", self.timeout_s)):
            if value is not None and not 0 < value < math.inf:
                raise WorkloadError(f"a {name} of {value:g} s is out of range: use a number above 0")
        if self.rate_per_s is not None:
            try:
                arrival_times(self.rate_per_s, self.arrivals, self.burstiness, self.seed)
            except ValueError as error:
                raise WorkloadError(str(error)) from None


@dataclass(frozen=True, slots=True)
class BenchResult:
    """A run that is over, or was ended.

    Args:
        workload: its name.
        is_repeated: some prompts were sent more than once, so a prefix cache may have had them.
        num_warm_up: warm-up requests that were sent.
    """

    settings: BenchSettings
    server: Server
    workload: str
    began: datetime
    records: tuple[RequestRecord, ...]
    summary: Summary
    is_repeated: bool
    num_warm_up: int
    is_interrupted: bool = False


async def run_bench(
    backend: Backend, settings: BenchSettings, console: Console, title: str = ""
) -> BenchResult:
    """Measure. Cancelled, it returns what there is and says so in the result.

    Args:
        console: where progress goes.

    Raises:
        BackendError: the server can't be measured.
        WorkloadError: the workload is wrong, or not one for this server.
    """
    settings.check()
    server = await backend.describe()
    workload = await asyncio.to_thread(make_workload, settings, server)
    if workload.has_several_turns and not workload.is_text and not backend.tells_output:
        raise WorkloadError(
            "a later turn repeats what was answered, and this server tells no token ids: use prompts of text"
        )
    options = load_options(settings, workload)
    loads: list[LoadRun] = []
    began = datetime.now(UTC)
    is_interrupted = False
    try:
        async with backend.connect() as connection:
            await _warm_up(connection, workload, settings)
            load, began = LoadRun(connection, workload, options), datetime.now(UTC)
            loads.append(load)
            async with watched(console, title or _title(server, workload), load, options):
                is_interrupted = not await _ran_to_the_end(load)
    except HeadraceError as error:
        # Once it runs, what goes wrong is a result, told by each request that it hit.
        if not loads:
            raise BackendError(f"{server.address}: {error.message}") from error
    records = tuple(record for load in loads for record in load.records)
    return BenchResult(
        settings=settings,
        server=server,
        workload=workload.name,
        began=began,
        records=records,
        summary=summarize(records, settings.targets),
        is_repeated=workload.size is not None and len(records) > workload.size,
        num_warm_up=settings.num_warm_up,
        is_interrupted=is_interrupted,
    )


async def _ran_to_the_end(load: LoadRun) -> bool:
    """Run; False when it was ended before by a cancellation, which is thereby taken notice of."""
    try:
        await load.run()
    except asyncio.CancelledError:
        return False
    return True


def make_workload(settings: BenchSettings, server: Server) -> Workload:
    """The workload of these settings.

    Raises:
        WorkloadError: it is wrong.
    """
    output_len = None if settings.output_len is None else Lengths(settings.output_len)
    if settings.dataset is not None:
        return read_workload(settings.dataset, output_len, settings.seed)
    return synthetic(
        SyntheticOptions(
            prompt_len=Lengths(settings.prompt_len or DEFAULT_PROMPT_LEN),
            output_len=output_len or Lengths(DEFAULT_OUTPUT_LEN),
            shared_prefix_len=settings.shared_prefix_len,
            num_prefixes=settings.num_prefixes,
            num_turns=settings.num_turns,
            vocabulary_size=settings.vocabulary_size or server.vocabulary_size,
            seed=settings.seed,
        )
    )


def load_options(settings: BenchSettings, workload: Workload) -> LoadOptions:
    """How the workload is sent.

    Raises:
        WorkloadError: recorded arrivals are asked for and there are none.
    """
    num_conversations = settings.num_requests
    if num_conversations is None and settings.duration_s is None:
        num_conversations = workload.size or DEFAULT_NUM_REQUESTS
    concurrency = settings.concurrency
    arrivals = None
    if settings.arrivals == "recorded":
        if not workload.has_arrivals:
            raise WorkloadError(f"{workload.name}: says of no request when it arrives (arrival_s)")
        size = workload.size or 0
        if num_conversations is None or num_conversations > size:
            num_conversations = size
        recorded = [workload.conversation(number).arrival_s or 0.0 for number in range(size)]
        if recorded != sorted(recorded):
            raise WorkloadError(f"{workload.name}: requests are not in the order in which they arrive")
        arrivals = iter([*recorded, math.inf])
    elif settings.rate_per_s is not None:
        arrivals = arrival_times(settings.rate_per_s, settings.arrivals, settings.burstiness, settings.seed)
    elif concurrency is None:
        concurrency = 16
    return LoadOptions(
        arrivals=arrivals,
        concurrency=concurrency,
        num_conversations=num_conversations,
        duration_s=settings.duration_s,
        is_length_forced=settings.is_length_forced,
        timeout_s=settings.timeout_s,
    )


async def _warm_up(connection: Connection, workload: Workload, settings: BenchSettings) -> None:
    """Send requests that count nowhere, all at once; a server that fails them all can't be measured."""

    async def send(number: int) -> RequestFailedError | None:
        turn = warm_up_turn(workload, number, WARM_UP_LEN)
        try:
            async for _ in connection.ask(Ask(turn.prompt, turn.output_len, settings.is_length_forced)):
                pass
        except RequestFailedError as error:
            return error
        return None

    outcomes = await asyncio.gather(*map(send, range(settings.num_warm_up)))
    failures = [outcome for outcome in outcomes if outcome is not None]
    if failures and len(failures) == len(outcomes):
        raise BackendError(f"every warm-up request failed: {failures[0].code}: {failures[0].message}")


def _title(server: Server, workload: Workload) -> str:
    return f"{workload.name} to {server.address} over {server.protocol}"
