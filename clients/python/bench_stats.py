"""What a load test measures, defined once. Every time is in seconds, on the client's clock.

One request leaves a `RequestRecord`; the words below are those of DistServe (OSDI 2024) and of the field:

- *TTFT*, time to first token: from when the request was due to its first token. Waiting is part of it.
- *ITL*, inter-token latency: the gap before each token but the first. Where tokens arrive together, all but
  one of them have a gap of zero.
- *TPOT*, time per output token: (last token - first token) / (tokens - 1), one number per request, none where
  there is a single token.
- *e2e*: from when the request was due to its last token.
- *goodput*: requests per second that met every target. One that failed met none.

A request is *due* when the arrival process says so, or, in a closed loop, when a place became free. Latencies
are counted from there and not from when the client came to send it, so that a client or server that falls
behind can't hide it ("coordinated omission"). How far behind the client was is told as `lateness`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

PERCENTILES = (50, 90, 95, 99)


@dataclass(slots=True)
class RequestRecord:
    """What the client saw of one request. Times are seconds since the run began.

    Args:
        number: place in the order of sending.
        num_wanted: tokens that were asked for.
        due_s: when it should have been sent.
        sent_s: when it was sent; None: it never was.
        num_prompt_tokens: as the server told, else as the client knows; None: nobody knows.
        arrivals: (time, tokens that came then), in order.
        end_s: when it was over, for better or worse.
        error: code of what it failed with, such as RESOURCE_EXHAUSTED or HTTP_503.
        message: what the server said about it.
        queued_s: how long the server says it waited.
        num_cached_tokens: prompt tokens that the server did not have to compute; None where it doesn't tell.
        num_preemptions: how often the server took its memory away.
    """

    number: int
    num_wanted: int
    due_s: float
    sent_s: float | None = None
    num_prompt_tokens: int | None = None
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    end_s: float | None = None
    error: str | None = None
    message: str = ""
    queued_s: float | None = None
    num_cached_tokens: int | None = None
    num_preemptions: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether it ended as it should."""
        return self.error is None and self.end_s is not None

    @property
    def num_tokens(self) -> int:
        """Tokens received."""
        return sum(count for _, count in self.arrivals)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.arrivals[0][0] - self.due_s if self.arrivals else None

    @property
    def itls_s(self) -> list[float]:
        """Inter-token latencies: one fewer than there are tokens."""
        gaps: list[float] = []
        before_s: float | None = None
        for time_s, count in self.arrivals:
            if before_s is not None:
                gaps.append(time_s - before_s)
            gaps.extend([0.0] * (count - 1))
            before_s = time_s
        return gaps

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first."""
        if self.num_tokens < 2:
            return None
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / (self.num_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        """End-to-end latency."""
        return self.arrivals[-1][0] - self.due_s if self.arrivals else None

    @property
    def lateness_s(self) -> float | None:
        """How long after it was due the client sent it."""
        return None if self.sent_s is None else self.sent_s - self.due_s


@dataclass(frozen=True, slots=True)
class Distribution:
    """A set of values in few numbers; `percentiles` are (percent, value). Empty sets have no
    `Distribution`."""

    count: int
    mean: float
    minimum: float
    maximum: float
    percentiles: tuple[tuple[int, float], ...]

    def at(self, percent: int) -> float:
        """The value of one of `PERCENTILES`."""
        return dict(self.percentiles)[percent]


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of the values do not exceed, between neighbours in proportion.

    The same as `numpy.percentile` by its default method: position (n - 1) · percent / 100 among the sorted.

    Args:
        values: at least one.
        percent: 0 to 100.
    """
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def distribution(values: Iterable[float | None]) -> Distribution | None:
    """The distribution of the values that exist."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Distribution(
        count=len(known),
        mean=math.fsum(known) / len(known),
        minimum=min(known),
        maximum=max(known),
        percentiles=tuple((percent, percentile(known, percent)) for percent in PERCENTILES),
    )


@dataclass(frozen=True, slots=True)
class Targets:
    """What a request must keep to count as good, seconds; None: no such target."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None

    @property
    def are_any(self) -> bool:
        """Whether there is any target at all."""
        return (self.ttft_s, self.tpot_s, self.itl_s, self.e2e_s) != (None, None, None, None)

    def are_met_by(self, record: RequestRecord) -> bool:
        """Whether a request kept all of them. For ITL every gap counts. One token has no TPOT: that is
        kept."""
        if not record.is_complete or record.ttft_s is None:
            return False
        seen = (
            (self.ttft_s, record.ttft_s),
            (self.tpot_s, record.tpot_s),
            (self.itl_s, max(record.itls_s, default=None)),
            (self.e2e_s, record.e2e_s),
        )
        return all(target is None or value is None or value <= target for target, value in seen)


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in figures. Latencies are of complete requests; failed ones are counted beside them.

    Args:
        num_requests: all that were due within the run: complete + failed.
        errors: (code, how many), most frequent first.
        wall_s: from when the first was due to the end of the last, failed ones included.
        num_prompt_tokens, num_output_tokens: of complete requests.
        num_lost_tokens: received for requests that then failed; in no throughput.
        num_short: complete ones that made fewer tokens than were asked for.
        output_tokens_per_s, total_tokens_per_s, requests_per_s: of complete requests, over `wall_s`.
        goodput_per_s: requests per second that met the targets; None without targets.
        good_share: share of all requests that met them.
        peak_concurrency: most requests that were open at once.
    """

    num_requests: int
    num_complete: int
    num_failed: int
    errors: tuple[tuple[str, int], ...]
    wall_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_lost_tokens: int
    num_short: int
    num_preemptions: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    goodput_per_s: float | None
    good_share: float | None
    peak_concurrency: int
    ttft_s: Distribution | None
    itl_s: Distribution | None
    tpot_s: Distribution | None
    e2e_s: Distribution | None
    queued_s: Distribution | None
    lateness_s: Distribution | None


def summarize(records: Sequence[RequestRecord], targets: Targets | None = None) -> Summary:
    """The figures of a run.

    Args:
        records: every request of it, failed ones included.
        targets: what counts as good.
    """
    targets = targets or Targets()
    complete = [record for record in records if record.is_complete]
    failed = [record for record in records if not record.is_complete]
    wall_s = _wall_s(records)
    num_prompt_tokens = sum(record.num_prompt_tokens or 0 for record in complete)
    num_output_tokens = sum(record.num_tokens for record in complete)
    num_good = sum(targets.are_met_by(record) for record in records)

    def per_s(count: int) -> float:
        return count / wall_s if wall_s > 0 else 0.0

    return Summary(
        num_requests=len(records),
        num_complete=len(complete),
        num_failed=len(failed),
        errors=tuple(Counter(record.error or "UNFINISHED" for record in failed).most_common()),
        wall_s=wall_s,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=sum(record.num_cached_tokens or 0 for record in complete),
        num_output_tokens=num_output_tokens,
        num_lost_tokens=sum(record.num_tokens for record in failed),
        num_short=sum(record.num_tokens < record.num_wanted for record in complete),
        num_preemptions=sum(record.num_preemptions for record in complete),
        output_tokens_per_s=per_s(num_output_tokens),
        total_tokens_per_s=per_s(num_prompt_tokens + num_output_tokens),
        requests_per_s=per_s(len(complete)),
        goodput_per_s=per_s(num_good) if targets.are_any else None,
        good_share=num_good / len(records) if targets.are_any and records else None,
        peak_concurrency=peak_concurrency(records),
        ttft_s=distribution(record.ttft_s for record in complete),
        itl_s=distribution(gap for record in complete for gap in record.itls_s),
        tpot_s=distribution(record.tpot_s for record in complete),
        e2e_s=distribution(record.e2e_s for record in complete),
        queued_s=distribution(record.queued_s for record in complete),
        lateness_s=distribution(record.lateness_s for record in records),
    )


def _wall_s(records: Sequence[RequestRecord]) -> float:
    ends = [record.end_s for record in records if record.end_s is not None]
    return max(ends) - min(record.due_s for record in records) if ends else 0.0


def peak_concurrency(records: Iterable[RequestRecord]) -> int:
    """Most requests that were open (sent and not over) at once; one that ends makes room for the next."""
    changes: list[tuple[float, int]] = []
    for record in records:
        if record.sent_s is not None and record.end_s is not None:
            changes += [(record.sent_s, 1), (record.end_s, -1)]
    peak = num_open = 0
    for _, change in sorted(changes):
        num_open += change
        peak = max(peak, num_open)
    return peak
