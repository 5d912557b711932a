"""The latency budget at the border: targets that an operator sets, and what is told of them."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.duration_pb2 import Duration

from headrace.engine import (
    MAX_LATENCY_TARGET_S,
    MIN_LATENCY_TARGET_S,
    FieldViolation,
    InvalidRequest,
    LatencyClass,
    LatencyStatus,
    LatencyTargets,
)
from headrace.service.convert import seconds
from headrace.service.limits import Limits
from headrace.service.status import duration
from headrace.service.unsupported import unknown_fields
from headrace.service.violations import duration_violations
from headrace.v1 import control_pb2


def targets_from_proto(
    request: control_pb2.SetLatencyBudgetRequest, limits: Limits
) -> tuple[LatencyTargets, int | None]:
    """The targets, and the priority class that they are for; None for all.

    Raises:
        InvalidRequest: with everything that is wrong.
    """
    violations = [*unknown_fields(request)]
    for name in ("time_per_output_token", "time_to_first_token"):
        if request.HasField(name):
            violations += _target_violations(name, getattr(request, name))
    is_known = limits.min_priority <= request.priority <= limits.max_priority
    if request.HasField("priority") and not is_known:
        wanted = f"must be from {limits.min_priority} to {limits.max_priority}"
        violations.append(FieldViolation("priority", f"{wanted}, got {request.priority}"))
    if violations:
        raise InvalidRequest(*violations)
    targets = LatencyTargets(
        seconds(request.time_per_output_token) if request.HasField("time_per_output_token") else None,
        seconds(request.time_to_first_token) if request.HasField("time_to_first_token") else None,
    )
    return targets, request.priority if request.HasField("priority") else None


def latency_to_proto(status: LatencyStatus) -> control_pb2.LatencyStatus:
    """What is promised, and how it is kept."""
    return control_pb2.LatencyStatus(
        classes=[_class_to_proto(each) for each in status.classes],
        predicted_step=duration(status.predicted_step_s),
        predicted_time_to_first_token=duration(status.predicted_ttft_s),
        steps_over=status.num_steps_over,
        num_late=status.num_late,
    )


def _class_to_proto(each: LatencyClass) -> control_pb2.LatencyClass:
    return control_pb2.LatencyClass(
        priority=each.priority,
        time_per_output_token=_duration(each.tpot_s),
        time_to_first_token=_duration(each.ttft_s),
        attainable=each.is_attainable,
        sequences=each.num_sequences,
        over_time_per_output_token=each.num_over_tpot,
        over_time_to_first_token=each.num_over_ttft,
        attained_time_per_output_token_p95=_duration(each.attained_tpot_p95_s),
        attained_time_to_first_token_p95=_duration(each.attained_ttft_p95_s),
    )


def _target_violations(name: str, span: Duration) -> Iterator[FieldViolation]:
    wrong = [*duration_violations(name, span)]
    if wrong:
        yield from wrong
    elif not MIN_LATENCY_TARGET_S <= seconds(span) <= MAX_LATENCY_TARGET_S:
        yield FieldViolation(
            name,
            f"must be from {MIN_LATENCY_TARGET_S:g} to {MAX_LATENCY_TARGET_S:g} s, got {seconds(span):g} s; "
            "leave it out for no target",
        )


def _duration(span_s: float | None) -> Duration | None:
    return None if span_s is None else duration(span_s)
