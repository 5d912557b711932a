"""The committed stubs are what the protos give."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.repository import ROOT


def generated_files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_committed_stubs_equal_a_fresh_generation(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, ROOT / ".ci" / "generate_stubs.py", "--output", tmp_path], check=True, timeout=100
    )
    fresh, committed = generated_files(tmp_path), generated_files(ROOT / "proto" / "gen")
    assert fresh.keys() == committed.keys(), "run `make proto` and commit the result"
    stale = [name for name in fresh if fresh[name] != committed[name]]
    assert not stale, "run `make proto` and commit the result"


def test_every_proto_has_its_three_stubs() -> None:
    protos = {path.stem for path in (ROOT / "proto" / "headrace" / "v1").glob("*.proto")}
    stubs = {path.name for path in (ROOT / "proto" / "gen" / "headrace" / "v1").iterdir()}
    expected = {f"{name}{suffix}" for name in protos for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")}
    assert protos
    assert expected <= stubs


def test_check_names_the_stub_that_is_stale(tmp_path: Path) -> None:
    generator = ROOT / ".ci" / "generate_stubs.py"
    subprocess.run([sys.executable, generator, "--output", tmp_path], check=True, timeout=100)
    stale = tmp_path / "headrace" / "v1" / "generation_pb2.py"
    stale.write_text(stale.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    outcome = subprocess.run(
        [sys.executable, generator, "--check", "--output", tmp_path],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert outcome.returncode == 1
    assert str(stale) in outcome.stderr
    assert "make proto" in outcome.stderr
