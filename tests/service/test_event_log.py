from __future__ import annotations

import pytest

from headrace.service.event_log import EventLog
from headrace.service.status import RpcFailure
from headrace.v1.generation_pb2 import Delta, GenerationEvent


def filled(number: int, max_bytes: int = 1000) -> EventLog:
    log = EventLog(max_bytes)
    for sequence in range(number):
        log.add(GenerationEvent(request_id="a", sequence=sequence, delta=Delta(text="x" * 10)))
    return log


def numbers(log: EventLog, after: int | None) -> list[int]:
    return [event.sequence for event in log.after(after)]


def test_what_comes_behind_any_event_is_there_until_it_is_acknowledged() -> None:
    log = filled(5)
    assert numbers(log, None) == [0, 1, 2, 3, 4]
    assert numbers(log, 2) == [3, 4]
    assert numbers(log, 4) == []
    log.acknowledge(2)
    assert numbers(log, 2) == [3, 4]
    log.acknowledge(1)
    assert numbers(log, 3) == [4]
    are_empty = [log.is_empty]
    log.acknowledge(4)
    are_empty.append(log.is_empty)
    assert are_empty == [False, True]
    assert numbers(log, 4) == []


@pytest.mark.parametrize("after", [None, 0, 1, 5, 2**64 - 1])
def test_what_is_not_there_is_refused_and_nothing_changes(after: int | None) -> None:
    log = filled(5)
    log.acknowledge(2)
    with pytest.raises(RpcFailure) as refusal:
        log.after(after)
    assert refusal.value.reason == "INVALID_ACTION"
    assert refusal.value.violations[0].field == "resume.last_sequence"
    assert numbers(log, 2) == [3, 4]


def test_what_was_never_sent_is_not_acknowledged() -> None:
    log = filled(2)
    with pytest.raises(RpcFailure) as refusal:
        log.acknowledge(2)
    assert refusal.value.violations[0].field == "acknowledge.sequence"
    assert numbers(log, None) == [0, 1]


def test_it_is_full_by_bytes_until_enough_is_acknowledged() -> None:
    log = filled(4, max_bytes=1000)
    are_full = [log.is_full]
    log.acknowledge(1)
    are_full.append(log.is_full)
    assert are_full == [True, False]
