from __future__ import annotations

import pytest
from google.protobuf.struct_pb2 import Value

from headrace.service.limits import MAX_DETAILED_VIOLATIONS
from headrace.service.unsupported import unknown_fields
from headrace.v1.generation_pb2 import ChatMessage, ChatPrompt, GenerateRequest, StartGeneration
from headrace.v1.model_pb2 import ApplyChatTemplateRequest

UNKNOWN_99 = b"\x98\x06\x01"


def test_unknown_fields_are_found_at_any_depth() -> None:
    request = ApplyChatTemplateRequest()
    request.MergeFromString(UNKNOWN_99)
    request.chat.tools.add().MergeFromString(UNKNOWN_99)
    request.chat.messages.add()
    request.chat.messages.add().tool_calls.add().MergeFromString(UNKNOWN_99)
    request.chat.template_variables["x"] = 1
    request.chat.template_variables.fields["x"].MergeFromString(UNKNOWN_99)
    assert [violation.field for violation in unknown_fields(request)] == [
        "#99",
        "chat.messages[1].tool_calls[0].#99",
        "chat.tools[0].#99",
        "chat.template_variables.fields[].#99",
    ]


def test_a_request_within_a_message_is_left_to_its_own_check() -> None:
    start = StartGeneration.FromString(UNKNOWN_99)
    assert list(unknown_fields(GenerateRequest(start=start))) == []
    assert [violation.field for violation in unknown_fields(start)] == ["#99"]


def test_of_many_unknown_fields_the_first_are_named() -> None:
    request = ApplyChatTemplateRequest.FromString(UNKNOWN_99 * 1000)
    assert [violation.field for violation in unknown_fields(request)] == ["#99"] * MAX_DETAILED_VIOLATIONS


def test_a_flood_of_unknown_fields_is_one_violation() -> None:
    flood = UNKNOWN_99 * 1_000_000
    chat = ChatPrompt(messages=[ChatMessage.FromString(flood)])
    for request in (
        ApplyChatTemplateRequest.FromString(flood),
        ApplyChatTemplateRequest(chat=chat),
        GenerateRequest(start=StartGeneration(chat=chat)),
    ):
        (violation,) = unknown_fields(request)
        assert violation.field == "#"
        assert "bytes are in fields that are not known" in violation.description


def test_an_unknown_field_behind_many_parts_is_still_refused() -> None:
    request = ApplyChatTemplateRequest(chat=ChatPrompt(messages=[ChatMessage()] * 5000))
    assert list(unknown_fields(request)) == []
    request.chat.messages[4999].MergeFromString(UNKNOWN_99)
    (violation,) = unknown_fields(request)
    assert violation.field == "#"
    assert "beyond the first 4096 parts" in violation.description


def test_an_unknown_field_is_found_as_deep_as_json_may_nest() -> None:
    value = Value.FromString(UNKNOWN_99)
    for _ in range(24):
        outer = Value()
        outer.list_value.values.append(value)
        value = outer
    request = ApplyChatTemplateRequest()
    request.chat.template_variables.fields["x"].CopyFrom(value)
    (violation,) = unknown_fields(request)
    assert violation.field.endswith(".list_value.values[0].#99")


def test_a_large_message_is_searched_where_it_lies_and_stays_as_it_was() -> None:
    request = ApplyChatTemplateRequest(chat=ChatPrompt(messages=[ChatMessage(content="x" * 10_000)] * 100))
    before = request.SerializeToString()
    assert list(unknown_fields(request)) == []
    assert request.SerializeToString() == before


@pytest.mark.parametrize("depth", ["at the top", "in a request"])
def test_a_single_unknown_field_of_a_large_message_refuses_it(depth: str) -> None:
    request = GenerateRequest(start=StartGeneration(text="x" * 1_000_000))
    (request if depth == "at the top" else request.start).MergeFromString(UNKNOWN_99)
    (violation,) = unknown_fields(request)
    assert violation.field == "#"
    assert "3 bytes are in fields that are not known" in violation.description
