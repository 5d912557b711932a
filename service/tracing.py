"""Traces: what OpenTelemetry is told of a request, once it is over. To send them needs `headrace[otel]`.

A span for the request, which continues its caller's trace, and in it one for each of its three parts: queue,
prefill, decode. Ids, sizes, times and outcomes: never a prompt, never an answer, never a token id.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from headrace.engine import Timings


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request that is over.

    Args:
        traceparent: its caller's place in a trace; empty for none.
        client: its client's name; empty for none.
        ended_ns: when it was over, nanoseconds since the epoch.
        timings: of its first sequence, if that ended normally.
        outcome: how it ended: the finish reasons, or a gRPC code and a reason.
    """

    request_id: str
    model: str
    traceparent: str
    client: str
    ended_ns: int
    duration_s: float
    timings: Timings | None
    outcome: str
    is_failure: bool
    num_prompt_tokens: int
    num_completion_tokens: int
    num_preemptions: int

    @property
    def began_ns(self) -> int:
        """When it arrived, nanoseconds since the epoch."""
        return self.ended_ns - round(self.duration_s * 1e9)

    def parts(self) -> Iterator[tuple[str, int, int]]:
        """Name, begin and end of each part that it came to, nanoseconds since the epoch."""
        if self.timings is None:
            return
        at_ns = self.began_ns
        for name, span_s in (
            ("queue", self.timings.queued_s),
            ("prefill", self.timings.prefill_s),
            ("decode", self.timings.decode_s),
        ):
            if span_s is None:
                return
            ends_ns = at_ns + round(span_s * 1e9)
            yield name, at_ns, ends_ns
            at_ns = ends_ns


class Tracer(Protocol):
    """Where records go."""

    def record(self, record: RequestRecord) -> None:
        """Take one. Quick, and never raises."""

    def close(self) -> None:
        """Send what has not been sent."""


class NoTracer:
    """Nowhere."""

    def record(self, record: RequestRecord) -> None:
        """Forget it."""

    def close(self) -> None:
        """Nothing is left."""
