"""What can be wrong with parts that several requests have in common; each check takes O(size) at most."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Struct

from headrace.engine import FieldViolation, ModelInfo
from headrace.service.json_value import measure
from headrace.service.limits import MAX_REQUEST_ID_LEN, Limits, is_valid_request_id
from headrace.v1 import generation_pb2

MAX_JSON_VALUES = 16_384
"""Of one conversation: template variables, tools' parameters and tool calls' arguments, at any depth."""
MAX_JSON_DEPTH = 24
"""Unknown fields are searched to a depth of 64 messages; a JSON value's level takes two."""


def duration_violations(field: str, span: Duration) -> Iterator[FieldViolation]:
    """Name what makes a Duration one that protobuf does not allow."""
    is_small = abs(span.nanos) < 1_000_000_000 and abs(span.seconds) <= 315_576_000_000
    if not is_small or span.seconds * span.nanos < 0:
        yield FieldViolation(
            field,
            "is no valid Duration: nanos must be from -999999999 to 999999999 and of the sign of seconds, "
            f"seconds at most 315576000000 either way; got seconds={span.seconds}, nanos={span.nanos}",
        )


def label_violations(label: str, *, needs_label: bool) -> Iterator[FieldViolation]:
    """Name what is wrong with a client's request_id."""
    if (label or needs_label) and not is_valid_request_id(label):
        yield FieldViolation(
            "request_id",
            f"must be 1 to {MAX_REQUEST_ID_LEN} printable ASCII characters, got {len(label)} characters",
        )


def chat_violations(prompt: generation_pb2.ChatPrompt, limits: Limits) -> Iterator[FieldViolation]:
    """Name what is wrong with a conversation."""
    if prompt.ByteSize() > limits.max_text_bytes:
        yield FieldViolation(
            "chat", f"must be at most {limits.max_text_bytes} bytes, got {prompt.ByteSize()}"
        )
        return
    if not 1 <= len(prompt.messages) <= limits.max_messages:
        yield FieldViolation(
            "chat.messages", f"must hold 1 to {limits.max_messages} messages, got {len(prompt.messages)}"
        )
        return
    if len(prompt.tools) > limits.max_tools:
        yield FieldViolation(
            "chat.tools", f"must hold at most {limits.max_tools} tools, got {len(prompt.tools)}"
        )
        return
    yield from _json_violations(prompt)
    for i, message in enumerate(prompt.messages):
        if not message.role:
            yield FieldViolation(
                f"chat.messages[{i}].role", "must not be empty: use system, user, assistant, …"
            )


def _json_violations(prompt: generation_pb2.ChatPrompt) -> Iterator[FieldViolation]:
    """Name the first part with which a conversation holds too many JSON values, or tool calls, altogether."""
    left = MAX_JSON_VALUES
    for field, struct in _structs(prompt):
        num, depth = measure(struct, left)
        left -= num
        if left < 0:
            yield FieldViolation(
                field, f"a conversation must hold at most {MAX_JSON_VALUES} JSON values, all told"
            )
            return
        if depth > MAX_JSON_DEPTH:
            yield FieldViolation(field, f"must nest at most {MAX_JSON_DEPTH} levels deep")
    if sum(len(message.tool_calls) for message in prompt.messages) > MAX_JSON_VALUES:
        yield FieldViolation("chat.messages", f"must hold at most {MAX_JSON_VALUES} tool calls")


def _structs(prompt: generation_pb2.ChatPrompt) -> Iterator[tuple[str, Struct]]:
    yield "chat.template_variables", prompt.template_variables
    for i, tool in enumerate(prompt.tools):
        yield f"chat.tools[{i}].parameters", tool.parameters
    calls = (
        (f"chat.messages[{i}].tool_calls[{j}].arguments", call.arguments)
        for i, message in enumerate(prompt.messages)
        for j, call in enumerate(message.tool_calls)
    )
    yield from islice(calls, MAX_JSON_VALUES)


def token_id_violations(field: str, token_ids: Iterable[int], model: ModelInfo) -> Iterator[FieldViolation]:
    """Name the first id that the model does not have."""
    foreign = next((token_id for token_id in token_ids if token_id >= model.vocab_size), None)
    if foreign is not None:
        yield FieldViolation(
            field, f"must be from 0 to {model.vocab_size - 1}, the model's vocabulary, got {foreign}"
        )


def token_id_list_violations(
    field: str, token_ids: Sequence[int], model: ModelInfo, most: int
) -> Iterator[FieldViolation]:
    """Name a list of ids that is too long, or the first id in it that the model does not have."""
    if len(token_ids) > most:
        yield FieldViolation(field, f"must hold at most {most} ids, got {len(token_ids)}")
    else:
        yield from token_id_violations(field, token_ids, model)


def text_violations(field: str, text: str, limits: Limits) -> Iterator[FieldViolation]:
    """Name a text that is too long."""
    size = num_bytes(text)
    if size > limits.max_text_bytes:
        yield FieldViolation(field, f"must be at most {limits.max_text_bytes} bytes of UTF-8, got {size}")


def text_list_violations(
    field: str, texts: Sequence[str], most: int, most_bytes: int
) -> Iterator[FieldViolation]:
    """Name a list of texts that is too long, or a text in it that is empty or too long."""
    if len(texts) > most:
        yield FieldViolation(field, f"must hold at most {most} texts, got {len(texts)}")
    elif not all(1 <= num_bytes(text) <= most_bytes for text in texts):
        yield FieldViolation(field, f"each must be 1 to {most_bytes} bytes of UTF-8")


def num_bytes(text: str) -> int:
    """Its size in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())
