"""Fields that this build does not know: refused, never ignored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from headrace.engine import FieldViolation
from headrace.service.limits import MAX_DETAILED_VIOLATIONS
from headrace.v1 import generation_pb2 as pb

# Bounds of the search for unknown fields.
_MAX_UNKNOWN_BYTES = 4096
_MAX_SEARCHED_PARTS = 4096
_MAX_COPIED_BYTES = 2**18
"""Of a larger message no copy is made, for the event loop waits: what is unknown is taken out of it."""


class UnknownField(Protocol):
    """A field that came over the wire without a place in our protos."""

    field_number: int


def unknown_fields(message: Message) -> Iterator[FieldViolation]:
    """Name fields of `message`, at any depth, that this build's protos do not have.

    What it costs is bounded: the first MAX_DETAILED_VIOLATIONS are named, as far as they are in the first
    parts of a message with few unknown bytes. Where there are any, at least one is told.

    A StartGeneration within another message is not entered: its own are told together with all else that is
    wrong with it. Only where they are many, or the message is large, they are told here too.

    A large `message` loses its unknown fields: whoever is told of one has to refuse it.
    """
    size = message.ByteSize()
    is_large = size > _MAX_COPIED_BYTES
    num_bytes = _num_discarded_bytes(message, size) if is_large else _num_unknown_bytes(message, size)
    if num_bytes > (0 if is_large else _MAX_UNKNOWN_BYTES):
        yield FieldViolation("#", f"{num_bytes} bytes are in fields that are not known to this build")
    elif num_bytes > 0:
        yield from islice(_named_unknown_fields(message), MAX_DETAILED_VIOLATIONS)


def _num_discarded_bytes(message: Message, size: int) -> int:
    message.DiscardUnknownFields()
    return size - message.ByteSize()


def _num_unknown_bytes(message: Message, size: int) -> int:
    # In the protobuf library's own code alone: to list unknown fields takes a microsecond for each. It
    # stops 64 messages deep; only JSON values can nest so deep, and that many levels are refused.
    known = type(message)()
    known.CopyFrom(message)
    return _num_discarded_bytes(known, size)


def _named_unknown_fields(message: Message) -> Iterator[FieldViolation]:
    for position, (prefix, part) in enumerate(_parts("", message)):
        if position == _MAX_SEARCHED_PARTS:
            yield FieldViolation(
                "#", f"a field beyond the first {position} parts of the message is not known to this build"
            )
            return
        # A sequence, though its annotations don't say so.
        for unknown in cast("Iterable[UnknownField]", UnknownFieldSet(part)):
            yield FieldViolation(
                f"{prefix}#{unknown.field_number}", "no field of this number is known to this build"
            )


def _parts(prefix: str, message: Message) -> Iterator[tuple[str, Message]]:
    """`message` and all messages in it, each with what stands before the names of its fields."""
    yield prefix, message
    for descriptor, value in message.ListFields():
        for name, child in _children(descriptor, value):
            if not isinstance(child, pb.StartGeneration):
                yield from _parts(f"{prefix}{name}.", child)


def _children(descriptor: FieldDescriptor, value: object) -> Iterator[tuple[str, Message]]:
    if descriptor.message_type is None:
        return
    if descriptor.message_type.GetOptions().map_entry:
        value_field = descriptor.message_type.fields_by_name["value"]
        if value_field.message_type is not None:
            for child in cast("dict[object, Message]", value).values():
                yield f"{descriptor.name}[]", child
    elif descriptor.is_repeated:
        for position, child in enumerate(cast("Sequence[Message]", value)):
            yield f"{descriptor.name}[{position}]", child
    else:
        yield descriptor.name, cast("Message", value)
