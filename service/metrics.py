"""What Prometheus is told. Counters are fed as things happen; gauges are read off the engine at each scrape.

No label has a value that callers choose, but for the client's name, which is told only where that is asked
for and only of clients that have shown who they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.engine import AsyncEngine, FinishEvent, LatencyStatus, Load, StepStats
from headrace.service.identity import Caller

_PREFIX = "headrace"
_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
_TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The truth at the moment of a scrape, as the event loop sees it.

    Args:
        silent_s: time without progress while there is work, seconds.
        lag_s: how long the event loop let the question wait, seconds.
    """

    model: str
    load: Load
    max_num_seqs: int
    silent_s: float
    lag_s: float = 0.0
    num_detached: int = 0


class Metrics:
    """All metrics of one server, in a registry of their own. Belongs to the event loop's thread.

    Args:
        names_clients: whether tokens and requests are counted by client, too.
    """

    def __init__(self, *, names_clients: bool = False) -> None:
        self.registry = CollectorRegistry()
        self._names_clients = names_clients
        self._model = ""
        # Of each request that was admitted and is not over, by the index of the sequence: its last step.
        self._followed: dict[str, dict[int, float]] = {}
        # Over, while what the step that ran then has made for them may not have been told yet.
        self._over: list[str] = []
        self._told: dict[tuple[str, ...], Counter] = {}
        client = ("client",) if names_clients else ()
        self._prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens of admitted requests.", ("model", *client)
        )
        self._generation_tokens = self._counter(
            "generation_tokens",
            "Tokens of answers, counted as they are handed to their readers; what was made and never "
            "fetched, or not told (best_of), is not among them.",
            ("model", *client),
        )
        self._prefix_queries = self._counter(
            "prefix_cache_queries",
            "Prompt tokens of finished requests that could have come from the prefix cache.",
        )
        self._prefix_hits = self._counter(
            "prefix_cache_hits",
            "Prompt tokens whose KV came from the prefix cache. What a request computes again after a "
            "preemption, or shares among its own sequences, is no hit.",
        )
        self._success = self._counter(
            "request_success", "Sequences that ended normally, by why.", ("model", "finished_reason")
        )
        self._failures = self._counter(
            "request_failure", "Requests that were admitted and then failed, by gRPC code.", ("model", "code")
        )
        self._rejections = self._counter(
            "admission_rejections",
            "Requests that were refused before anything was computed for them, by the reason in ErrorInfo.",
            ("reason",),
        )
        self._auth_failures = self._counter(
            "auth_failures", "RPCs that were not let in, by the reason in their ErrorInfo.", ("reason",)
        )
        self._slow_readers = self._counter(
            "slow_readers",
            "Streams and requests that were given up because nobody read: age, a message waited too long; "
            "bytes, too much waited; credit, none was granted, or nothing acknowledged, for too long.",
            ("limit",),
        )
        self._rpcs = self._counter(
            "rpcs", "RPCs of headrace.v1 that ended, by gRPC code.", ("method", "code")
        )
        self._make_histograms()

    def _make_histograms(self) -> None:
        self._iteration_tokens = self._histogram(
            "iteration_tokens", "Tokens computed in one step, prompts and answers together.", _TOKEN_BUCKETS
        )
        self._step_seconds = self._histogram(
            "step_seconds", "Time of one step: planned, computed, taken in.", _GAP_BUCKETS
        )
        self._gap = self._histogram(
            "inter_token_latency_seconds",
            "Time between two steps that gave a sequence its tokens, preemptions included, as the server "
            "saw it. Tokens that one step gives together count once.",
            _GAP_BUCKETS,
        )
        self._first = self._histogram(
            "time_to_first_token_seconds",
            "Arrival to first token, of each sequence that ended.",
            _LATENCY_BUCKETS,
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "Arrival to end, of each admitted request.", _LATENCY_BUCKETS
        )
        self._queue = self._histogram(
            "request_queue_time_seconds",
            "Arrival to the first step that computed a token of it.",
            _LATENCY_BUCKETS,
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "That step's start to the first token.", _LATENCY_BUCKETS
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "First token to last token.", _LATENCY_BUCKETS
        )

    def opened(self, model: str) -> None:
        """From now on it is served under this name."""
        self._model = model
        self._told.clear()

    @property
    def num_followed(self) -> int:
        """Requests of which something is remembered."""
        return len(self._followed)

    def admitted(self, request_id: str, caller: Caller, num_prompt_tokens: int) -> None:
        """The engine has queued a request; `request_ended` is to follow."""
        self._followed[request_id] = {}
        self._prompt_tokens.labels(self._model, *self._client(caller)).inc(num_prompt_tokens)

    def told(self, caller: Caller, num_tokens: int) -> None:
        """Tokens are handed to their reader."""
        client = self._client(caller)
        counter = self._told.get(client)
        if counter is None:
            # Found once: this is called for each message.
            counter = self._told[client] = self._generation_tokens.labels(self._model, *client)
        counter.inc(num_tokens)

    def rejected(self, reason: str) -> None:
        """A request was refused before anything was computed for it."""
        self._rejections.labels(reason).inc()

    def shut_out(self, reason: str) -> None:
        """An RPC was not let in."""
        self._auth_failures.labels(reason).inc()

    def slow_reader(self, limit: str) -> None:
        """A reader was too slow."""
        self._slow_readers.labels(limit).inc()

    def rpc_ended(self, method: str, code: grpc.StatusCode) -> None:
        """An RPC of ours is over."""
        self._rpcs.labels(method.rpartition("/")[2], code.name).inc()

    def sequence_ended(self, end: FinishEvent, *, uses_prefix_cache: bool) -> None:
        """A sequence ended normally."""
        self._success.labels(self._model, end.reason.value).inc()
        timings = end.timings
        for histogram, value in (
            (self._first, timings.first_token_s),
            (self._queue, timings.queued_s),
            (self._prefill, timings.prefill_s),
            (self._decode, timings.decode_s),
        ):
            if value is not None:
                histogram.labels(self._model).observe(value)
        if end.index == 0 and uses_prefix_cache and timings.queued_s is not None:
            self._prefix_queries.labels(self._model).inc(end.usage.num_prompt_tokens)
            self._prefix_hits.labels(self._model).inc(end.usage.num_cached_tokens)

    def request_ended(self, request_id: str, duration_s: float, failed_with: str | None) -> None:
        """A request that was admitted is over.

        Args:
            failed_with: gRPC code; None for a normal end.
        """
        if self._followed.get(request_id):
            self._over.append(request_id)
        else:
            self._followed.pop(request_id, None)
        self._whole.labels(self._model).observe(duration_s)
        if failed_with is not None:
            self._failures.labels(self._model, failed_with).inc()

    def stepped(self, stats: StepStats, now_s: float) -> None:
        """A step is done.

        Args:
            now_s: monotonic seconds.
        """
        num_tokens = 0
        gaps, followed = self._gap.labels(self._model), self._followed
        for row in stats.rows:
            num_tokens += row.num_prefill_tokens + row.num_decode_tokens
            if not row.num_output_tokens:
                continue
            sequences = followed.get(row.request_id)
            if sequences is None:
                # Cancelled while the step was under way: nobody waits for what it made.
                continue
            before_s = sequences.get(row.index)
            if before_s is not None:
                gaps.observe(now_s - before_s)
            sequences[row.index] = now_s
            if row.is_finished:
                del sequences[row.index]
        for request_id in self._over:
            followed.pop(request_id, None)
        self._over.clear()
        self._iteration_tokens.labels(self._model).observe(num_tokens)
        self._step_seconds.labels(self._model).observe(stats.schedule_s + stats.execute_s + stats.update_s)

    def _client(self, caller: Caller) -> tuple[str, ...]:
        return (caller.name,) if self._names_clients else ()

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ("model",)) -> Counter:
        return Counter(f"{_PREFIX}_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{_PREFIX}_{name}", text, ("model",), registry=self.registry, buckets=buckets)


async def follow_steps(engine: AsyncEngine, metrics: Metrics, clock: Callable[[], float]) -> None:
    """Tell `metrics` of each step until the engine ends."""
    async with engine.watch_steps() as watch:
        async for _, stats in watch:
            metrics.stepped(stats, clock())


class LoadCollector:
    """Asks for the truth at each scrape.

    Args:
        snapshot: the truth; None while no model is served.
    """

    def __init__(self, snapshot: Callable[[], Snapshot | None]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterator[Metric]:
        """Nothing beforehand: a registry would ask for the truth otherwise."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The gauges, and the sums that the engine keeps itself."""
        now = self._snapshot()
        yield _gauge(
            "up", "1 while a model is served and the event loop answers.", {(): 0.0 if now is None else 1.0}
        )
        if now is None:
            return
        load, blocks = now.load, now.load.blocks
        model = (now.model,)
        for name, text, value in (
            ("num_requests_running", "Sequences that have a place in the batch.", load.num_running),
            ("num_requests_waiting", "Sequences that wait for a place.", load.num_waiting),
            (
                "num_requests_paused",
                "Sequences that neither run nor wait, because their readers lag.",
                load.num_paused,
            ),
            (
                "num_requests_detached",
                "Requests that no stream holds, because theirs has broken, and that may be resumed.",
                now.num_detached,
            ),
            ("max_num_seqs", "Places in the batch.", now.max_num_seqs),
            (
                "kv_cache_usage_perc",
                "Share of the KV blocks that live sequences hold, 0 to 1; cached ones are free for them.",
                blocks.live / blocks.total if blocks.total else 0.0,
            ),
            (
                "silent_seconds",
                "Time without a finished step while there is work; 0 when idle.",
                now.silent_s,
            ),
            ("event_loop_lag_seconds", "How long the event loop let this scrape wait.", now.lag_s),
        ):
            yield _gauge(name, text, {model: float(value)}, ("model",))
        yield _gauge(
            "kv_blocks",
            "Blocks of the KV pool by state; live + cached + free is the pool.",
            {
                (*model, state): float(number)
                for state, number in (("live", blocks.live), ("cached", blocks.cached), ("free", blocks.free))
            },
            ("model", "state"),
        )
        yield from _sums(now.model, load)
        yield from _latencies(now.model, load.latency)


def _sums(name: str, load: Load) -> Iterator[Metric]:
    """What the engine has summed up since the start."""
    model, totals = (name,), load.totals
    drafts = totals.speculation
    for metric, text, number in (
        (
            "spec_decode_num_drafts",
            "How often a sequence had proposed tokens in a step.",
            drafts.num_drafted_draws,
        ),
        (
            "spec_decode_num_draft_tokens",
            "Tokens that were proposed and judged; what was proposed behind an end was not.",
            drafts.num_draft_tokens,
        ),
        (
            "spec_decode_num_accepted_tokens",
            "Those of them that stand in an answer: never more than were proposed.",
            drafts.num_accepted_tokens,
        ),
        (
            "spec_decode_num_draft_failures",
            "How often a sequence went without proposals because the draft model failed.",
            drafts.num_draft_failures,
        ),
        (
            "latency_steps_over",
            "Steps that took longer than the latency targets left them.",
            load.latency.num_steps_over,
        ),
        (
            "num_preemptions",
            "Sequences that lost their KV to others and are computed again.",
            totals.num_preemptions,
        ),
        ("engine_steps", "Steps that were computed since the start.", totals.num_steps),
        (
            "engine_steps_ahead",
            "Those of them that were planned and launched while the one before them ran.",
            totals.num_ahead_steps,
        ),
    ):
        family = CounterMetricFamily(f"{_PREFIX}_{metric}", text, labels=("model",))
        family.add_metric(model, number)
        yield family


def _latencies(model: str, status: LatencyStatus) -> Iterator[Metric]:
    """What is promised and how it is kept, by priority class and kind of time."""
    labels = ("model", "priority", "kind")
    target = GaugeMetricFamily(f"{_PREFIX}_latency_target_seconds", "What is promised.", labels=labels)
    attained = GaugeMetricFamily(
        f"{_PREFIX}_latency_attained_seconds",
        "What 95 in 100 of the last sequences since the targets were set kept to.",
        labels=labels,
    )
    misses = CounterMetricFamily(
        f"{_PREFIX}_latency_misses", "Sequences that ended and had missed the target.", labels=labels
    )
    for each in status.classes:
        priority = "others" if each.priority is None else str(each.priority)
        for kind, target_s, kept_s, num_missed in (
            ("time_per_output_token", each.tpot_s, each.attained_tpot_p95_s, each.num_over_tpot),
            ("time_to_first_token", each.ttft_s, each.attained_ttft_p95_s, each.num_over_ttft),
        ):
            if target_s is None:
                continue
            key = (model, priority, kind)
            target.add_metric(key, target_s)
            misses.add_metric(key, num_missed)
            if kept_s is not None:
                attained.add_metric(key, kept_s)
    yield from (target, attained, misses)


def _gauge(
    name: str, text: str, values: dict[tuple[str, ...], float], labels: tuple[str, ...] = ()
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family
