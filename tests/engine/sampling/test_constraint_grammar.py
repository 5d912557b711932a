"""What is followed, and what is refused with which words."""

from __future__ import annotations

import json

import pytest

from headrace.engine.sampling.constraint import Constraint, ConstraintKind
from headrace.engine.sampling.constraint_grammar import (
    MAX_JSON_DEPTH,
    GrammarRefusedError,
    grammar_of,
    make_vocabulary,
    try_out,
)

VOCABULARY = make_vocabulary([bytes([byte]) for byte in range(256)])


def nested_schema(depth: int) -> str:
    """Objects in objects: two brackets for each level."""
    return '{"type": "object", "properties": {"a": ' * depth + "{}" + "}}" * depth


def admits(constraint: Constraint, text: str) -> bool:
    """Whether the whole text is one of the constraint's."""
    matcher = try_out(VOCABULARY, grammar_of(constraint)).deep_copy()
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


def refusal(kind: ConstraintKind, text: str) -> str:
    with pytest.raises(GrammarRefusedError) as refused:
        try_out(VOCABULARY, grammar_of(Constraint(kind, text)))
    return str(refused.value)


@pytest.mark.parametrize(
    ("kind", "text", "admitted", "not_admitted"),
    [
        ("json_object", "", '{"a": [1, null, "x"], "b": {}}', "[]"),
        ("json_schema", '{"type": "integer", "minimum": 3, "maximum": 17}', "17", "18"),
        ("json_schema", '{"type": "number", "exclusiveMaximum": 2.5}', "2.49", "2.5"),
        ("json_schema", '{"type": "string", "pattern": "^a+$"}', '"aa"', '"ab"'),
        ("json_schema", '{"type": "string", "format": "date"}', '"2024-02-29"', '"2024-2-29"'),
        ("json_schema", '{"type": "array", "minItems": 1, "maxItems": 2}', "[0, 1]", "[0, 1, 2]"),
        ("json_schema", '{"anyOf": [{"type": "null"}, {"const": "x"}]}', '"x"', '"y"'),
        ("json_schema", '{"enum": ["Łódź", "🌊"]}', '"🌊"', '"Lodz"'),
        (
            "json_schema",
            '{"type": "object", "properties": {"{": {"const": 1}}, "required": ["{"]}',
            '{"{": 1}',
            "{}",
        ),
        ("regex", "a|bc", "bc", "abc"),
        ("regex", r"a/b\d", "a/b7", "a/b٧"),
        ("regex", r"[\d\s]+\w", "1 \t2_", "1 ü"),
        ("regex", "^ab$", "ab", "b"),
        ("grammar", 'root ::= "a" root "b" | ""\n', "aabb", "aab"),
        ("grammar", 'root ::= item ("," item)*\nitem ::= [0-9]+\n', "1,23", "1,"),
        ("grammar", 'start: "a" start "b" | "x"\n', "aaxbb", "axbb"),
    ],
)
def test_the_text_has_the_form(kind: str, text: str, admitted: str, not_admitted: str) -> None:
    constraint = Constraint(ConstraintKind(kind), text)
    assert admits(constraint, admitted)
    assert not admits(constraint, not_admitted)


@pytest.mark.parametrize(
    ("kind", "text", "wanted"),
    [
        (
            "json_schema",
            "{",
            "must be JSON: Expecting property name enclosed in double quotes: line 1 column 2",
        ),
        ("json_schema", '{"minimum": NaN}', "must be JSON: NaN is no JSON number"),
        ("json_schema", "[]", "must be a JSON object"),
        ("json_schema", "true", "must be a JSON object"),
        ("json_schema", nested_schema(5000), f"use at most {MAX_JSON_DEPTH} levels of brackets"),
        ("json_schema", "[" * 200_000, f"use at most {MAX_JSON_DEPTH} levels of brackets"),
        ("json_schema", '{"type": "objekt"}', "Invalid type: objekt"),
        (
            "json_schema",
            '{"type": "integer", "minimum": 5, "maximum": 3}',
            "Unsatisfiable schema: minimum (5)",
        ),
        ("json_schema", '{"$ref": "#"}', "admits no text at all"),
        ("json_schema", '{"$ref": "https://example.com/schema"}', "not present in a registry"),
        ("json_schema", '{"not": {"type": "string"}}', 'Unimplemented keys: ["not"]'),
        (
            "json_schema",
            '{"x-guidance": {"lenient": true}, "uniqueItems": true, "type": "array"}',
            "uniqueItems",
        ),
        ("regex", "(a", "unclosed group"),
        ("regex", "(?=a)b", "look-around, including look-ahead and look-behind, is not supported"),
        ("regex", r"[^\s\S]", "admits no text at all"),
        ("regex", "(" * 20_000 + "a" + ")" * 20_000, "nest"),
        ("regex", "((((a{1,99}){1,99}){1,99}){1,99}){1,99}", "is too complex to be followed"),
        ("grammar", "root ::= other\n", "Rule 'other' not found"),
        ("grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "is nested too deeply"),
        ("grammar", "root ::= root\n", "admits no text at all"),
        ("grammar", "start: other\n", "other"),
        ("grammar", "start: <|im_end|>\n", "can't make sense of it"),
        ("grammar", "start: " + "(" * 50_000 + '"a"' + ")" * 50_000, "too deeply nested"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_words(kind: str, text: str, wanted: str) -> None:
    message = refusal(ConstraintKind(kind), text)
    assert wanted in message
    assert len(message) < 400
    assert "no_forcing" not in message, "what the author has not written is not quoted"


def test_a_schema_of_the_greatest_depth_is_taken() -> None:
    deepest = nested_schema((MAX_JSON_DEPTH - 1) // 2)
    assert admits(Constraint(ConstraintKind.JSON_SCHEMA, deepest), '{"a": {"a": {}}}')


def test_brackets_within_strings_are_no_depth() -> None:
    schema = json.dumps({"const": '[{"\\' * 300})
    assert admits(Constraint(ConstraintKind.JSON_SCHEMA, schema), json.dumps('[{"\\' * 300))
