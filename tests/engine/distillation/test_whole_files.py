from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headrace.engine import DraftingFailed
from headrace.engine.distillation.whole_files import write_whole

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(sys.platform != "linux", reason="the device that is always full is Linux's")


def write_second(partial: Path) -> None:
    partial.write_text("second")


def test_a_file_is_replaced_by_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("first")
    write_whole(path, write_second)
    assert path.read_text() == "second"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_broken_off_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def broken_off(partial: Path) -> None:
        partial.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, broken_off)
    assert path.read_text() == "before"


def write_tensors(_: Path) -> None:
    save_file({"a": torch.zeros(9)}, FULL)


def write_state(_: Path) -> None:
    torch.save({"a": torch.zeros(9)}, FULL)


def write_text(_: Path) -> None:
    FULL.write_text("text")


@needs_full
@pytest.mark.parametrize("write", [write_tensors, write_state, write_text])
def test_a_full_disk_is_told_with_what_to_do(tmp_path: Path, write: object) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(DraftingFailed, match=r"file can't be written: .*make room"):
        write_whole(path, write)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "before"
