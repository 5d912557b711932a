from __future__ import annotations

import json

import jsonschema
import pytest

from headrace.clients.step_log import StepLog
from headrace.clients.step_trace import trace_of
from tests.support.step_reports import make_report, make_reports

NUMBER = {"type": "number", "minimum": 0}
INTEGER = {"type": "integer", "minimum": 0}
EVENT = {
    "M": {"required": ["pid", "tid", "name", "args"]},
    "X": {"required": ["pid", "tid", "ts", "dur", "name", "cat"]},
    "C": {
        "required": ["pid", "ts", "name", "args"],
        "properties": {"args": {"additionalProperties": NUMBER, "minProperties": 1}},
    },
    "i": {"required": ["pid", "tid", "ts", "name", "s"], "properties": {"s": {"enum": ["g", "p", "t"]}}},
}
SCHEMA = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["ph"],
                "properties": {
                    "ph": {"enum": list(EVENT)},
                    "pid": INTEGER,
                    "tid": INTEGER,
                    "ts": NUMBER,
                    "dur": NUMBER,
                    "name": {"type": "string", "minLength": 1},
                    "args": {"type": "object"},
                },
                "allOf": [
                    {"if": {"properties": {"ph": {"const": kind}}}, "then": rule}
                    for kind, rule in EVENT.items()
                ],
            },
        },
    },
}
"""Chrome's Trace Event Format, as far as it is used."""


def events_of(log: StepLog, kind: str) -> list[dict[str, object]]:
    trace = json.loads(json.dumps(trace_of(log)))
    jsonschema.validate(trace, SCHEMA)
    return [event for event in trace["traceEvents"] if event["ph"] == kind]


def test_each_slot_is_a_lane_and_each_steps_work_a_slice_in_it() -> None:
    log = StepLog(make_reports(7, "a12 .", "a b3!"), 2, "static", "tiny")
    names = [event["args"] for event in events_of(log, "M")]
    assert {"name": "slot 1"} in names
    assert {"name": "headrace tiny (static batching)"} in names
    slices = [event for event in events_of(log, "X") if event["tid"] != 0]
    assert [(event["tid"], event["name"], event["ts"], event["dur"]) for event in slices] == [
        (1, "a prefill", 0, 10_000),
        (1, "a decode", 10_000, 10_000),
        (2, "b prefill", 10_000, 10_000),
    ]
    args = slices[2]["args"]
    assert isinstance(args, dict)
    assert (args["request"], args["step"], args["prefill_tokens"], args["finished"]) == ("98:b", 8, 3, True)


def test_a_steps_parts_follow_each_other_within_it() -> None:
    log = StepLog(make_reports(0, "a"), 1, "continuous")
    step, *parts = [event for event in events_of(log, "X") if event["tid"] == 0]
    assert step["dur"] == pytest.approx(10_000)
    assert [part["name"] for part in parts] == ["schedule", "execute", "update"]
    assert [part["ts"] for part in parts] == pytest.approx([0, 1_000, 9_000])


def test_counters_tell_tokens_blocks_and_sequences() -> None:
    log = StepLog((make_report(0, "a12 b", num_waiting=4),), 2, "continuous")
    counters = {event["name"]: event["args"] for event in events_of(log, "C")}
    assert counters == {
        "tokens": {"prefill": 12, "decode": 1},
        "KV blocks": {"live": 20, "cached": 0, "free": 80},
        "sequences": {"running": 2, "waiting": 4},
    }


def test_a_preemption_is_a_moment() -> None:
    log = StepLog((make_report(0, "a"), make_report(1, "b", num_preemptions=2)), 1, "continuous")
    (moment,) = events_of(log, "i")
    assert (moment["name"], moment["ts"]) == ("2 preempted", 10_000)


def test_steps_that_were_not_seen_are_said_to_be_so() -> None:
    log = StepLog(make_reports(0, "a", "-", "-", "a"), 1, "continuous")
    (unseen,) = [event for event in events_of(log, "X") if event["cat"] == "unseen"]
    assert (unseen["name"], unseen["ts"], unseen["dur"]) == ("2 steps not seen", 10_000, 20_000)
