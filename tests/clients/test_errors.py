"""Each status becomes the class that says what to do about it."""

from __future__ import annotations

import copy

import grpc
import pytest

from headrace.clients import InferenceClient, RetryPolicy, errors
from headrace.clients.errors import HeadraceError, error_from_status
from tests.support.fake_scripts import bad_request, fails, retry_info, status_of
from tests.support.fake_server import running_fake_server

CLASS_OF_CODE = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgument,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidArgument,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExists,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: errors.Cancelled,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.UNIMPLEMENTED: errors.Unimplemented,
    grpc.StatusCode.INTERNAL: errors.ServerError,
    grpc.StatusCode.UNKNOWN: errors.ServerError,
    grpc.StatusCode.DATA_LOSS: errors.ServerError,
    grpc.StatusCode.FAILED_PRECONDITION: errors.HeadraceError,
    grpc.StatusCode.ABORTED: errors.HeadraceError,
}


def test_every_failure_code_has_a_class() -> None:
    assert CLASS_OF_CODE.keys() == set(grpc.StatusCode) - {grpc.StatusCode.OK}


@pytest.mark.parametrize("code", CLASS_OF_CODE, ids=lambda code: code.name)
def test_a_status_message_becomes_its_class(code: grpc.StatusCode) -> None:
    error = error_from_status(status_of(code, "what was wrong"))
    assert type(error) is CLASS_OF_CODE[code]
    assert (error.code, error.message, str(error)) == (code, "what was wrong", "what was wrong")


@pytest.mark.parametrize("code", CLASS_OF_CODE, ids=lambda code: code.name)
async def test_a_failed_rpc_becomes_the_same_class(code: grpc.StatusCode) -> None:
    async with (
        running_fake_server(fails(code, "what was wrong")) as server,
        InferenceClient(server.target, retry=RetryPolicy(max_attempts=1)) as client,
    ):
        with pytest.raises(HeadraceError) as caught:
            await client.generate_once("hello")
    assert type(caught.value) is CLASS_OF_CODE[code]
    assert (caught.value.code, caught.value.message) == (code, "what was wrong")


def test_a_connection_that_is_lost_in_the_middle_of_a_write_is_no_fault_of_the_server() -> None:
    lost = grpc.aio.AioRpcError(
        grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), details="Internal error from Core"
    )
    assert type(errors.error_from_rpc(lost)) is errors.Unavailable


async def test_field_violations_and_retry_delay_are_read_from_the_details() -> None:
    violations = bad_request(sampling__top_p="must be above 0", prompt="must not be empty")
    async with (
        running_fake_server(
            fails(grpc.StatusCode.INVALID_ARGUMENT, "two fields", violations),
            fails(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_info(1.5)),
        ) as server,
        InferenceClient(server.target, retry=RetryPolicy(max_attempts=1)) as client,
    ):
        with pytest.raises(errors.InvalidArgument) as invalid:
            await client.generate_once("hello")
        with pytest.raises(errors.Overloaded) as overloaded:
            await client.generate_once("hello")
    assert invalid.value.violations == (
        errors.FieldViolation("sampling.top_p", "must be above 0"),
        errors.FieldViolation("prompt", "must not be empty"),
    )
    assert overloaded.value.retry_after_s == pytest.approx(1.5)


def test_an_unknown_code_number_is_still_an_error() -> None:
    status = status_of(grpc.StatusCode.INTERNAL, "odd")
    status.code = 99
    assert error_from_status(status).code is grpc.StatusCode.UNKNOWN


@pytest.mark.parametrize("code", CLASS_OF_CODE, ids=lambda code: code.name)
def test_an_error_can_be_copied_for_each_request_that_it_hits(code: grpc.StatusCode) -> None:
    error = error_from_status(status_of(code, "gone", retry_info(2)))
    twin = copy.copy(error)
    assert type(twin) is type(error)
    assert (twin.code, twin.message) == (error.code, error.message)
    assert getattr(twin, "retry_after_s", None) == getattr(error, "retry_after_s", None)
