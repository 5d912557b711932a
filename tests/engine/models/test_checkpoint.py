"""What can be wrong with a folder's weight files, each with the error that names it."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from headrace.engine.errors import ModelLoadError
from headrace.engine.models.checkpoint import Checkpoint, read_config
from headrace.engine.models.registry import spec_of
from tests.support.model_files import edited_json, edited_tensors
from tests.support.tiny_models import write_tiny_llama

FINAL_NORM = "model.norm.weight"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "model")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "model", max_shard_size="250KB")


def shards_of(folder: Path) -> list[Path]:
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) >= 3
    return shards


def check(folder: Path) -> None:
    """What the loader checks before it computes anything."""
    spec = spec_of(read_config(folder))
    with Checkpoint(folder) as checkpoint:
        checkpoint.require(spec.tensors())


def assert_refused(folder: Path, *words: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        check(folder)
    for word in words:
        assert word in str(caught.value)


def test_whole_folders_are_taken(single: Path) -> None:
    check(single)


def test_sharded_folders_are_taken(sharded: Path) -> None:
    check(sharded)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert_refused(tmp_path / "nowhere", "nowhere", "does not exist")


def test_a_file_is_no_folder(single: Path) -> None:
    assert_refused(single / "config.json", "is a file")


def test_an_empty_folder_is_said_to_be_empty(tmp_path: Path) -> None:
    assert_refused(tmp_path, str(tmp_path), "empty")


def test_a_folder_without_config_is_no_model_folder(single: Path) -> None:
    (single / "config.json").unlink()
    assert_refused(single, "config.json is missing")


def test_a_folder_without_weights_says_what_is_wanted(single: Path) -> None:
    (single / "model.safetensors").unlink()
    assert_refused(single, "no weights", "model.safetensors", "model.safetensors.index.json")


def test_a_truncated_file_is_named(single: Path) -> None:
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert_refused(single, str(path), "cut short")


def test_a_file_of_noise_is_named(single: Path) -> None:
    (single / "model.safetensors").write_bytes(b"no tensors here")
    assert_refused(single, "model.safetensors", "damaged")


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    shard = shards_of(sharded)[1]
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    assert_refused(sharded, shard.name, "cut short")


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = shards_of(sharded)[1]
    shard.unlink()
    assert_refused(sharded, shard.name, "does not hold")


def test_a_renamed_shard_counts_as_missing(sharded: Path) -> None:
    shard = shards_of(sharded)[1]
    shard.rename(sharded / "model-00009-of-00009.safetensors")
    assert_refused(sharded, shard.name)


def test_a_stray_file_with_the_same_tensors_is_ignored_with_a_warning(
    sharded: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(shards_of(sharded)[0], sharded / "stray.safetensors")
    with caplog.at_level(logging.WARNING):
        check(sharded)
    assert "stray.safetensors" in caplog.text


def test_a_tensor_that_is_not_where_the_index_says_is_named(sharded: Path) -> None:
    first, second = shards_of(sharded)[:2]
    with edited_json(sharded / "model.safetensors.index.json") as index:
        name = next(name for name, file in index["weight_map"].items() if file == first.name)
        index["weight_map"][name] = second.name
    assert_refused(sharded, name, second.name, f"{first.name} does")


def test_a_tensor_that_the_index_invents_is_named(sharded: Path) -> None:
    shard = shards_of(sharded)[0]
    with edited_json(sharded / "model.safetensors.index.json") as index:
        index["weight_map"]["model.layers.7.mlp.up_proj.weight"] = shard.name
    assert_refused(sharded, "model.layers.7.mlp.up_proj.weight", shard.name)


def test_a_tensor_that_the_index_leaves_out_is_named(sharded: Path) -> None:
    with edited_json(sharded / "model.safetensors.index.json") as index:
        del index["weight_map"][FINAL_NORM]
    assert_refused(sharded, FINAL_NORM, "does not list")


def test_a_tensor_in_two_shards_is_named_with_both(sharded: Path) -> None:
    first, second = shards_of(sharded)[:2]
    with edited_tensors(first) as ours, edited_tensors(second) as theirs:
        name = next(iter(ours))
        theirs[name] = ours[name].clone()
    assert_refused(sharded, name, first.name, second.name)


def test_a_tensor_that_the_index_lists_twice_is_named(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    entry = json.dumps({FINAL_NORM: shards_of(sharded)[0].name})[1:-1]
    path.write_text(path.read_text().replace('"weight_map": {', '"weight_map": {' + entry + ","))
    assert_refused(sharded, FINAL_NORM, "twice")


@pytest.mark.parametrize("target", ["../elsewhere.safetensors", "/etc/passwd", "model.bin", 3])
def test_an_index_cannot_point_outside_the_folder_or_to_other_kinds_of_file(
    sharded: Path, target: object
) -> None:
    with edited_json(sharded / "model.safetensors.index.json") as index:
        index["weight_map"][FINAL_NORM] = target
    assert_refused(sharded, FINAL_NORM, "no safetensors file of this folder")


def test_the_index_decides_which_files_count_even_beside_a_single_file(
    sharded: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (sharded / "model.safetensors").write_bytes(b"left over")
    with caplog.at_level(logging.WARNING):
        check(sharded)
    assert "ignored: model.safetensors" in caplog.text


def test_safetensors_of_another_name_are_not_guessed_at(single: Path) -> None:
    (single / "model.safetensors").rename(single / "weights.safetensors")
    assert_refused(single, "weights.safetensors", "unknown")


def test_missing_unused_and_misshapen_tensors_are_all_named_at_once(single: Path) -> None:
    with edited_tensors(single / "model.safetensors") as tensors:
        del tensors["model.layers.0.mlp.up_proj.weight"]
        tensors["model.layers.0.mlp.gate_proj.weight"] = torch.zeros(3, 5)
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)
    assert_refused(
        single,
        "missing: model.layers.0.mlp.up_proj.weight",
        "not known to this architecture: model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.mlp.gate_proj.weight is [3, 5], should be [160, 64]",
    )


def test_stored_rotary_tables_are_harmless(single: Path) -> None:
    with edited_tensors(single / "model.safetensors") as tensors:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    check(single)


def test_quantized_tensors_are_refused_by_type(single: Path) -> None:
    with edited_tensors(single / "model.safetensors") as tensors:
        tensors[FINAL_NORM] = torch.ones(64, dtype=torch.int8)
    with Checkpoint(single) as checkpoint, pytest.raises(ModelLoadError, match="int8"):
        checkpoint.read(FINAL_NORM)


class _WritesMarker:
    """Unpickling it runs code."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, (f"open({str(self._marker)!r}, 'w').close()",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.pth"])
def test_a_pickle_is_refused_and_none_of_its_code_runs(single: Path, tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    (single / "model.safetensors").unlink()
    (single / name).write_bytes(pickle.dumps(_WritesMarker(marker)))
    assert_refused(single, name, "can run code", "safetensors")
    assert not marker.exists()


def test_a_pickle_beside_safetensors_is_never_opened(
    single: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marker = tmp_path / "marker"
    (single / "pytorch_model.bin").write_bytes(pickle.dumps(_WritesMarker(marker)))
    with caplog.at_level(logging.WARNING):
        check(single)
    assert not marker.exists()
    assert "pytorch_model.bin" in caplog.text
