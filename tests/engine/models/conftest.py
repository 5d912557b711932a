"""Shows, after the tests, what the families' comparisons with transformers found."""

from __future__ import annotations

import pytest
from _pytest.terminal import TerminalReporter

from tests.support.family_table import FAMILY_TABLE, FamilyTable


def pytest_configure(config: pytest.Config) -> None:
    config.stash.setdefault(FAMILY_TABLE, FamilyTable())


@pytest.fixture
def family_table(request: pytest.FixtureRequest) -> FamilyTable:
    return request.config.stash.setdefault(FAMILY_TABLE, FamilyTable())


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    table = config.stash.get(FAMILY_TABLE, FamilyTable())
    if table.is_empty:
        return
    terminalreporter.section("families against transformers, fp32")
    for line in table.lines():
        terminalreporter.write_line(line)
