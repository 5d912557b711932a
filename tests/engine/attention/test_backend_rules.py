"""The table of demands in `engine/attention/README.md` names tests that are there."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.repository import ROOT

ROWS = re.findall(
    r"^\| (\d+) \|.*\| (.*) \|$", (ROOT / "engine/attention/README.md").read_text(), flags=re.MULTILINE
)


def test_every_demand_has_a_row_of_its_own() -> None:
    assert [int(number) for number, _ in ROWS] == list(range(1, 23))


@pytest.mark.parametrize(("number", "tests"), ROWS)
def test_the_tests_that_are_named_exist(number: str, tests: str) -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", tests)

    assert named, f"demand {number} names no test"
    for path, name in named:
        defined = {
            node.name
            for node in ast.walk(ast.parse((ROOT / path).read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert name in defined, f"demand {number}: {path} has no {name}"
