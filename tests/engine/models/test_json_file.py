from __future__ import annotations

from pathlib import Path

import pytest

from headrace.engine.errors import ModelLoadError
from headrace.engine.models.json_file import JsonFields


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "can't be read as JSON"),
        (b'{"a": 1', "can't be read as JSON"),
        (b"\xff\xfe", "can't be read as JSON"),
        (b"[1, 2]", "holds list, not a JSON object"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "c occurs twice"),
    ],
)
def test_a_file_that_is_no_json_object_is_refused_by_name(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError) as caught:
        JsonFields.of_file(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config.json is missing"):
        JsonFields.of_file(tmp_path / "config.json")


def test_null_counts_as_missing() -> None:
    fields = JsonFields({"a": None}, "here")
    assert fields.integer("a", 3) == 3
    assert fields.object("a") is None
    assert fields.integers("a") == ()
    assert fields.keys == frozenset()


def test_a_fault_inside_an_inner_object_says_where_it_is() -> None:
    inner = JsonFields({"rope": {"factor": "x"}}, "config.json").object("rope")
    assert inner is not None
    with pytest.raises(ModelLoadError, match=r"config.json: rope: factor is 'x'"):
        inner.number("factor")
