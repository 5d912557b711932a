"""JSON that arrives as google.protobuf.Struct, as plain Python values."""

from __future__ import annotations

import math
from collections.abc import Iterator

from google.protobuf.struct_pb2 import Struct, Value

from headrace.engine import InvalidRequest

_MAX_KEY_LEN_IN_PATH = 64


def measure(struct: Struct, most: int) -> tuple[int, int]:
    """How many values a Struct holds, and how deep they nest; measured up to `most` + 1 values."""
    num = depth = 0
    for num, level in enumerate(_levels(struct), start=1):
        depth = max(depth, level)
        if num > most:
            break
    return num, depth


def _levels(struct: Struct) -> Iterator[int]:
    """Of each value in turn how deep it lies, from 1."""
    pending: list[Iterator[Value]] = [iter(struct.fields.values())]
    while pending:
        value = next(pending[-1], None)
        if value is None:
            pending.pop()
            continue
        yield len(pending)
        if value.HasField("struct_value"):
            pending.append(iter(value.struct_value.fields.values()))
        elif value.HasField("list_value"):
            pending.append(iter(value.list_value.values))


def object_from_struct(struct: Struct, path: str) -> dict[str, object]:
    """The JSON object that a Struct holds.

    Args:
        path: the field it came in, for the error.

    Raises:
        InvalidRequest: a number in it isn't finite.
    """
    # Only the beginning of a key: every value beneath it has a path of its own.
    return {
        key: _from_value(value, f"{path}.{key[:_MAX_KEY_LEN_IN_PATH]}")
        for key, value in struct.fields.items()
    }


def _from_value(value: Value, path: str) -> object:
    match value.WhichOneof("kind"):
        case "number_value":
            number = value.number_value
            if not math.isfinite(number):
                raise InvalidRequest.of(path, "must be a finite number")
            # A Struct knows no integers: templates would write 5 as 5.0.
            return int(number) if number.is_integer() and abs(number) < 2**53 else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "struct_value":
            return object_from_struct(value.struct_value, path)
        case "list_value":
            return [_from_value(item, f"{path}[{i}]") for i, item in enumerate(value.list_value.values)]
        case _:
            return None
