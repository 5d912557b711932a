from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import pytest

from headrace.service.file_watch import UnusableFile
from headrace.service.identity import Identity, Role
from headrace.service.token_drawing import append_line, entry_line, new_token
from headrace.service.tokens import TokenFile, read_entries

TOKEN = "hr_some-token"
DIGEST = hashlib.sha256(TOKEN.encode()).hexdigest()


def token_file(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "tokens"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_token_is_known_by_its_hash_alone(tmp_path: Path) -> None:
    path = token_file(
        tmp_path, "# who may enter", "", f"alice:sha256${DIGEST}", f"bob:sha256${'0' * 64}:control"
    )
    known = TokenFile(path)
    assert known.identify(TOKEN) == Identity("alice", frozenset({Role.GENERATE}))
    assert known.identify(DIGEST) is None
    assert known.identify("") is None
    assert known.identify("hr_ünknown") is None


def test_a_drawn_token_is_let_in_by_its_line_and_stands_nowhere_in_it(tmp_path: Path) -> None:
    drawn = new_token()
    path = tmp_path / "tokens"
    append_line(path, entry_line("alice", drawn, frozenset({Role.GENERATE, Role.CONTROL})))
    append_line(path, entry_line("bob", new_token(), frozenset({Role.GENERATE})))
    assert TokenFile(path).identify(drawn) == Identity("alice", frozenset({Role.GENERATE, Role.CONTROL}))
    assert drawn not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(read_entries(path)) == 2
    assert new_token() != drawn


@pytest.mark.parametrize(
    "line",
    [
        "alice",
        f"alice:{TOKEN}",
        f"alice:sha256${DIGEST[:-1]}",
        f"alice:md5${DIGEST}",
        f"alice:sha256${DIGEST}:boss",
        f":sha256${DIGEST}",
        f"ali\tce:sha256${DIGEST}",
    ],
)
def test_a_line_that_can_not_be_read_is_named_and_not_quoted(tmp_path: Path, line: str) -> None:
    path = token_file(tmp_path, f"bob:sha256${DIGEST}", line)
    with pytest.raises(UnusableFile, match="line 2") as refusal:
        TokenFile(path)
    assert TOKEN not in str(refusal.value)
