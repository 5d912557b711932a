from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from headrace.clients.step_log import StepLog
from tests.support.step_reports import make_reports

pytest.importorskip("matplotlib")

from headrace.clients.step_picture import colours_of, write_picture

STEPS = ("a12 b3 .", *["a b ."] * 30, "a! b c4", *[". b c"] * 30, ". b! c!")


def log_of(*steps: str) -> StepLog:
    return StepLog(make_reports(100, *steps), 3, "continuous", "tiny")


def texts_in(path: Path) -> list[str]:
    return [element.text or "" for element in ET.parse(path).iter() if element.tag.endswith("text")]


def test_the_same_log_makes_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg", "a.png", "b.png"):
        write_picture(tmp_path / name, log_of(*STEPS))
    for form in ("svg", "png"):
        assert (tmp_path / f"a.{form}").read_bytes() == (tmp_path / f"b.{form}").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_says_what_it_shows_and_names_the_requests(tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    write_picture(path, log_of(*STEPS))
    texts = texts_in(path)
    assert "continuous batching: 3 requests over 3 slots, 63 steps, 67% of the slots busy" in texts
    assert {"a", "b", "c", "prefill", "decode", "idle"} <= set(texts)
    assert "steps not seen" not in texts


def test_steps_that_were_not_seen_are_shown_as_such(tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    write_picture(path, log_of(*STEPS[:20], "-", "-", "-", *STEPS[23:]))
    assert "steps not seen" in texts_in(path)


def test_two_pictures_of_one_scale_have_lanes_of_different_lengths(tmp_path: Path) -> None:
    short, long = log_of(*["a"] * 10), log_of(*["a"] * 20)
    widths = []
    for name, log in (("short.svg", short), ("long.svg", long)):
        write_picture(tmp_path / name, log, num_steps=20)
        # The first lane's background, as far as steps were made.
        text = (tmp_path / name).read_text()
        drawn = re.search(r'<g id="PolyCollection_1">\s*<path d="([^"]*)"', text)
        assert drawn is not None
        xs = [float(x) for x in re.findall(r"[ML] ([\d.]+) ", drawn[1])]
        widths.append(max(xs) - min(xs))
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.01)


def test_each_request_has_a_colour_of_its_own() -> None:
    cells = [chr(ord("a") + number) for number in range(24)]
    colours = colours_of(StepLog(make_reports(0, " ".join(cells)), 24, "static"))
    assert len(set(colours.values())) == len(colours) == 24
