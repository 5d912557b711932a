"""Everything that can go wrong with a call, one class per thing that a caller would do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

_STATUS_DETAILS_KEY = "grpc-status-details-bin"
_BROKEN_WRITE = "Internal error from Core"
"""What gRPC says, instead of a status, where a connection ends in the middle of a write."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field that the server can't take, and what would be right.

    Args:
        field: path of the field as the protocol spells it, such as ``sampling.top_p``.
    """

    field: str
    description: str


class HeadraceError(Exception):
    """Root of all errors of this package.

    Args:
        message: what was wrong, made for a person.
        code: the gRPC status behind it.
    """

    def __init__(self, message: str, *, code: grpc.StatusCode = grpc.StatusCode.UNKNOWN) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class InvalidArgument(HeadraceError):
    """The request can't be served as it stands; sending it again is of no use.

    Args:
        violations: the fields to change; may be empty when the server named none.
    """

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT,
        violations: tuple[FieldViolation, ...] = (),
    ) -> None:
        super().__init__(message, code=code)
        self.violations = violations

    @classmethod
    def of(cls, field: str, description: str) -> InvalidArgument:
        """Build the usual case: one field, one reason."""
        return cls(f"{field}: {description}", violations=(FieldViolation(field, description),))


class NotFound(HeadraceError):
    """No such model, service or request."""


class AlreadyExists(HeadraceError):
    """A live request of this caller already has this id."""


class Unauthenticated(HeadraceError):
    """The server wants credentials, or other ones."""


class PermissionDenied(HeadraceError):
    """The credentials are good but do not allow this."""


class Unimplemented(HeadraceError):
    """The server's build does not have this feature or service."""


class DeadlineExceeded(HeadraceError):
    """The call's deadline passed before it was finished."""


class Cancelled(HeadraceError):
    """The call was cancelled, by this side or by the other."""


class ServerError(HeadraceError):
    """The server failed on this request: a bug, out of memory, a result that is no number."""


class ProtocolError(ServerError):
    """The server said something that the protocol does not allow, such as events that miss a number."""


class Pushback(HeadraceError):
    """The server can't take the request now, but may later.

    Args:
        retry_after_s: when the server says that it makes sense to try again, seconds; None when it doesn't
            say.
    """

    def __init__(self, message: str, *, code: grpc.StatusCode, retry_after_s: float | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class Unavailable(Pushback):
    """Nobody answers, or the server is loading or draining."""

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, code=code, retry_after_s=retry_after_s)


class Overloaded(Pushback):
    """The server's queue or a limit is full, or this reader was too slow."""

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode = grpc.StatusCode.RESOURCE_EXHAUSTED,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, code=code, retry_after_s=retry_after_s)


_PLAIN: dict[grpc.StatusCode, type[HeadraceError]] = {
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.INTERNAL: ServerError,
    grpc.StatusCode.UNKNOWN: ServerError,
    grpc.StatusCode.DATA_LOSS: ServerError,
}
_PUSHBACK: dict[grpc.StatusCode, type[Unavailable] | type[Overloaded]] = {
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
}
_CODE_OF_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def error_from_status(status: status_pb2.Status) -> HeadraceError:
    """The error that a google.rpc.Status stands for, its details included."""
    code = _CODE_OF_NUMBER.get(status.code, grpc.StatusCode.UNKNOWN)
    return _build(code, status.message, status.details)


def reason_from_status(status: status_pb2.Status) -> str:
    """The word for programs in a google.rpc.Status; empty where there is none."""
    for detail in status.details:
        found = error_details_pb2.ErrorInfo()
        if detail.Unpack(found):
            return found.reason
    return ""


def error_from_rpc(error: grpc.aio.AioRpcError) -> HeadraceError:
    """The error that a failed RPC stands for, its google.rpc.Status details included where it has any."""
    message = error.details() or error.code().name
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and "Deadline Exceeded" in message:
        # gRPC's own words for a deadline that this side kept; a server's would say more.
        message = "the deadline passed before the answer was complete"
    if error.code() is grpc.StatusCode.INTERNAL and message.startswith(_BROKEN_WRITE):
        return Unavailable("the connection was lost while a message was sent")
    return _build(error.code(), message, _details_of(error))


def _details_of(error: grpc.aio.AioRpcError) -> Iterable[AnyMessage]:
    for key, value in error.trailing_metadata() or ():
        if key == _STATUS_DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value).details
            except DecodeError:
                return ()  # a proxy's garbage must not hide the RPC's own code
    return ()


def _build(code: grpc.StatusCode, message: str, details: Iterable[AnyMessage]) -> HeadraceError:
    if code in _PUSHBACK:
        return _PUSHBACK[code](message, retry_after_s=_retry_after_s(details))
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE):
        return InvalidArgument(message, code=code, violations=_violations(details))
    return _PLAIN.get(code, HeadraceError)(message, code=code)


def _retry_after_s(details: Iterable[AnyMessage]) -> float | None:
    for detail in details:
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(retry):
            return retry.retry_delay.ToTimedelta().total_seconds()
    return None


def _violations(details: Iterable[AnyMessage]) -> tuple[FieldViolation, ...]:
    found: list[FieldViolation] = []
    for detail in details:
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            found.extend(FieldViolation(v.field, v.description) for v in bad.field_violations)
    return tuple(found)
