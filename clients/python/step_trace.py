"""A step log as a trace that Perfetto and chrome://tracing show.

The format is Chrome's "Trace Event Format": an object with `traceEvents`; times are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.clients.events import StepReport
from headrace.clients.step_log import StepLog, short_label, work_of

_PROCESS = 1
_ENGINE = 0
"""Lane of the steps themselves; slot n is lane n + 1."""

TraceEvent = dict[str, object]


def trace_of(log: StepLog) -> dict[str, object]:
    """The trace: a lane for the steps and their parts, one for each slot, counters of tokens, blocks, queue.

    A slice of a slot is one step's work for one sequence; the steps that were not seen are one slice of the
    steps' lane.
    """
    origin_s = log.reports[0].start_s
    events = [*_names(log)]
    before: StepReport | None = None
    for report in log.reports:
        if before is not None and report.step > before.step + 1:
            events.append(_unseen(before, report, origin_s))
        events += _step(report, origin_s)
        before = report
    return {
        "displayTimeUnit": "ms",
        "otherData": {"model": log.model, "batching": log.batching},
        "traceEvents": events,
    }


def _names(log: StepLog) -> Iterator[TraceEvent]:
    yield _name("process_name", _ENGINE, f"headrace {log.model} ({log.batching} batching)")
    lanes = ["steps", *(f"slot {slot}" for slot in range(log.num_slots))]
    for lane, name in enumerate(lanes):
        yield _name("thread_name", lane, name)
        yield {
            "ph": "M",
            "pid": _PROCESS,
            "tid": lane,
            "name": "thread_sort_index",
            "args": {"sort_index": lane},
        }


def _name(kind: str, lane: int, name: str) -> TraceEvent:
    return {"ph": "M", "pid": _PROCESS, "tid": lane, "name": kind, "args": {"name": name}}


def _step(report: StepReport, origin_s: float) -> Iterator[TraceEvent]:
    start_s = report.start_s - origin_s
    yield _slice(
        f"step {report.step}",
        _ENGINE,
        start_s,
        report.duration_s,
        category="step",
        details={
            "waiting": report.num_waiting,
            "prefill_tokens": report.num_prefill_tokens,
            "decode_tokens": report.num_decode_tokens,
            "output_tokens": sum(row.num_output_tokens for row in report.rows),
        },
    )
    part_s = start_s
    for name, duration_s in (
        ("schedule", report.schedule_s),
        ("execute", report.execute_s),
        ("update", report.update_s),
    ):
        yield _slice(name, _ENGINE, part_s, duration_s, category="part", details={})
        part_s += duration_s
    for row in report.rows:
        label = short_label(row.request) + (f" [{row.index}]" if row.index else "")
        yield _slice(
            f"{label} {work_of(row)}",
            row.slot + 1,
            start_s,
            report.duration_s,
            category=work_of(row).value,
            details={
                "request": row.request,
                "index": row.index,
                "step": report.step,
                "prefill_tokens": row.num_prefill_tokens,
                "decode_tokens": row.num_decode_tokens,
                "output_tokens": row.num_output_tokens,
                "finished": row.is_finished,
            },
        )
    if report.num_preemptions:
        yield {
            "ph": "i",
            "s": "p",
            "pid": _PROCESS,
            "tid": _ENGINE,
            "ts": _us(start_s),
            "name": f"{report.num_preemptions} preempted",
        }
    blocks = report.blocks
    counters: tuple[tuple[str, dict[str, int]], ...] = (
        ("tokens", {"prefill": report.num_prefill_tokens, "decode": report.num_decode_tokens}),
        ("KV blocks", {"live": blocks.live, "cached": blocks.cached, "free": blocks.free}),
        ("sequences", {"running": report.num_running, "waiting": report.num_waiting}),
    )
    for name, values in counters:
        yield {"ph": "C", "pid": _PROCESS, "ts": _us(start_s), "name": name, "args": values}


def _unseen(before: StepReport, after: StepReport, origin_s: float) -> TraceEvent:
    start_s = before.start_s + before.duration_s
    return _slice(
        f"{after.step - before.step - 1} steps not seen",
        _ENGINE,
        start_s - origin_s,
        max(0.0, after.start_s - start_s),
        category="unseen",
        details={"first_step": before.step + 1, "end_step": after.step},
    )


def _slice(
    name: str, lane: int, start_s: float, duration_s: float, *, category: str, details: dict[str, object]
) -> TraceEvent:
    return {
        "ph": "X",
        "pid": _PROCESS,
        "tid": lane,
        "ts": _us(start_s),
        "dur": _us(duration_s),
        "name": name,
        "cat": category,
        "args": details,
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
