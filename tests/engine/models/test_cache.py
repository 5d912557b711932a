"""Folders of the cache: whole or not there, whoever builds them and however they are damaged."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from headrace.engine.errors import ModelLoadError
from headrace.engine.models.cache import MANIFEST_FILE, ensure_folder, is_intact, sha256_of


class Builder:
    """Fills a folder with two files and counts how often."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, folder: Path) -> None:
        self.num_calls += 1
        (folder / "weights").write_bytes(b"w" * 1000)
        (folder / "config.json").write_text("{}")


def contents_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST_FILE}


WHOLE = {"weights": b"w" * 1000, "config.json": b"{}"}


def test_a_folder_is_built_once(tmp_path: Path) -> None:
    build = Builder()
    place = tmp_path / "models" / "mill"
    for _ in range(3):
        assert ensure_folder(place, build) == place
    assert build.num_calls == 1
    assert contents_of(place) == WHOLE


@pytest.mark.parametrize("name", ["weights", "config.json", MANIFEST_FILE])
def test_a_missing_file_is_noticed_and_the_folder_made_anew(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build = Builder()
    place = ensure_folder(tmp_path / "mill", build)
    (place / name).unlink()
    assert not is_intact(place)
    with caplog.at_level(logging.WARNING, logger="headrace"):
        ensure_folder(place, build)
    assert contents_of(place) == WHOLE
    assert build.num_calls == 2
    assert "made anew" in caplog.text


@pytest.mark.parametrize("content", [b"w" * 999, b"w" * 999 + b"x", b""])
def test_a_changed_file_is_noticed(content: bytes, tmp_path: Path) -> None:
    build = Builder()
    place = ensure_folder(tmp_path / "mill", build)
    before = (place / "weights").stat().st_mtime_ns
    (place / "weights").write_bytes(content)
    os.utime(place / "weights", ns=(before + 1, before + 1))
    assert contents_of(ensure_folder(place, build)) == WHOLE
    assert build.num_calls == 2


def test_a_copied_folder_with_other_times_counts_as_whole(tmp_path: Path) -> None:
    place = ensure_folder(tmp_path / "mill", Builder())
    os.utime(place / "weights", ns=(1, 1))
    assert is_intact(place)


@pytest.mark.parametrize("manifest", ["", "[]", "{}", '{"files": {"weights": {}}}'])
def test_a_damaged_manifest_counts_as_damage(manifest: str, tmp_path: Path) -> None:
    build = Builder()
    place = ensure_folder(tmp_path / "mill", build)
    (place / MANIFEST_FILE).write_text(manifest)
    assert contents_of(ensure_folder(place, build)) == WHOLE
    assert build.num_calls == 2


def test_a_build_that_fails_leaves_nothing_and_may_be_tried_again(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "weights").write_bytes(b"half")
        raise ModelLoadError("the network is gone")

    place = tmp_path / "mill"
    with pytest.raises(ModelLoadError, match="the network is gone"):
        ensure_folder(place, fail)
    assert not place.exists()
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    assert contents_of(ensure_folder(place, Builder())) == WHOLE


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    left: list[Path] = []

    def die(folder: Path) -> None:
        copy = folder.with_name(folder.name + "-of-a-dead-process")
        copy.mkdir()
        (copy / "weights").write_bytes(b"half")
        left.append(copy)
        raise ModelLoadError("killed")

    with pytest.raises(ModelLoadError):
        ensure_folder(tmp_path / "mill", die)
    assert left[0].exists()
    ensure_folder(tmp_path / "mill", Builder())
    assert not left[0].exists()


def test_two_at_once_build_one_folder(tmp_path: Path) -> None:
    is_building, may_finish = threading.Event(), threading.Event()
    second = Builder()

    def slow(folder: Path) -> None:
        is_building.set()
        assert may_finish.wait(30)
        Builder()(folder)

    place = tmp_path / "mill"
    threads = [threading.Thread(target=ensure_folder, args=(place, slow))]
    threads[0].start()
    assert is_building.wait(30)
    threads.append(threading.Thread(target=ensure_folder, args=(place, second)))
    threads[1].start()
    assert not place.exists()
    may_finish.set()
    for thread in threads:
        thread.join()
    assert contents_of(place) == WHOLE
    assert second.num_calls == 0


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(ModelLoadError, match=r"cache folder .* can't be used.* HEADRACE_CACHE"):
        ensure_folder(tmp_path / "cache" / "mill", Builder())


def test_the_hash_is_sha_256(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    assert sha256_of(tmp_path / "abc").startswith("ba7816bf8f01cfea")
