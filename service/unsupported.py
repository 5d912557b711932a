"""Fields that this build does not offer, and fields that it does not know: refused, never ignored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from headrace.engine import FieldViolation
from headrace.v1 import generation_pb2 as pb


class UnknownField(Protocol):
    """A field that came over the wire without a place in our protos."""

    field_number: int


class _Nothing:
    """No value of the field means "off": its presence alone is refused."""


_NOTHING: Final = _Nothing()

# Path in StartGeneration -> the value that asks for nothing, and so is taken.
_OFF: Final[dict[str, object]] = {
    "priority": 0,
    "speculation.enabled": False,
    "speculation.num_speculative_tokens": 0,
    "initial_credit": _NOTHING,
}


def unsupported_fields(start: pb.StartGeneration) -> Iterator[FieldViolation]:
    """Name each field of `start` that asks for something which this build does not offer."""
    for path, off in _OFF.items():
        *parents, name = path.split(".")
        holder: Message = start
        for parent in parents:
            holder = cast("Message", getattr(holder, parent))
        if not _is_present(holder, name) or getattr(holder, name) == off:
            continue
        remedy = "leave it out" if off is _NOTHING else f"leave it out or set it to {off!r}"
        yield FieldViolation(path, f"is not offered by this build: {remedy}")


def unknown_fields(message: Message, path: str = "") -> Iterator[FieldViolation]:
    """Name each field of `message`, at any depth, that this build's protos do not have.

    A StartGeneration within another message is not entered: its own are told together with all else that is
    wrong with it.
    """
    prefix = f"{path}." if path else ""
    # A sequence, though its annotations don't say so.
    for unknown in cast("Iterable[UnknownField]", UnknownFieldSet(message)):
        yield FieldViolation(
            f"{prefix}#{unknown.field_number}", "no field of this number is known to this build"
        )
    for descriptor, value in message.ListFields():
        for name, child in _children(descriptor, value):
            if not isinstance(child, pb.StartGeneration):
                yield from unknown_fields(child, f"{prefix}{name}")


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


def _is_present(holder: Message, name: str) -> bool:
    descriptor = holder.DESCRIPTOR.fields_by_name[name]
    if descriptor.is_repeated:
        return len(getattr(holder, name)) > 0
    return holder.HasField(name)
