"""Finding and loading the library, and the reasons why there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.engine.native.build import library_stem
from headrace.engine.native.library import NativeLibrary, NativeUnavailable, find_library


def test_nothing_built(tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailable, match="is not built: run python -m"):
        find_library([tmp_path, tmp_path / "absent"])


def test_built_from_other_sources(tmp_path: Path) -> None:
    (tmp_path / "headrace-native-linux-x86_64-0123456789abcdef-01234567.so").touch()
    with pytest.raises(NativeUnavailable, match="other sources or for another machine"):
        find_library([tmp_path])


def test_the_first_folder_wins(tmp_path: Path) -> None:
    paths = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        paths.append(tmp_path / name / f"{library_stem()}-01234567.so")
        paths[-1].touch()
    assert find_library([tmp_path / "absent", tmp_path / "one", tmp_path / "two"]) == paths[0]


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    path = tmp_path / "broken.so"
    path.write_text("nothing", encoding="utf-8")
    with pytest.raises(NativeUnavailable, match="can't be loaded"):
        NativeLibrary(path)


def test_the_best_variant_is_taken(library: NativeLibrary) -> None:
    assert library.variant == library.variants[0]
    assert library.variants[-1] == "generic"


def test_an_unknown_variant_is_refused(library: NativeLibrary) -> None:
    with pytest.raises(NativeUnavailable, match=r"use one of .*generic"):
        NativeLibrary(library.path, "sse9")
