"""Messages that nobody would write, for every method that a server offers, made from their descriptors.

Half of what is sent is a message of the right type with odd values, the rest are bytes that were one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import grpc
import hypothesis
from google.protobuf import message_factory, struct_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import strategies as st

from headrace.v1 import control_pb2, generation_pb2, model_pb2
from tests.support.service import make_start

CALLER_FILES: tuple[Any, ...] = (
    generation_pb2.DESCRIPTOR,
    model_pb2.DESCRIPTOR,
    health_pb2.DESCRIPTOR,
    reflection_pb2.DESCRIPTOR,
)
CONTROL_FILES: tuple[Any, ...] = (control_pb2.DESCRIPTOR,)
LEFT_OUT = frozenset({"headrace.v1.ControlService.Drain"})
"""A drained server takes nothing more, as it should."""

_CODE = grpc.StatusCode
DOCUMENTED = frozenset(
    {
        _CODE.OK,
        _CODE.INVALID_ARGUMENT,
        _CODE.NOT_FOUND,
        _CODE.ALREADY_EXISTS,
        _CODE.RESOURCE_EXHAUSTED,
        _CODE.DEADLINE_EXCEEDED,
        _CODE.CANCELLED,
    }
)
"""How a call may end on a server that is healthy and not on its way out: INTERNAL and UNKNOWN never."""

_MAX_DEPTH = 4
_MAX_PAYLOAD_BYTES = 2**20
_DEADLINE_S = 1.0
_ENOUGH_MESSAGES = 40

_TEXTS = st.one_of(
    st.sampled_from(
        [
            "",
            "x",
            "\0",
            "a" * 129,
            "a" * 5000,
            "\u202e",
            "\U0001f30a",
            "fake",
            "{}",
            '{"type":"object"}',
            "(",
            "[a",
        ]
    ),
    st.text(max_size=30),
)
_INTEGERS = [0, 1, 2, 3, 7, 65, 66, 255, 511, 512, 2**15, 2**31 - 1]
_FLOATS = st.one_of(
    st.sampled_from(
        [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 100.0, 1e30, -1e30, 1e-30, math.nan, math.inf, -math.inf]
    ),
    st.floats(width=32),
)
_JSON = st.recursive(
    st.none() | st.booleans() | _FLOATS | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=6,
)
_F = FieldDescriptor
_BOUNDS = {
    _F.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    _F.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    _F.CPPTYPE_UINT32: (0, 2**32 - 1),
    _F.CPPTYPE_UINT64: (0, 2**64 - 1),
    _F.CPPTYPE_ENUM: (-1, 12),
}


@dataclass(frozen=True)
class Method:
    """A method as a client without stubs calls it."""

    descriptor: MethodDescriptor

    @property
    def path(self) -> str:
        """As HTTP/2 has it."""
        return f"/{self.descriptor.containing_service.full_name}/{self.descriptor.name}"


def methods_of(files: tuple[Any, ...]) -> list[Method]:
    """All methods of some files, but those that are left out."""
    return [
        Method(method)
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
        if method.full_name not in LEFT_OUT
    ]


@st.composite
def messages(draw: st.DrawFn, kind: Descriptor, depth: int = 0) -> Message:
    """A message of a type, a few of whose fields are set to something."""
    message = message_factory.GetMessageClass(kind)()
    if isinstance(message, struct_pb2.Struct):
        message.update(draw(st.dictionaries(_TEXTS, _JSON, max_size=3)))
        return message
    if kind.full_name == "headrace.v1.StartGeneration" and draw(st.booleans()):
        # Else hardly a request would get past the first check.
        message.CopyFrom(make_start(f"l{draw(st.integers(0, 3))}", max_tokens=draw(st.integers(1, 9))))
    fields = [field for field in kind.fields if depth < _MAX_DEPTH or field.message_type is None]
    if fields:
        for field in draw(st.lists(st.sampled_from(fields), max_size=4, unique_by=lambda field: field.name)):
            _set(draw, message, field, depth)
    return message


def _set(draw: st.DrawFn, message: Message, field: FieldDescriptor, depth: int) -> None:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
        for _ in range(draw(st.integers(0, 3))):
            place = getattr(message, field.name)
            if value.message_type is None:
                place[draw(_scalars(key))] = draw(_scalars(value))
    elif field.is_repeated:
        place = getattr(message, field.name)
        count = draw(st.integers(0, 3))
        if entry is None:
            place.extend(
                draw(st.lists(_scalars(field), min_size=count, max_size=count))
                * draw(st.sampled_from([1, 1, 400]))
            )
        else:
            place.extend(draw(messages(entry, depth + 1)) for _ in range(count))
    elif entry is None:
        setattr(message, field.name, draw(_scalars(field)))
    else:
        getattr(message, field.name).CopyFrom(draw(messages(entry, depth + 1)))


def _scalars(field: FieldDescriptor) -> st.SearchStrategy[object]:
    match field.cpp_type:
        case _F.CPPTYPE_BOOL:
            return st.booleans()
        case _F.CPPTYPE_STRING if field.type == _F.TYPE_BYTES:
            return st.binary(max_size=30)
        case _F.CPPTYPE_STRING:
            return _TEXTS
        case _F.CPPTYPE_FLOAT | _F.CPPTYPE_DOUBLE:
            return _FLOATS
    low, high = _BOUNDS[field.cpp_type]
    return st.sampled_from([n for n in _INTEGERS if low <= n <= high]) | st.integers(low, high)


@st.composite
def payloads(draw: st.DrawFn, kind: Descriptor) -> bytes:
    """What is sent as one message: mostly one of the right type, now and then what is left of one."""
    encoded = draw(messages(kind)).SerializeToString()[:_MAX_PAYLOAD_BYTES]
    match draw(st.sampled_from(["whole", "whole", "whole", "flipped", "cut", "random"])):
        case "flipped" if encoded:
            changed = bytearray(encoded)
            for _ in range(draw(st.integers(1, 4))):
                changed[draw(st.integers(0, len(changed) - 1))] = draw(st.integers(0, 255))
            return bytes(changed)
        case "cut":
            return encoded[: draw(st.integers(0, len(encoded)))]
        case "random":
            return draw(st.binary(max_size=60))
    return encoded


def outcome_of(channel: grpc.Channel, method: Method, sent: list[bytes]) -> grpc.StatusCode:
    """Call a method with these messages; how it ends. Streams without an end are left after a while.

    Blocks. The asyncio client makes INTERNAL of a status that comes while it writes; this one does not.
    """
    is_streaming = method.descriptor.client_streaming
    make: Any = channel.stream_stream if is_streaming else channel.unary_stream
    call = make(method.path)(iter(sent) if is_streaming else sent[0], timeout=_DEADLINE_S)
    has_no_end = method.descriptor.name.startswith("Watch")
    # The code is the answer.
    with contextlib.suppress(grpc.RpcError):
        for _ in islice(call, 1 if has_no_end else _ENOUGH_MESSAGES):
            pass
    call.cancel()
    code: grpc.StatusCode = call.code()
    return code


def fuzz(
    runner: asyncio.Runner, channel: grpc.Channel, method: Method, num_calls: int, seed: int
) -> Counter[grpc.StatusCode]:
    """Call one method again and again with whatever comes of `seed`; how often it ended how.

    Raises:
        AssertionError: it ended in a way that is not documented; the smallest case that was found is told.
    """
    outcomes: Counter[grpc.StatusCode] = Counter()
    most = 5 if method.descriptor.client_streaming else 1

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=num_calls,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.lists(payloads(method.descriptor.input_type), min_size=1, max_size=most))
    def ends_as_documented(sent: list[bytes]) -> None:
        code = runner.run(asyncio.to_thread(outcome_of, channel, method, sent))
        outcomes[code] += 1
        assert code in DOCUMENTED, f"{method.path} ended with {code.name} for {sent!r}"

    ends_as_documented()
    return outcomes


def seeds(first: int) -> Iterator[int]:
    """Numbers that begin with a given one."""
    rng = random.Random(first)
    while True:
        yield rng.randrange(2**31)
