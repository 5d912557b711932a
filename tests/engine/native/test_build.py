"""Compiling the kernels: where to, when not again, and what is said when it can't be done."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.engine.native.build import BuildError, build, library_stem, main
from headrace.engine.native.library import NativeLibrary, find_library

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="no C++ compiler on this machine"
)


def write_compiler(place: Path, script: str) -> str:
    """A stand-in for the compiler, as a shell script."""
    path = place / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
@needs_compiler
def test_the_command_builds_a_library_that_loads(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headrace.engine.native.build", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    assert path.parent == tmp_path
    assert find_library([tmp_path]) == path
    assert NativeLibrary(path).variants[-1] == "generic"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([".gitignore", path.name])


def test_what_another_compiler_built_does_not_count(tmp_path: Path) -> None:
    compiler = write_compiler(tmp_path, 'test "$1" = --version && echo "tool 1.0" || exit 7')
    (tmp_path / f"{library_stem()}-{'0' * 8}.so").touch()
    with pytest.raises(BuildError, match="failed"):
        build(tmp_path, compiler)


def test_a_second_build_is_the_first_ones_result(tmp_path: Path) -> None:
    # Writes whatever file follows -o.
    script = 'test "$1" = --version && echo "tool 1.0" && exit 0\nfor last; do :; done; echo built > "$last"'
    compiler = write_compiler(tmp_path, script)
    first = build(tmp_path / "out", compiler)
    stamp = first.stat().st_mtime_ns
    assert build(tmp_path / "out", compiler) == first
    assert first.stat().st_mtime_ns == stamp
    assert first.name.startswith(library_stem())


def test_the_compilers_words_are_passed_on(tmp_path: Path) -> None:
    compiler = write_compiler(
        tmp_path, 'test "$1" = --version && echo v && exit 0\necho "no such flag" >&2; exit 1'
    )
    with pytest.raises(BuildError, match="no such flag"):
        build(tmp_path / "out", compiler)
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == [".gitignore"]


def test_a_missing_compiler_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--folder", str(tmp_path), "--compiler", "no-such-compiler"]) == 1
    assert "'no-such-compiler' is not found" in capsys.readouterr().err


def test_without_any_compiler_it_says_which_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="apt-get install"):
        build(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    compiler = write_compiler(tmp_path, "echo v")
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="no folder to build in"):
        build(tmp_path / "file" / "inside", compiler)
