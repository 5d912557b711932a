from __future__ import annotations

from pathlib import Path

import pytest
import structlog

from headrace.service.file_watch import UnusableFile, WatchedFiles, read_text


def watched(path: Path) -> WatchedFiles[int]:
    def read() -> int:
        try:
            return int(read_text(path, most_bytes=8))
        except ValueError as error:
            raise UnusableFile(f"{path}: is no number") from error

    return WatchedFiles([path], read, look_every_s=0.0)


def test_what_a_file_says_is_what_it_says_now(tmp_path: Path) -> None:
    path = tmp_path / "number"
    path.write_text("1")
    number = watched(path)
    assert number.current() == 1
    path.write_text("22")
    assert number.current() == 22
    # As a mounted secret changes: the path is a link, and the link is turned.
    (tmp_path / "new").write_text("333")
    path.unlink()
    path.symlink_to(tmp_path / "new")
    assert number.current() == 333


def test_a_change_that_can_not_be_taken_is_told_once_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "number"
    path.write_text("1")
    number = watched(path)
    with structlog.testing.capture_logs() as logs:
        path.write_text("one")
        assert [number.current(), number.current()] == [1, 1]
        path.unlink()
        assert [number.current(), number.current()] == [1, 1]
    assert [entry["log_level"] for entry in logs] == ["error", "error"]
    path.write_text("4")
    assert number.current() == 4


@pytest.mark.parametrize(("content", "problem"), [(b"123456789", "longer than"), (b"\xff", "no text")])
def test_what_is_no_short_text_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "number"
    path.write_bytes(content)
    with pytest.raises(UnusableFile, match=problem):
        watched(path)
    with pytest.raises(UnusableFile, match="can't be read"):
        watched(tmp_path / "nowhere")
