"""What can't work is told before weights are read: the folders here hold a config.json alone."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    Speculation,
    SpeculationConfig,
)
from headrace.engine.errors import ConfigError, ModelLoadError
from headrace.engine.kv.storage import KVShape, plan_layout
from headrace.engine.models.layers import is_packed
from headrace.engine.models.loader import DTYPES, read_spec, suits_kept
from headrace.engine.models.reduced_head import REDUCED_HEAD_FILE
from headrace.engine.models.rope import RotaryTable, rotary_bytes
from headrace.engine.models.spec import EMBEDDING
from headrace.engine.native.quantised import WeightKind
from headrace.engine.runner.foresight import check_machine, check_room
from headrace.engine.runner.loading import load
from tests.support.model_files import edited_tensors
from tests.support.tiny_models import write_tiny_llama

CPU = torch.device("cpu")
MIB = 2**20


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return json.loads((write_tiny_llama(tmp_path_factory.mktemp("tiny")) / "config.json").read_text())


@pytest.fixture
def folder(tmp_path: Path, config_file: dict[str, Any]) -> Path:
    return folder_of(tmp_path, config_file)


def folder_of(path: Path, config_file: dict[str, Any], **changes: Any) -> Path:
    (path / "config.json").write_text(json.dumps(config_file | changes))
    return path


def make_config(folder: Path, cache: CacheConfig | None = None, **model: Any) -> EngineConfig:
    return EngineConfig(
        ModelConfig(folder, **{"dtype": "float32", "device": "cpu"} | model),
        cache or CacheConfig(block_size=4),
        SchedulerConfig(max_num_seqs=3),
        num_threads=torch.get_num_threads(),
    )


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ({"dtype": "float16"}, "float16 has no fast kernels on a CPU"),
        ({"attention_backend": "flash"}, "it runs on cuda, not on cpu"),
        ({"attention_backend": "nobody"}, "is not known: use one of auto"),
    ],
)
def test_what_the_machine_can_not_do_needs_no_file_to_be_refused(model: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_machine(make_config(Path("nowhere"), **model))


def test_more_memory_than_there_is_needs_no_file_to_be_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"memory_bytes=1152921504606846976 \(1073741824\.00 GiB\) is more than the"
    ):
        check_machine(make_config(Path("nowhere"), CacheConfig(memory_bytes=2**60)))


def test_a_pool_as_large_as_is_advised_fits_once_the_weights_are_there(
    tmp_path: Path, config_file: dict[str, Any]
) -> None:
    folder = folder_of(tmp_path, config_file, vocab_size=20_000)
    greedy = make_config(folder, CacheConfig(block_size=4, memory_bytes=2**60))
    check_machine(greedy)
    with pytest.raises(ConfigError, match=r"use memory_bytes=\d+ at most") as refusal:
        check_room(greedy, CPU, torch.float32, 24 * MIB)
    found = re.search(r"use memory_bytes=(\d+)", str(refusal.value))
    assert found is not None
    advised = CacheConfig(block_size=4, memory_bytes=int(found[1]))
    check_room(make_config(folder, advised), CPU, torch.float32, 24 * MIB)
    _, spec = read_spec(folder)
    # Whatever they are stored in, they take no more; and a little is somebody else's by then.
    weight_bytes = 4 * sum(math.prod(shape) for shape in spec.tensors().values())
    shape = KVShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, torch.float32)
    plan_layout(advised, shape, max_num_seqs=3, max_model_len=64, available_bytes=23 * MIB - weight_bytes)


def test_what_the_machine_can_do_passes() -> None:
    for backend in ("auto", "cpu", "reference"):
        check_machine(make_config(Path("nowhere"), attention_backend=backend, dtype="auto"))


@pytest.mark.parametrize(
    ("cache", "model", "problem"),
    [
        (
            CacheConfig(block_size=4, memory_bytes=2**60),
            {},
            r"memory_bytes=\d+ makes a KV pool of .*use memory_bytes=\d+",
        ),
        (CacheConfig(block_size=4, memory_bytes=1), {}, "holds no block of 4 tokens"),
        (CacheConfig(block_size=4, num_blocks=2**50), {}, r"use num_blocks=\d+ at most"),
        (None, {"attention_backend": "flash"}, "it runs on cuda, not on cpu"),
        (None, {"dtype": "float16"}, "float16 has no fast kernels"),
    ],
)
def test_it_is_refused_before_weights_are_looked_for(
    folder: Path, cache: CacheConfig | None, model: dict[str, Any], problem: str
) -> None:
    # Whoever looked for weights or a tokenizer would miss them.
    with pytest.raises(ConfigError, match=problem):
        load(make_config(folder, cache, **model))


def test_weights_that_find_no_room_are_told_of(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"the weights take .* are free.*--weight-dtype"):
        check_room(make_config(folder), CPU, torch.float32, 1000)


def test_a_tensor_of_another_shape_is_left_to_who_reads_it(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    with edited_tensors(folder / "model.safetensors") as tensors:
        tensors["model.layers.0.mlp.down_proj.weight"] = torch.ones(7)
        tensors["model.layers.0.self_attn.o_proj.weight"] = torch.tensor(1.0)
        tensors["model.layers.1.mlp.down_proj.weight"] = torch.ones(4, 0)
    config = make_config(folder, CacheConfig(block_size=4, num_blocks=8))
    check_room(config, CPU, torch.float32, 64 * MIB)
    with pytest.raises(ModelLoadError, match=r"down_proj\.weight is \[7\]"):
        load(config)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_weights_count_as_much_as_they_are_going_to_take(tmp_path: Path, stored: torch.dtype) -> None:
    if not suits_kept(torch.float32, CPU):
        pytest.skip("the kernels are not built, or multiply bfloat16 themselves: all weights take four bytes")
    folder = write_tiny_llama(tmp_path, hidden_size=256)
    with edited_tensors(folder / "model.safetensors") as tensors:
        tensors.update({name: tensor.to(stored) for name, tensor in tensors.items()})
    num_weights = sum(math.prod(shape) for shape in read_spec(folder)[1].tensors().values())
    config = make_config(folder, CacheConfig(block_size=4, num_blocks=8))
    # Enough for three bytes of each.
    if stored is torch.bfloat16:
        check_room(config, CPU, torch.float32, 3 * num_weights)
        return
    with pytest.raises(ConfigError, match="the weights take"):
        check_room(config, CPU, torch.float32, 3 * num_weights)


def test_an_embedding_that_is_the_head_too_counts_twice_where_heads_are_packed(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path, vocab_size=50_000, tie_word_embeddings=True)
    shapes = read_spec(folder)[1].tensors()
    num_bytes = 4 * sum(math.prod(shape) for shape in shapes.values())
    config = make_config(folder, CacheConfig(block_size=4, num_blocks=8))
    head_bytes = 4 * math.prod(shapes[EMBEDDING]) * is_packed(torch.float32, CPU, WeightKind.SAME)
    with pytest.raises(ConfigError):
        check_room(config, CPU, torch.float32, num_bytes + head_bytes - 1)
    check_room(config, CPU, torch.float32, num_bytes + head_bytes + MIB)


def test_a_whole_head_that_a_reduced_one_replaces_takes_no_room(
    tmp_path: Path, folder: Path, config_file: dict[str, Any]
) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    # Its head takes 24 MiB, and so does its embedding.
    folder_of(draft, config_file, vocab_size=200_000, tie_word_embeddings=False)
    config = replace(
        make_config(folder, CacheConfig(block_size=4, num_blocks=100)),
        speculation=SpeculationConfig(Speculation.DRAFT_MODEL, draft),
    )
    with pytest.raises(ConfigError, match="the weights take"):
        check_room(config, CPU, torch.bfloat16, 35 * MIB)
    (draft / REDUCED_HEAD_FILE).touch()
    check_room(config, CPU, torch.bfloat16, 35 * MIB)


@pytest.mark.parametrize(
    "cache", [CacheConfig(block_size=4), CacheConfig(block_size=4, memory_bytes=2 * MIB)]
)
def test_a_context_whose_tables_find_no_room_is_told_with_one_that_does(
    tmp_path: Path, config_file: dict[str, Any], cache: CacheConfig
) -> None:
    config = make_config(folder_of(tmp_path, config_file, max_position_embeddings=2**24), cache)
    with pytest.raises(ConfigError, match=r"--max-model-len \d+ fits.*--kv-memory") as refusal:
        check_room(config, CPU, torch.float32, 64 * MIB)
    found = re.search(r"--max-model-len (\d+)", str(refusal.value))
    assert found is not None
    fitting = int(found[1])
    check_room(
        replace(config, model=replace(config.model, max_model_len=fitting)), CPU, torch.float32, 64 * MIB
    )
    longer = replace(config, model=replace(config.model, max_model_len=2 * fitting))
    with pytest.raises(ConfigError):
        check_room(longer, CPU, torch.float32, 64 * MIB)


def test_what_no_shorter_context_would_mend_is_not_blamed_on_it(folder: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_room(make_config(folder, CacheConfig(memory_bytes=2**40)), CPU, torch.float32, 64 * MIB)
    assert "--max-model-len" not in str(refusal.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_table_takes_what_was_counted(folder: Path, dtype: str) -> None:
    _, spec = read_spec(folder)
    table = RotaryTable(spec.ropes[0], spec.head_dim, 70_000, DTYPES[dtype], CPU)
    cosine, sine = table.rows(torch.tensor([69_999]))
    assert cosine.nbytes + sine.nbytes == rotary_bytes(spec.head_dim, DTYPES[dtype])
