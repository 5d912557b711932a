from __future__ import annotations

import io
import logging
import re
import sys
import threading

import pytest
import structlog

from headrace.service.progress import ShownProgress
from headrace.service.telemetry import configure_logging, log


def test_without_a_terminal_a_stage_is_a_handful_of_lines() -> None:
    with structlog.testing.capture_logs() as logs, ShownProgress() as progress:
        for done in range(1001):
            progress("reading weights", done, 1000)
        progress("reading weights", 1000, 1000)
    percents = [entry["percent"] for entry in logs]
    assert {entry["stage"] for entry in logs} == {"reading weights"}
    assert percents[0] == 0
    assert percents[-1] == 100
    assert len(percents) == len(set(percents)) == 5


def test_a_stage_of_unknown_length_is_told_once() -> None:
    with structlog.testing.capture_logs() as logs, ShownProgress() as progress:
        for done in range(100):
            progress("fetching", done, 0)
    assert len(logs) == 1


def test_it_may_be_told_from_several_threads_at_once() -> None:
    with structlog.testing.capture_logs() as logs, ShownProgress() as progress:

        def load() -> None:
            for done in range(101):
                progress("stage", done, 100)

        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(logs) == 5


def test_without_a_terminal_a_note_is_a_line_of_the_log() -> None:
    with structlog.testing.capture_logs() as logs, ShownProgress() as progress:
        progress.note("loss [2.5] of 3")
    assert [entry["event"] for entry in logs] == ["loss [2.5] of 3"]


class Terminal(io.StringIO):
    """Keeps what is written to it, and says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_on_a_terminal_a_note_stands_among_the_bars_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with structlog.testing.capture_logs() as logs, ShownProgress() as progress:
        progress("learning", 1, 2)
        progress.note("loss [2.5] of 3")
    assert logs == []
    assert "loss [2.5] of 3\n" in terminal.getvalue()


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_on_a_terminal_a_line_of_the_log_stands_whole_where_no_bar_does(
    monkeypatch: pytest.MonkeyPatch, restored_logging: None, log_format: str
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    configure_logging("info", log_format)
    with ShownProgress() as progress:
        progress("reading weights", 1, 2)
        logging.getLogger("headrace.engine").info("chosen %s", "x" * 300)
        progress("reading weights", 2, 2)
    log.info("afterwards")
    # Each line, without its colours, as the terminal gets it: first what takes the cursor to a clean line.
    written = re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue())
    (between,) = (line for line in written.splitlines() if "chosen" in line)
    assert "chosen " + "x" * 300 in between
    assert "reading weights" not in between.rpartition("\x1b[2K")[2]
    assert "afterwards" in written.splitlines()[-1]
