"""The live table fits its terminal, the plain lines tell each change once."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from headrace.clients.demo_prompts import DEMO_REQUESTS
from headrace.clients.demo_view import LiveView, PlainView, Row, make_view
from headrace.clients.events import KvBlocks, Load, StepTotals

LOAD = Load(8, 3, 8, KvBlocks(200, 150, 0, 50), StepTotals(), "continuous")


def make_rows() -> list[Row]:
    """Twenty rows: some done, some running, some waiting."""
    rows = [
        Row(number, request.question, request.num_tokens) for number, request in enumerate(DEMO_REQUESTS, 1)
    ]
    for row in rows[:12]:
        row.first_token_s = 1.0
        row.token_ids = list(range(11))
        row.text = "long ago\nin a 遠い land " * 20 + f"end of {row.number}"
    for row in rows[:5]:
        row.end_s = 3.0
    return rows


def test_a_rows_state_follows_from_its_times() -> None:
    rows = make_rows()
    assert [rows[number].state for number in (0, 5, 12)] == ["done", "running", "waiting"]
    assert rows[0].tokens_per_s(99.0) == pytest.approx(5.0)
    assert rows[5].tokens_per_s(6.0) == pytest.approx(2.0)
    assert rows[12].tokens_per_s(6.0) is None


@pytest.mark.parametrize("width", [60, 80, 110, 200])
def test_the_live_table_fits_the_terminal_and_shows_the_end_of_what_is_said(width: int) -> None:
    out = io.StringIO()
    console = Console(
        file=out, width=width, height=24, force_terminal=True, color_system=None, legacy_windows=False
    )
    with make_view(console, "continuous batching: 20 requests over 8 slots") as view:
        assert isinstance(view, LiveView)
        view.show(6.0, make_rows(), LOAD)
    frame = out.getvalue().rpartition("continuous batching")[2]
    lines = [line.split("\x1b")[0].rstrip("\r") for line in frame.splitlines()]
    assert len([line for line in lines if line.strip()]) == 23
    assert max(cell_len(line) for line in lines[1:]) <= width
    assert "8 running, 3 waiting, 5 done" in frame
    assert "end of 8" in frame
    assert "long ago" in frame


def test_plain_lines_tell_each_change_once() -> None:
    out = io.StringIO()
    rows = make_rows()
    with make_view(Console(file=out, width=80), "title") as view:
        assert isinstance(view, PlainView)
        for now_s in (3.0, 3.1, 3.2):
            view.show(now_s, rows, LOAD)
        rows[5].end_s = 3.3
        view.show(3.3, rows, LOAD)
    lines = out.getvalue().splitlines()
    assert lines[0] == "title"
    assert sum("#6  running" in line for line in lines) == 1
    assert sum("#6  done" in line for line in lines) == 1
    assert sum("8 running, 3 waiting" in line for line in lines) == 1
    assert not any("#13" in line for line in lines)
    assert any("KV 25.0% (50 of 200 blocks)" in line for line in lines)
