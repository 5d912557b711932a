"""The one place where an error becomes a gRPC status with google.rpc details."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from headrace.engine import (
    DeadlineExceeded,
    Draining,
    DuplicateRequest,
    EngineDead,
    FieldViolation,
    InvalidRequest,
    NoChatTemplate,
    NothingToDraw,
    Overloaded,
    RequestFailed,
)
from headrace.service.limits import MAX_DETAILED_VIOLATIONS

DOMAIN = "headrace.v1"
_NANOS = 1_000_000_000
# A status travels in HTTP/2 trailers, its message twice and once of it percent-encoded; gRPC begins to
# refuse trailers at 8 KiB.
_MAX_MESSAGE_BYTES = 800
_MAX_FIELD_BYTES = 200
_MAX_VIOLATIONS_BYTES = 3072


@dataclass(frozen=True, slots=True)
class QuotaViolation:
    """Becomes google.rpc.QuotaFailure.

    Args:
        subject: whose bound it is, such as client:alice.
    """

    subject: str
    description: str


class RpcFailure(Exception):
    """An answer that is an error: status code, a message for a person, a reason for a program.

    Args:
        reason: UPPER_SNAKE_CASE word of google.rpc.ErrorInfo, stable across versions.
        violations: become google.rpc.BadRequest.
        retry_after_s: becomes google.rpc.RetryInfo.
        quota: what has been used up.
        metadata: of google.rpc.ErrorInfo: what a program may want to know.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        *,
        violations: tuple[FieldViolation, ...] = (),
        retry_after_s: float | None = None,
        quota: QuotaViolation | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.violations = violations
        self.retry_after_s = retry_after_s
        self.quota = quota
        self.metadata = dict(metadata or {})

    def to_status(self) -> status_pb2.Status:
        """The status with its details, as `error` events and trailers carry it."""
        details: list[Message] = [
            error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=self.metadata)
        ]
        if self.violations:
            details.append(_bad_request(self.violations))
        if self.quota is not None:
            quota = error_details_pb2.QuotaFailure()
            quota.violations.add(
                subject=_cut(self.quota.subject, _MAX_FIELD_BYTES),
                description=_cut(self.quota.description, _MAX_MESSAGE_BYTES),
            )
            details.append(quota)
        if self.retry_after_s is not None:
            details.append(error_details_pb2.RetryInfo(retry_delay=duration(self.retry_after_s)))
        return status_pb2.Status(
            code=self.code.value[0],
            message=_cut(self.message, _MAX_MESSAGE_BYTES),
            details=[_packed(detail) for detail in details],
        )


def unknown_model(name: str, served: str) -> RpcFailure:
    """The request names a model that is not served here."""
    shown = name if len(name) <= 64 else f"{name[:64]}…"
    return RpcFailure(
        grpc.StatusCode.NOT_FOUND,
        "UNKNOWN_MODEL",
        f"model {shown!r} is not served here: use {served!r}, or leave the field empty",
    )


def unknown_request_id() -> RpcFailure:
    """A Session was asked to cancel what it has never started."""
    return RpcFailure(
        grpc.StatusCode.NOT_FOUND, "UNKNOWN_REQUEST_ID", "no request of this stream has had this request_id"
    )


def duplicate_request_id() -> RpcFailure:
    """A Session was asked to start a request under the label of a live one."""
    return RpcFailure(
        grpc.StatusCode.ALREADY_EXISTS,
        "DUPLICATE_REQUEST_ID",
        "a live request of this stream has this request_id and goes on; this start is refused",
    )


def not_offered(what: str) -> RpcFailure:
    """The build has no such feature."""
    return RpcFailure(grpc.StatusCode.UNIMPLEMENTED, "NOT_OFFERED", f"{what} is not offered here")


def require_fits(answer: Message, limit: int, advice: str) -> None:
    """Check that a whole answer fits in one message: gRPC would say so to the client alone.

    Args:
        limit: most bytes of a message.
        advice: what to ask for instead.

    Raises:
        RpcFailure: RESOURCE_EXHAUSTED, it doesn't.
    """
    num_bytes = answer.ByteSize()
    if num_bytes > limit:
        raise RpcFailure(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "ANSWER_TOO_LARGE",
            f"the answer is {num_bytes} bytes, a message is at most {limit}: {advice}",
        )


def resumable_id_in_use() -> RpcFailure:
    """A request is to be started with `detach` under the label of another one."""
    return RpcFailure(
        grpc.StatusCode.ALREADY_EXISTS,
        "DUPLICATE_REQUEST_ID",
        "a request of yours that was started with detach has this request_id and goes on: resume it, cancel "
        "it, or use another request_id",
    )


def too_many_resumable(most: int) -> RpcFailure:
    """No more requests can be kept for their clients to come back."""
    message = f"{most} requests may be resumed already, as many as may: start this one without detach"
    return RpcFailure(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "TOO_MANY_RESUMABLE",
        message,
        retry_after_s=1.0,
        quota=QuotaViolation("server", message),
    )


def not_resumable() -> RpcFailure:
    """A Session was asked to resume what isn't there, for whatever cause: nobody learns of others'."""
    return RpcFailure(
        grpc.StatusCode.NOT_FOUND,
        "NOT_RESUMABLE",
        "you have no request that could be resumed under this request_id: it was not started with detach, "
        "its grace has passed, its end was acknowledged, or the server has been restarted; start it anew",
    )


def resumed_elsewhere() -> RpcFailure:
    """A request has been taken up by another stream."""
    return RpcFailure(
        grpc.StatusCode.ABORTED,
        "RESUMED_ELSEWHERE",
        "another stream has resumed this request; it goes on there",
    )


def slow_reader(what: str, waited_s: float, remedy: str) -> RpcFailure:
    """Nobody takes what is made for him in time.

    Args:
        what: what has not happened.
        remedy: what its reader could do about it.
    """
    return RpcFailure(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "SLOW_READER",
        f"{what} for {waited_s:g} s; the answer is given up: {remedy}, or let the server wait longer "
        "(--slow-reader-s)",
        retry_after_s=1.0,
        metadata={"limit": "slow_reader_s", "value": f"{waited_s:g}"},
    )


def unread_output(most_bytes: int) -> RpcFailure:
    """Nobody takes what is made for him, and it has become too much."""
    return RpcFailure(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "UNREAD_OUTPUT",
        f"more than {most_bytes} bytes of output wait for the reader of this stream; it is given up: read "
        "faster, ask for fewer requests or logprobs at once, or let the server keep more (--max-unread-size)",
        retry_after_s=1.0,
        metadata={"limit": "max_unread_size", "value": str(most_bytes)},
    )


def unavailable(reason: str, message: str, retry_after_s: float) -> RpcFailure:
    """Not now; somewhere else, or later."""
    return RpcFailure(grpc.StatusCode.UNAVAILABLE, reason, message, retry_after_s=retry_after_s)


def invalid(*violations: FieldViolation) -> RpcFailure:
    """Fields that can't be taken, all of one request together."""
    shown = "; ".join(f"{_cut(v.field, _MAX_FIELD_BYTES)}: {v.description}" for v in violations[:3])
    more = f"; and {len(violations) - 3} more" if len(violations) > 3 else ""
    return RpcFailure(
        grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", shown + more, violations=tuple(violations)
    )


def invalid_action(*violations: FieldViolation) -> RpcFailure:
    """A Session was asked to act on a request in a way that can't be taken; the request goes on."""
    failure = invalid(*violations)
    return RpcFailure(failure.code, "INVALID_ACTION", failure.message, violations=failure.violations)


def undecodable() -> RpcFailure:
    """What came is not the method's message."""
    return RpcFailure(
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_REQUEST",
        "the message is not a valid protobuf of this method's request: send what headrace.v1 declares",
    )


def failure_from(error: Exception) -> RpcFailure:
    """What the caller is told of `error`. Of one that isn't meant for him he learns only that it was ours:
    its text may hold somebody's prompt."""
    if isinstance(error, RpcFailure):
        return error
    make = next((make for kind, make in _FAILURES.items() if isinstance(error, kind)), _internal)
    return make(error)


def _simple(code: grpc.StatusCode, reason: str) -> Callable[[Any], RpcFailure]:
    return lambda error: RpcFailure(code, reason, str(error))


def _internal(error: Exception) -> RpcFailure:
    del error
    return RpcFailure(grpc.StatusCode.INTERNAL, "INTERNAL", "internal error; the server's log tells where")


def _invalid_request(error: InvalidRequest) -> RpcFailure:
    return invalid(*error.violations)


def _no_chat_template(error: NoChatTemplate) -> RpcFailure:
    return invalid(FieldViolation("chat", f"{error}: send text or token_ids"))


def _overloaded(error: Overloaded) -> RpcFailure:
    return RpcFailure(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "OVERLOADED",
        str(error),
        retry_after_s=error.retry_after_s,
        quota=QuotaViolation("server", str(error)),
    )


def _draining(error: Draining) -> RpcFailure:
    return unavailable("DRAINING", str(error), 1.0)


_FAILURES: dict[type[Exception], Callable[[Any], RpcFailure]] = {
    InvalidRequest: _invalid_request,
    NoChatTemplate: _no_chat_template,
    DuplicateRequest: _simple(grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID"),
    Overloaded: _overloaded,
    Draining: _draining,
    DeadlineExceeded: _simple(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    EngineDead: _simple(grpc.StatusCode.INTERNAL, "ENGINE_DEAD"),
    NothingToDraw: _simple(grpc.StatusCode.INVALID_ARGUMENT, "NOTHING_TO_DRAW"),
    RequestFailed: _simple(grpc.StatusCode.INTERNAL, "REQUEST_FAILED"),
}


def duration(seconds: float) -> Duration:
    """`seconds` as a protobuf Duration."""
    span = Duration()
    span.FromNanoseconds(round(seconds * _NANOS))
    return span


def _bad_request(violations: tuple[FieldViolation, ...]) -> error_details_pb2.BadRequest:
    """As many of `violations` as a status has room for, the first one always."""
    shown = error_details_pb2.BadRequest()
    for violation in violations[:MAX_DETAILED_VIOLATIONS]:
        shown.field_violations.add(
            field=_cut(violation.field, _MAX_FIELD_BYTES),
            description=_cut(violation.description, _MAX_MESSAGE_BYTES),
        )
        if shown.ByteSize() > _MAX_VIOLATIONS_BYTES:
            del shown.field_violations[-1]
            break
    return shown


def _cut(text: str, most: int) -> str:
    """`text` in at most `most` bytes of UTF-8."""
    encoded = text.encode()
    if len(encoded) <= most:
        return text
    return encoded[: most - len("…".encode())].decode(errors="ignore") + "…"


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
