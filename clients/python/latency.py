"""A server's latency budget: what it promises, and how that is kept."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration

from headrace.v1 import control_pb2


@dataclass(frozen=True, slots=True)
class LatencyClass:
    """What is promised to requests of a priority, and how it is kept. Sequences without a token don't count.

    Args:
        priority: None for all that have no targets of their own.
        tpot_s: target of the time per output token, (last token - first token) / (tokens - 1); None: none.
        ttft_s: target of the time from arrival to first token; None: none.
        is_attainable: whether the targets could be kept with a single sequence running.
        num_sequences: that have ended since the start.
        num_over_tpot, num_over_ttft: those of them that missed the target of their time.
        attained_tpot_p95_s, attained_ttft_p95_s: 95 in 100 of the last 256 that have ended since the
            targets were set were not above it; None before there is one.
    """

    priority: int | None
    tpot_s: float | None = None
    ttft_s: float | None = None
    is_attainable: bool = True
    num_sequences: int = 0
    num_over_tpot: int = 0
    num_over_ttft: int = 0
    attained_tpot_p95_s: float | None = None
    attained_ttft_p95_s: float | None = None


@dataclass(frozen=True, slots=True)
class LatencyStatus:
    """The latency budget as it stands.

    Args:
        classes: all with targets of their own, after the one for everybody else; none where an older server
            doesn't tell.
        predicted_step_s: what a step that decodes everything that runs now is expected to take.
        predicted_ttft_s: how long a short request that came now is expected to wait for its first token.
        num_steps_over: steps since the start that took longer than the targets left them.
        num_late: sequences that wait and can't have their first token in time any more.
    """

    classes: tuple[LatencyClass, ...] = ()
    predicted_step_s: float = 0.0
    predicted_ttft_s: float = 0.0
    num_steps_over: int = 0
    num_late: int = 0


def latency_from_proto(message: control_pb2.LatencyStatus) -> LatencyStatus:
    """The latency budget."""
    return LatencyStatus(
        classes=tuple(_class_from_proto(each) for each in message.classes),
        predicted_step_s=duration_s(message.predicted_step),
        predicted_ttft_s=duration_s(message.predicted_time_to_first_token),
        num_steps_over=message.steps_over,
        num_late=message.num_late,
    )


def budget_to_proto(
    tpot_s: float | None, ttft_s: float | None, priority: int | None
) -> control_pb2.SetLatencyBudgetRequest:
    """What is to be promised from now on; None asks for no target."""
    request = control_pb2.SetLatencyBudgetRequest(priority=priority)
    if tpot_s is not None:
        request.time_per_output_token.FromNanoseconds(round(tpot_s * 1e9))
    if ttft_s is not None:
        request.time_to_first_token.FromNanoseconds(round(ttft_s * 1e9))
    return request


def _class_from_proto(message: control_pb2.LatencyClass) -> LatencyClass:
    def given(name: str) -> float | None:
        return duration_s(getattr(message, name)) if message.HasField(name) else None

    return LatencyClass(
        priority=message.priority if message.HasField("priority") else None,
        tpot_s=given("time_per_output_token"),
        ttft_s=given("time_to_first_token"),
        is_attainable=message.attainable,
        num_sequences=message.sequences,
        num_over_tpot=message.over_time_per_output_token,
        num_over_ttft=message.over_time_to_first_token,
        attained_tpot_p95_s=given("attained_time_per_output_token_p95"),
        attained_ttft_p95_s=given("attained_time_to_first_token_p95"),
    )


def duration_s(duration: Duration) -> float:
    """Seconds of a span of time on the wire."""
    return duration.seconds + duration.nanos / 1e9
