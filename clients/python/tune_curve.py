"""The throughput/latency curve of a server, its knee, and the best point that keeps a promise.

A server in a closed loop of growing concurrency makes more tokens per second, and each caller waits longer
for each token; beyond some point callers lose more than the whole gains. That point is the *knee*, found as
in Kneedle (Satopää, Albrecht, Irwin, Raghavan: "Finding a 'Kneedle' in a Haystack", ICDCSW 2011), without its
smoothing and its threshold, which need more points than one measures here:

1. Only the frontier counts: points that no other one beats in throughput at the same latency or less.
2. Latency and throughput are scaled so that the frontier runs from (0, 0) to (1, 1).
3. The knee is where throughput is ahead of latency by most: the largest y - x.

A frontier that nowhere lies above its own diagonal has no bend: every step costs as much as it gains. Where
points of higher concurrency than its last one gained nothing more, that last one is the knee; where none was
measured, the knee lies out of range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One setting, measured.

    Args:
        concurrency: requests at a time.
        max_num_batched_tokens: of the server; None: as it was.
        output_tokens_per_s: of all callers together.
        tpot_p50_s, tpot_p95_s, ttft_p50_s, ttft_p95_s: see `bench_stats`.
        num_failed: requests that failed: such a point is drawn and never recommended.
    """

    concurrency: int
    max_num_batched_tokens: int | None
    output_tokens_per_s: float
    requests_per_s: float
    tpot_p50_s: float
    tpot_p95_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    num_requests: int
    num_failed: int = 0


@dataclass(frozen=True, slots=True)
class LatencyBudget:
    """What is promised to callers: 95 % of requests stay within it. None: nothing."""

    tpot_s: float | None = None
    ttft_s: float | None = None

    @property
    def is_any(self) -> bool:
        """Whether anything is promised."""
        return self.tpot_s is not None or self.ttft_s is not None

    def is_kept_by(self, point: CurvePoint) -> bool:
        """Whether a point keeps it."""
        return (self.tpot_s is None or point.tpot_p95_s <= self.tpot_s) and (
            self.ttft_s is None or point.ttft_p95_s <= self.ttft_s
        )


def frontier(points: Sequence[CurvePoint]) -> list[CurvePoint]:
    """The points without failures that no other one beats, by median TPOT and then by throughput, both
    growing."""
    usable = [point for point in points if point.num_failed == 0]
    best: list[CurvePoint] = []
    for point in sorted(usable, key=lambda point: (point.tpot_p50_s, -point.output_tokens_per_s)):
        if not best or point.output_tokens_per_s > best[-1].output_tokens_per_s:
            best.append(point)
    return best


def find_knee(points: Sequence[CurvePoint]) -> CurvePoint | None:
    """The sweet spot, as this module says; None where it lies beyond what was measured."""
    curve = frontier(points)
    if not curve:
        return None
    latencies = _scaled([point.tpot_p50_s for point in curve])
    throughputs = _scaled([point.output_tokens_per_s for point in curve])
    gains = [throughput - latency for latency, throughput in zip(latencies, throughputs, strict=True)]
    place = max(range(len(curve)), key=gains.__getitem__)
    if gains[place] > 1e-9:
        return curve[place]
    is_last = all(point.num_failed or point.concurrency <= curve[-1].concurrency for point in points)
    return None if is_last else curve[-1]


def _scaled(values: Sequence[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]


def best_within(points: Sequence[CurvePoint], budget: LatencyBudget) -> CurvePoint | None:
    """The point of highest throughput that keeps the budget; None if none does."""
    keeping = [point for point in points if point.num_failed == 0 and budget.is_kept_by(point)]
    return max(keeping, key=lambda point: point.output_tokens_per_s, default=None)
