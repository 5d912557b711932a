"""What is decided once the weights are in place. What needs a GPU is tested in tests/gpu."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.engine.config import CacheConfig, CacheLayout, EngineConfig, ModelConfig, SchedulerConfig
from headrace.engine.kv.storage import available_memory
from headrace.engine.models.loader import load_decoder
from headrace.engine.runner.placement import Placement, attention_task, largest_steps
from tests.support.tiny_models import MAX_POSITIONS, write_tiny_llama


@pytest.fixture(scope="module")
def placement(tmp_path_factory: pytest.TempPathFactory) -> Placement:
    return make_placement(write_tiny_llama(tmp_path_factory.mktemp("tiny")))


def make_placement(folder: Path) -> Placement:
    model = ModelConfig(folder, dtype="float32", attention_backend="reference", device="cpu")
    scheduler = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=600)
    config = EngineConfig(model, CacheConfig(block_size=None), scheduler)
    decoder = load_decoder(model, torch.device("cpu")).decoder
    return Placement(config, decoder, MAX_POSITIONS)


def test_on_a_cpu_the_pool_is_measured_by_what_is_free(placement: Placement) -> None:
    assert placement.memory_for_kv() == pytest.approx(available_memory(torch.device("cpu")), rel=0.5)


def test_the_largest_steps_run_over_next_to_no_pool(placement: Placement) -> None:
    placement.run_largest_steps()


@pytest.mark.parametrize("kv_splits", [True, False])
def test_whether_kv_may_be_split_is_the_configurations_word(*, kv_splits: bool) -> None:
    config = EngineConfig(ModelConfig(Path(), kv_splits=kv_splits))

    assert attention_task(config, torch.device("cpu")).may_split is kv_splits


def test_nothing_is_captured_on_a_cpu(placement: Placement) -> None:
    layout = CacheLayout(2, 4)

    assert placement.capture_graphs(placement.build_attention(layout), layout) is None


@pytest.mark.parametrize(
    ("budget", "max_model_len", "prompts"),
    [(600, 256, [256, 256, 88]), (600, 4096, [600]), (600, 100, [100, 100, 100]), (3, 2, [2, 1])],
)
def test_the_largest_steps_use_the_whole_budget_and_every_slot(
    budget: int, max_model_len: int, prompts: list[int]
) -> None:
    scheduler = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=budget)

    prefill, decode = largest_steps(scheduler, max_model_len, 4)

    assert [len(row.token_ids) for row in prefill.rows] == prompts
    assert [(len(row.token_ids), row.end_position) for row in decode.rows] == [(1, max_model_len)] * 3
    assert all(row.is_sampled and not row.sampling.is_greedy for row in (*prefill.rows, *decode.rows))
