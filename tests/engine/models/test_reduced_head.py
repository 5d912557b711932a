from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.engine import ModelConfig, ModelLoadError
from headrace.engine.models.loader import load_decoder, read_spec
from headrace.engine.models.reduced_head import REDUCED_HEAD_FILE, ReducedHead, read_reduced_head
from tests.support.paged_step import logits_of
from tests.support.tiny_models import write_tiny_llama

IDS = torch.tensor([0, 3, 17, 511])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


def head_of(folder: Path) -> torch.Tensor:
    tensors = load_file(folder / "model.safetensors")
    return tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])


@pytest.fixture(autouse=True)
def tidy(folder: Path) -> None:
    (folder / REDUCED_HEAD_FILE).unlink(missing_ok=True)


def test_a_folder_without_one_has_the_whole_head(folder: Path) -> None:
    assert read_reduced_head(folder, read_spec(folder)[1]) is None


def test_its_logits_are_those_of_the_whole_head_for_its_tokens(folder: Path) -> None:
    config, cpu = ModelConfig(folder, dtype="float32"), torch.device("cpu")
    whole = load_decoder(config, cpu).decoder
    ReducedHead(IDS, head_of(folder)[IDS]).save(folder)
    head = read_reduced_head(folder, whole.spec)
    assert head is not None
    assert torch.equal(head.token_ids, IDS)
    reduced = load_decoder(config, cpu, reduced_head=head).decoder
    text = torch.tensor([5, 99, 300])
    torch.testing.assert_close(logits_of(reduced, text), logits_of(whole, text)[:, IDS])
    assert reduced.logits(torch.empty(0, 64)).shape == (0, 4)


def test_rows_for_tokens_that_a_target_lacks_can_be_left_out(folder: Path) -> None:
    head = ReducedHead(IDS, torch.arange(4.0)[:, None])
    assert head.below(17).token_ids.tolist() == [0, 3]
    assert head.below(17).weight.tolist() == [[0.0], [1.0]]


@pytest.mark.parametrize(
    ("token_ids", "weight", "fault"),
    [
        ([0, 3, 512], torch.ones(3, 64), "token 512 is none of the model's, which are 0 to 511"),
        ([-1, 3], torch.ones(2, 64), "token -1 is none of the model's"),
        ([3, 2], torch.ones(2, 64), "must ascend, each there once: 2 follows 3"),
        ([1, 3, 3], torch.ones(3, 64), "must ascend, each there once: 3 follows 3"),
        ([1, 3], torch.ones(3, 64), "weight has 3 rows for 2 token_ids"),
        ([1, 3], torch.ones(2, 32), "weight is 32 wide, and the model beside it 64"),
        ([1, 3], torch.full((2, 64), torch.nan), "not finite"),
        ([1, 3], torch.ones(2, 64, dtype=torch.int32), "matrix of floating-point numbers"),
        ([], torch.ones(0, 64), "one at least"),
        ([[1], [3]], torch.ones(2, 64), "must be a list"),
    ],
)
def test_a_head_that_does_not_belong_is_refused_with_what_is_wrong(
    folder: Path, token_ids: list[int], weight: torch.Tensor, fault: str
) -> None:
    tensors = {"token_ids": torch.tensor(token_ids, dtype=torch.int32), "weight": weight}
    save_file(tensors, folder / REDUCED_HEAD_FILE)
    with pytest.raises(ModelLoadError, match=rf"{re.escape(REDUCED_HEAD_FILE)}: .*{re.escape(fault)}"):
        read_reduced_head(folder, read_spec(folder)[1])


def test_other_tensors_and_damaged_files_are_refused(folder: Path) -> None:
    path = folder / REDUCED_HEAD_FILE
    save_file({"weight": torch.ones(2, 64)}, path)
    with pytest.raises(ModelLoadError, match="holds weight: a reduced head is token_ids and weight"):
        read_reduced_head(folder, read_spec(folder)[1])
    path.write_bytes(b"half a head")
    with pytest.raises(ModelLoadError, match="can't be read"):
        read_reduced_head(folder, read_spec(folder)[1])


def test_the_model_beside_it_is_whole_and_nobody_wonders_at_the_file(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ReducedHead(IDS, torch.ones(4, 64)).save(folder)
    decoder = load_decoder(ModelConfig(folder, dtype="float32"), torch.device("cpu")).decoder
    assert logits_of(decoder, torch.tensor([5])).shape == (1, 512)
    assert REDUCED_HEAD_FILE not in caplog.text
