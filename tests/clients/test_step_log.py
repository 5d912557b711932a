from __future__ import annotations

from headrace.clients.step_log import Gap, Span, StepLog, Work, requests_in_order, short_label
from tests.support.step_reports import make_reports


def log_of(*steps: str, num_slots: int = 2) -> StepLog:
    return StepLog(make_reports(5, *steps), num_slots, "continuous")


def test_a_lane_is_prefill_then_decode_then_the_next_request() -> None:
    log = log_of("a12 b3", "a4 b", "a b!", "a! c7", ". c!")
    assert log.spans() == (
        Span("97:a", 0, 0, Work.PREFILL, 5, 7, num_tokens=16),
        Span("97:a", 0, 0, Work.DECODE, 7, 9, num_tokens=2, is_finished=True),
        Span("98:b", 0, 1, Work.PREFILL, 5, 6, num_tokens=3),
        Span("98:b", 0, 1, Work.DECODE, 6, 8, num_tokens=2, is_finished=True),
        Span("99:c", 0, 1, Work.PREFILL, 8, 9, num_tokens=7),
        Span("99:c", 0, 1, Work.DECODE, 9, 10, num_tokens=1, is_finished=True),
    )
    assert (log.first_step, log.end_step, log.num_steps, log.num_requests) == (5, 10, 5, 3)
    assert log.occupancy == 9 / 10


def test_sequences_of_one_request_are_told_apart() -> None:
    spans = log_of("a", "a/1").spans()
    assert [(span.index, span.first_step, span.num_steps) for span in spans] == [(0, 5, 1), (1, 6, 1)]


def test_a_slot_that_rests_a_step_is_two_spans() -> None:
    assert [(span.first_step, span.end_step) for span in log_of("a", ".", "a").spans()] == [(5, 6), (7, 8)]


def test_a_sequence_that_comes_again_after_its_end_is_another_span() -> None:
    assert len(log_of("a!", "a").spans()) == 2


def test_steps_that_were_not_seen_are_a_gap_and_no_span_goes_over_them() -> None:
    log = log_of("a .", "-", "-", "a .", "a .", "-", "a .")
    assert log.gaps() == (Gap(6, 8), Gap(10, 11))
    assert [(span.first_step, span.end_step) for span in log.spans()] == [(5, 6), (8, 10), (11, 12)]
    assert log.num_steps == 7
    assert log.occupancy == 0.5


def test_requests_are_ordered_by_when_they_are_first_seen() -> None:
    logs = [log_of("b .", "b a"), log_of("c .")]
    assert requests_in_order(logs) == ["98:b", "97:a", "99:c"]


def test_the_label_is_what_the_client_said() -> None:
    assert short_label("12:my:label") == "my:label"
    assert short_label("my:label") == "my:label"
    assert short_label("12:") == "12:"
    assert short_label("plain") == "plain"
