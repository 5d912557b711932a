"""From a configuration to a model that answers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from headrace.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from headrace.engine.errors import ConfigError, ModelLoadError
from headrace.engine.models.tokenizer import HFTokenizer
from headrace.engine.runner import loading
from headrace.engine.runner.loading import load
from tests.support.plan_loop import make_sequences, run_to_end
from tests.support.tiny_models import IM_END_ID, MAX_POSITIONS, VOCAB_SIZE, tiny_llama, write_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny-model")


def make_config(folder: Path, *, dtype: str = "float32", backend: str = "auto") -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(folder, dtype=dtype, attention_backend=backend),
        cache=CacheConfig(block_size=4, num_blocks=40),
        scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=32),
        num_threads=torch.get_num_threads(),
    )


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
def test_a_loaded_model_answers_as_transformers_does(folder: Path, backend: str) -> None:
    loaded = load(make_config(folder, backend=backend))
    prompt = loaded.tokenizer.encode("The wheel turns")

    token_ids = run_to_end(loaded.runner, make_sequences([prompt], 10, loaded.layout.block_size))[0]

    expected = tiny_llama().generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=10,
        do_sample=False,
        eos_token_id=None,
    )
    assert token_ids == expected[0].tolist()


def test_it_says_what_it_is(folder: Path) -> None:
    loaded = load(make_config(folder))

    assert loaded.info.name == "tiny-model"
    assert loaded.info.family == "llama"
    assert loaded.info.vocab_size == VOCAB_SIZE
    assert loaded.info.max_model_len == MAX_POSITIONS
    assert loaded.info.dtype == "float32"
    assert IM_END_ID in loaded.info.eos_token_ids
    assert loaded.layout.num_usable_blocks == 40


def test_bfloat16_runs(folder: Path) -> None:
    loaded = load(make_config(folder, dtype="bfloat16"))

    token_ids = run_to_end(loaded.runner, make_sequences([[5, 6, 7]], 4, loaded.layout.block_size))[0]

    assert len(token_ids) == 7
    assert loaded.info.dtype == "bfloat16"


def test_progress_is_told_to_the_end(folder: Path) -> None:
    told: dict[str, list[tuple[int, int]]] = {}

    load(make_config(folder), lambda stage, done, total: told.setdefault(stage, []).append((done, total)))

    assert len(told) == 2
    for reports in told.values():
        assert [done for done, _ in reports] == sorted(done for done, _ in reports)
        assert reports[-1][0] == reports[-1][1]


def test_a_tokenizer_that_cannot_be_read_is_told_and_nothing_is_left_running(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    (folder / "tokenizer.json").write_text("{")

    with pytest.raises(ModelLoadError, match="the tokenizer in"):
        load(make_config(folder))

    assert not [thread for thread in threading.enumerate() if thread.name.startswith("headrace-tokenizer")]


def test_who_waits_for_weights_hears_of_a_tokenizer_that_cannot_be_read_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def fail(path: Path) -> HFTokenizer:
        failed.set()
        raise ModelLoadError(f"the tokenizer in {path} can't be read")

    def wait_and_count(stage: str, done: int, total: int) -> None:
        assert failed.wait(10)
        shares.append(done / total)

    shares: list[float] = []
    monkeypatch.setattr(loading, "load_tokenizer", fail)
    with pytest.raises(ModelLoadError, match="the tokenizer in"):
        load(make_config(folder), wait_and_count)

    assert not shares or max(shares) < 1


def test_a_backend_that_does_not_suit_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="it runs on cuda, not on cpu"):
        load(make_config(folder, backend="flash"))


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        load(make_config(tmp_path / "nowhere"))
