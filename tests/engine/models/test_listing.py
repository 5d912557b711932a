"""Which models are listed, and with what sizes. The cache folder is made by hand: no network."""

from __future__ import annotations

from pathlib import Path

from headrace.engine.models.fetch import pip_download, snapshot_download
from headrace.engine.models.hub import Sources, converted_place
from headrace.engine.models.known import KNOWN_MODELS, KnownModel, WheelPart
from headrace.engine.models.listing import ListedModel, list_models

MILL = KnownModel("mill", "a mill", (WheelPart("mill", "1", "0" * 64, 1000, "mill.gguf"),), "ab" * 32)
SOURCES = Sources({"mill": MILL}, pip_download, snapshot_download)


def put(path: Path, num_bytes: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * num_bytes)
    return path


def test_every_known_model_is_listed_with_a_description(tmp_path: Path) -> None:
    listed = list_models(tmp_path / "nowhere")
    assert [model.spec for model in listed] == list(KNOWN_MODELS)
    for model in listed:
        assert model.description
        assert model.download_bytes > 10_000_000
        assert model.cached_bytes == 0


def test_what_is_in_the_cache_is_listed_with_its_size(tmp_path: Path) -> None:
    place = converted_place(tmp_path, MILL.gguf_sha256, "mill")
    put(place / "model.safetensors", 500)
    put(tmp_path / "files" / f"{MILL.gguf_sha256}.gguf", 70)
    put(tmp_path / "gguf" / ".mill.lock", 9)
    other = converted_place(tmp_path, "cd" * 32, "Own.Q4")
    put(other / "config.json", 3)
    older = tmp_path / "gguf" / f"{MILL.gguf_sha256[:16]}-v1" / "mill"
    put(older / "config.json", 4)
    hub = tmp_path / "hub" / "models--org--some--model"
    blob = put(hub / "blobs" / "1", 11)
    (hub / "snapshots").mkdir()
    (hub / "snapshots" / "config.json").symlink_to(blob)
    assert list_models(tmp_path, sources=SOURCES) == (
        ListedModel("mill", "a mill", 0, 570),
        ListedModel("hf:org/some--model", "fetched from the hub", 0, 11),
        ListedModel(
            str(older),
            f"converted from a GGUF file by an older version, and read no more: rm -r {older}",
            0,
            4,
        ),
        ListedModel(str(other), "converted from a GGUF file", 0, 3),
    )


def test_a_file_that_is_kept_need_not_be_fetched(tmp_path: Path) -> None:
    put(tmp_path / "files" / f"{MILL.gguf_sha256}.gguf", 70)
    assert list_models(tmp_path, sources=SOURCES) == (ListedModel("mill", "a mill", 0, 70),)
