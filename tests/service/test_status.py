from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from headrace.engine import (
    ConfigError,
    DeadlineExceeded,
    DraftingFailed,
    Draining,
    DuplicateRequest,
    EngineDead,
    EngineError,
    FieldViolation,
    InvalidRequest,
    ModelLoadError,
    NoChatTemplate,
    Overloaded,
    RequestFailed,
)
from headrace.service.limits import MAX_DETAILED_VIOLATIONS
from headrace.service.status import (
    RpcFailure,
    failure_from,
    invalid,
    invalid_action,
    not_offered,
    unknown_model,
)
from tests.support.service import detail, reason_of, violated_fields

CODES = {
    InvalidRequest.of("a", "b"): grpc.StatusCode.INVALID_ARGUMENT,
    NoChatTemplate("no template"): grpc.StatusCode.INVALID_ARGUMENT,
    DuplicateRequest("twice"): grpc.StatusCode.ALREADY_EXISTS,
    Overloaded("full", 2.5): grpc.StatusCode.RESOURCE_EXHAUSTED,
    Draining("draining"): grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded("late"): grpc.StatusCode.DEADLINE_EXCEEDED,
    EngineDead("dead"): grpc.StatusCode.INTERNAL,
    RequestFailed("nan"): grpc.StatusCode.INTERNAL,
    ConfigError("no caller's business"): grpc.StatusCode.INTERNAL,
    ModelLoadError("no caller's business"): grpc.StatusCode.INTERNAL,
    DraftingFailed("no caller's business"): grpc.StatusCode.INTERNAL,
    MemoryError("out of memory"): grpc.StatusCode.INTERNAL,
}


@pytest.mark.parametrize(("error", "code"), CODES.items(), ids=[type(error).__name__ for error in CODES])
def test_each_error_has_its_code_and_a_reason(error: Exception, code: grpc.StatusCode) -> None:
    status = failure_from(error).to_status()
    assert status.code == code.value[0]
    assert status.message
    assert reason_of(status).isupper()


def test_every_error_of_the_engine_is_in_the_table() -> None:
    assert {type(error) for error in CODES} >= set(EngineError.__subclasses__())


@pytest.mark.parametrize("error", [ConfigError("secret"), ValueError("secret"), MemoryError("secret")])
def test_what_is_not_meant_for_a_caller_is_not_told(error: Exception) -> None:
    assert "secret" not in failure_from(error).to_status().message


def test_a_failure_is_told_as_it_is() -> None:
    failure = not_offered("Score")
    assert failure_from(failure) is failure
    assert failure.code is grpc.StatusCode.UNIMPLEMENTED


def test_overload_says_when_to_come_again() -> None:
    status = failure_from(Overloaded("full", 2.5)).to_status()
    assert detail(status, error_details_pb2.RetryInfo).retry_delay.ToTimedelta().total_seconds() == 2.5


def test_a_long_list_of_violations_stays_small_enough_for_trailers() -> None:
    failure = invalid(*(FieldViolation(f"field.{i}", "must be better " * 5) for i in range(1000)))
    status = failure.to_status()
    assert len(violated_fields(status)) == MAX_DETAILED_VIOLATIONS
    assert "and 997 more" in status.message
    assert status.ByteSize() < 8192


def test_a_long_model_name_is_not_echoed_whole() -> None:
    assert len(unknown_model("x" * 10**6, "served").message) < 200


def test_details_are_there_only_when_there_is_something_to_say() -> None:
    status = RpcFailure(grpc.StatusCode.UNIMPLEMENTED, "NOT_OFFERED", "no").to_status()
    assert [packed.TypeName() for packed in status.details] == ["google.rpc.ErrorInfo"]


@pytest.mark.parametrize("text", ["x" * 10**6, "é" * 10**6, "%" * 10**6])
def test_however_long_its_texts_a_status_fits_into_trailers(text: str) -> None:
    failure = invalid(*(FieldViolation(text, text) for _ in range(1000)))
    status = failure.to_status()
    assert status.message.endswith("…")
    assert violated_fields(status)[0].endswith("…")
    trailers = rpc_status.to_status(status).trailing_metadata
    assert trailers is not None
    percent_encoded = sum(
        1 if 0x20 <= byte < 0x7F and byte != 0x25 else 3 for byte in status.message.encode()
    )
    assert percent_encoded + sum(len(value) * 4 / 3 for _, value in trailers) < 8000


def test_a_refused_action_does_not_end_its_request_by_its_reason() -> None:
    status = invalid_action(FieldViolation("cancel.#99", "is not known")).to_status()
    assert (status.code, reason_of(status)) == (grpc.StatusCode.INVALID_ARGUMENT.value[0], "INVALID_ACTION")
    assert violated_fields(status) == ["cancel.#99"]
