from __future__ import annotations

import asyncio
import json
import logging
import warnings

import pytest

from headrace.service.telemetry import configure_logging, log, log_loop_fault, places_of

pytestmark = pytest.mark.usefixtures("restored_logging")

SECRET = "tell-nobody"


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    written = capsys.readouterr()
    assert written.out == ""
    return [json.loads(line) for line in written.err.splitlines()]


def test_each_event_is_one_json_line_whatever_is_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "json")
    label = 'new\nline "quoted" \x1b[31m {"a": 1}'
    log.info("request ended", request=label)
    logging.getLogger("other.library").warning("two\nlines")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        # Entering the block above has put the interpreter's own way of showing warnings back.
        logging.captureWarnings(capture=False)
        logging.captureWarnings(capture=True)
        warnings.warn("old\nways", DeprecationWarning, stacklevel=1)
    ours, theirs, warning = lines_of(capsys)
    assert (ours["event"], ours["request"], ours["level"]) == ("request ended", label, "info")
    assert theirs["event"] == "two\nlines"
    assert "old\nways" in str(warning["event"])


def test_of_an_exception_the_type_and_the_places_are_logged(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("debug", "json")
    try:
        raise ValueError(SECRET)
    except ValueError as error:
        log.exception("ours")
        logging.getLogger("headrace.engine").critical("engine", exc_info=error)
        logging.getLogger("other").exception("theirs")
    lines = lines_of(capsys)
    assert len(lines) == 3
    for line in lines:
        assert line["error"] == "ValueError"
        assert "test_telemetry.py" in str(line["places"])
        assert SECRET not in str(line)


def test_the_places_of_an_exception_lead_to_its_line() -> None:
    with pytest.raises(ValueError, match=SECRET) as raised:
        raise ValueError(SECRET)
    told = places_of(raised.value)
    assert told["error"] == "ValueError"
    assert "test_the_places_of_an_exception" in str(told["places"])


async def test_what_nobody_awaited_is_told_without_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "json")
    log_loop_fault(
        asyncio.get_running_loop(),
        {"message": f"never retrieved: {SECRET}", "exception": ValueError(SECRET)},
    )
    (line,) = lines_of(capsys)
    assert (line["event"], line["error"]) == ("asyncio fault", "ValueError")
    assert SECRET not in str(line)


def test_the_level_holds_for_us_and_others_are_heard_from_warnings_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging("warning", "json")
    log.info("quiet")
    logging.getLogger("other").info("quiet")
    log.warning("loud")
    assert [line["event"] for line in lines_of(capsys)] == ["loud"]


def test_people_get_lines_without_braces(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "console")
    log.info("ready", model="m", odd="two\nlines")
    (line,) = capsys.readouterr().err.splitlines()
    assert "ready" in line
    assert "model=m" in line
    assert "{" not in line
