"""The process for trials as a process: what goes in, what comes out, when it ends."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import BinaryIO, cast

import pytest

from headrace.engine.sampling import constraint_trial
from headrace.engine.sampling.constraint import Constraint, ConstraintKind
from headrace.engine.sampling.constraint_trial import (
    TrialLimits,
    opening,
    question,
    read_frame,
    write_frame,
)

BYTES = [bytes([byte]) for byte in range(256)]


def test_what_is_written_is_read() -> None:
    pipe = io.BytesIO()
    write_frame(pipe, {"a": ["ü", 1]})
    write_frame(pipe, [])
    pipe.seek(0)
    assert read_frame(pipe) == {"a": ["ü", 1]}
    assert read_frame(pipe) == []


@pytest.mark.parametrize("missing", [1, 3, 6])
def test_a_pipe_that_ends_early_is_no_message(missing: int) -> None:
    whole = io.BytesIO()
    write_frame(whole, "abc")
    with pytest.raises(EOFError):
        read_frame(io.BytesIO(whole.getvalue()[:-missing]))


def test_it_answers_each_question_and_ends_when_nobody_asks_any_more() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", constraint_trial.__name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        sink, source = cast("BinaryIO", process.stdin), cast("BinaryIO", process.stdout)
        write_frame(sink, opening(BYTES, TrialLimits()))
        write_frame(sink, question(Constraint(ConstraintKind.REGEX, "a+")))
        good = read_frame(source)
        write_frame(sink, question(Constraint(ConstraintKind.CHOICE, choices=("a", "ü"))))
        choice = read_frame(source)
        write_frame(sink, question(Constraint(ConstraintKind.REGEX, "a{2")))
        bad = read_frame(source)
        sink.close()
        assert process.wait() == 0
    assert isinstance(good, dict)
    assert (good["refusal"], "/a+/" in good["grammar"]) == ("", True)
    assert isinstance(choice, dict)
    assert (choice["refusal"], '"ü"' in choice["grammar"]) == ("", True)
    assert isinstance(bad, dict)
    assert bad["grammar"] == ""
    assert "unclosed counted repetition" in bad["refusal"]
