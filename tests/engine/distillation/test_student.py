from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from headrace.engine import ConfigError, DraftingFailed, ModelConfig, ModelLoadError
from headrace.engine.distillation.student import Student
from headrace.engine.models.loader import load_decoder
from tests.support.distillation import drawn_sequences, reference_hidden
from tests.support.tiny_models import FAMILIES, write_tiny_family

VARIANTS = {
    "llama": 2,
    "qwen2": 1,
    "qwen2, upper layers windowed": 3,
    "gemma2": 3,
    "gemma3": 6,
    "granite": 1,
    "smollm3": 3,
    "mixtral": 1,
    "qwen3-moe": 2,
}
"""How many layers of each are kept: where there are lists of layers, across a change of kind."""


def target_of(folder: Path, variant: str = "llama", **overrides: Any) -> Path:
    num_layers = FAMILIES[variant][1].get("num_hidden_layers", 3)
    return write_tiny_family(folder / "target", variant, **{"num_hidden_layers": num_layers, **overrides})


def hidden(student: Student, sequence: tuple[int, ...]) -> Tensor:
    token_ids = torch.tensor([sequence])
    with torch.no_grad():
        return student.hidden(token_ids, torch.ones_like(token_ids, dtype=torch.bool))[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_begins_as_the_first_layers_of_its_target(tmp_path: Path, variant: str) -> None:
    target, num_layers = target_of(tmp_path, variant), VARIANTS[variant]
    (sequence,) = drawn_sequences([60])
    student = Student(target, num_layers)
    theirs = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).state_dict()
    for name, tensor in student.model.state_dict().items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0)
    torch.testing.assert_close(
        hidden(student, sequence), reference_hidden(target, sequence, num_layers), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_it_saves_is_loaded_by_the_engine(tmp_path: Path, variant: str) -> None:
    target, num_layers = target_of(tmp_path, variant), VARIANTS[variant]
    student = Student(target, num_layers)
    student.save(tmp_path / "draft")
    decoder = load_decoder(ModelConfig(tmp_path / "draft", dtype="float32"), torch.device("cpu")).decoder
    assert decoder.spec.num_layers == num_layers
    (sequence,) = drawn_sequences([40])
    reloaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype=torch.float32)
    saved = reloaded.state_dict()
    for name, tensor in student.model.state_dict().items():
        torch.testing.assert_close(saved[name], tensor.bfloat16().float(), rtol=0, atol=0)
    assert (tmp_path / "draft" / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()
    # Nothing but rounding lies between what learnt and what is saved.
    ours, theirs = hidden(student, sequence), reference_hidden(tmp_path / "draft", sequence)
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=-1).min() > 0.97


@pytest.mark.parametrize("variant", ["llama", "granite", "gemma2"])
def test_logits_are_what_the_target_makes_of_the_same_states(tmp_path: Path, variant: str) -> None:
    target = target_of(tmp_path, variant)
    (sequence,) = drawn_sequences([20])
    rows = torch.tensor([3, 77, 500])
    student = Student(target, 1)
    ours = student.logits(reference_hidden(target, sequence), student.head_rows(rows))
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor([sequence])).logits[0][:, rows]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_padding_changes_nothing(tmp_path: Path) -> None:
    student = Student(target_of(tmp_path), 2)
    short, long = drawn_sequences([9, 30])
    token_ids = torch.zeros(2, 30, dtype=torch.int64)
    mask = torch.zeros(2, 30, dtype=torch.bool)
    for row, sequence in enumerate((short, long)):
        token_ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = True
    together = student.hidden(token_ids, mask)
    torch.testing.assert_close(together[0, :9], hidden(student, short), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(together[1], hidden(student, long), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_tied", [True, False])
def test_embedding_and_head_do_not_learn_and_count_once_where_they_are_one(
    tmp_path: Path, is_tied: bool
) -> None:
    student = Student(target_of(tmp_path, tie_word_embeddings=is_tied), 1)
    num_learning = sum(parameter.numel() for parameter in student.learning())
    assert student.num_parameters - num_learning == 512 * 64 * (1 if is_tied else 2)
    assert student.state().keys() == {
        name for name, _ in student.model.named_parameters() if "embed" not in name and "head" not in name
    }


def test_a_stored_head_that_differs_from_the_embedding_it_should_be_tied_to_counts(tmp_path: Path) -> None:
    target = target_of(tmp_path, tie_word_embeddings=True)
    weights = load_file(target / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] * 2
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    student = Student(target, 1)
    rows = student.head_rows(torch.arange(512))
    torch.testing.assert_close(rows, weights["lm_head.weight"])
    student.save(tmp_path / "draft")
    saved = load_file(tmp_path / "draft" / "model.safetensors")
    torch.testing.assert_close(saved["lm_head.weight"].float(), rows.bfloat16().float())


def test_it_goes_on_from_a_state(tmp_path: Path) -> None:
    target = target_of(tmp_path)
    first, second = Student(target, 1), Student(target, 1)
    with torch.no_grad():
        for parameter in first.learning():
            parameter.mul_(1.5)
    state = first.state()
    second.restore(state)
    (sequence,) = drawn_sequences([20])
    assert torch.equal(hidden(second, sequence), hidden(first, sequence))
    with torch.no_grad():
        first.learning()[0].zero_()
    assert any(bool(tensor.any()) for tensor in state.values()), "a state is a copy"
    assert torch.equal(second.learning()[0], next(iter(state.values())))


@pytest.mark.parametrize("num_layers", [3, 4])
def test_as_many_layers_as_the_target_has_are_refused(tmp_path: Path, num_layers: int) -> None:
    with pytest.raises(ConfigError, match=r"the target has 3 layers: .* would be no smaller; use 1"):
        Student(target_of(tmp_path), num_layers)


def test_a_target_of_one_layer_has_no_smaller_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="as any other"):
        Student(target_of(tmp_path, num_hidden_layers=1), 1)


def test_a_list_that_is_as_long_by_chance_is_not_cut(tmp_path: Path) -> None:
    target = target_of(tmp_path)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "eos_token_id": [0, 1, 2]}))
    Student(target, 1).save(tmp_path / "draft")
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["eos_token_id"] == [0, 1, 2]


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    target = target_of(tmp_path)
    weights = load_file(target / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"model\.layers\.0\.mlp\.up_proj\.weight"):
        Student(target, 1)


def test_where_it_can_not_be_saved_that_is_told(tmp_path: Path) -> None:
    (tmp_path / "draft").write_text("no folder")
    with pytest.raises(DraftingFailed, match=r"draft can't be written: .* go on with the same command"):
        Student(target_of(tmp_path), 1).save(tmp_path / "draft")


def test_it_says_nothing_of_the_layers_that_are_left_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = target_of(tmp_path)
    capfd.readouterr()
    Student(target, 1).save(tmp_path / "draft")
    assert capfd.readouterr() == ("", "")
