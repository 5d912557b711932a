"""Converted GGUF files against the weights they were made of and against transformers' own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM

from headrace.engine.config import ModelConfig
from headrace.engine.errors import ModelLoadError
from headrace.engine.models import gguf
from headrace.engine.models.gguf import convert_gguf
from headrace.engine.models.loader import load_decoder
from headrace.engine.models.tokenizer import load_tokenizer
from tests.support.paged_step import logits_of
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import IM_END_ID, IM_START_ID, tiny_family, tiny_llama


def converted(tmp_path: Path, **settings: Any) -> Path:
    folder = tmp_path / "converted"
    folder.mkdir()
    convert_gguf(write_tiny_gguf(tmp_path / "tiny.gguf", **settings), folder)
    return folder


def assert_same_weights(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], atol=0, rtol=0, msg=name)


@pytest.mark.parametrize("tied", [True, False])
def test_an_unquantized_file_gives_back_the_very_weights(tied: bool, tmp_path: Path) -> None:
    model = tiny_llama(tie_word_embeddings=tied)
    folder = converted(tmp_path, model=model)
    assert_same_weights(AutoModelForCausalLM.from_pretrained(folder), model)


# What llama.cpp knows of an architecture without the file saying it, and tells nobody who reads the file.
FAMILIES: dict[str, tuple[str, dict[str, Any], float | None]] = {
    "qwen2": ("qwen2", {}, None),
    "qwen3": ("qwen3", {}, None),
    "qwen3moe": ("qwen3-moe", {"mlp_only_layers": [], "norm_topk_prob": True}, None),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 24, "tie_word_embeddings": True}, None),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 24, "tie_word_embeddings": True}, 4.0),
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_converted_file_of_another_family_gives_the_logits_of_what_it_was_made_of(
    architecture: str, tmp_path: Path
) -> None:
    variant, overrides, linear_rope_factor = FAMILIES[architecture]
    model = tiny_family(variant, **overrides)
    folder = converted(tmp_path, model=model, linear_rope_factor=linear_rope_factor)
    decoder = load_decoder(ModelConfig(path=folder, dtype="float32"), torch.device("cpu")).decoder
    ids = torch.randint(0, 500, (100,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model(ids[None]).logits[0]
    torch.testing.assert_close(logits_of(decoder, ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma2", "gemma3"])
def test_another_familys_weights_equal_those_that_transformers_reads(
    architecture: str, kind: str, tmp_path: Path
) -> None:
    variant, overrides, linear_rope_factor = FAMILIES[architecture]
    if architecture == "qwen3":
        # transformers reads no head width for this one and takes its default.
        overrides = {**overrides, "head_dim": 128}
    model = tiny_family(variant, **overrides)
    folder = converted(
        tmp_path, model=model, kind=GGMLQuantizationType[kind], linear_rope_factor=linear_rope_factor
    )
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    assert_same_weights(AutoModelForCausalLM.from_pretrained(folder), reference)


def test_biases_are_kept_in_order(tmp_path: Path) -> None:
    model = tiny_llama(attention_bias=True, mlp_bias=True)
    folder = converted(tmp_path, model=model)
    assert_same_weights(AutoModelForCausalLM.from_pretrained(folder), model)


def test_the_configuration_is_the_one_the_file_was_made_of(tmp_path: Path) -> None:
    model = tiny_llama(rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 100_000.0})
    config = AutoModelForCausalLM.from_pretrained(converted(tmp_path, model=model)).config
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        assert getattr(config, key) == getattr(model.config, key)
    for key in ("num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(config, key) == getattr(model.config, key)
    # Not 9.999999747378752e-06, which is what 32 bits make of it.
    assert config.rms_norm_eps == 1e-5
    assert config.rope_parameters["rope_theta"] == 100_000.0


def test_linear_rope_scaling_is_carried_over(tmp_path: Path) -> None:
    config = AutoModelForCausalLM.from_pretrained(converted(tmp_path, linear_rope_factor=4.0)).config
    assert (config.rope_parameters["rope_type"], config.rope_parameters["factor"]) == ("linear", 4.0)


def test_a_converted_file_is_served_with_its_end_ids(tmp_path: Path) -> None:
    folder = converted(tmp_path, extra_numbers={"tokenizer.ggml.eot_token_id": 7})
    tokenizer_ids = load_tokenizer(folder).eos_token_ids
    info = load_decoder(
        ModelConfig(path=folder, dtype="float32"),
        torch.device("cpu"),
        tokenizer_eos_token_ids=lambda: tokenizer_ids,
    ).info
    assert info.eos_token_ids == {IM_END_ID, 7}
    assert info.bos_token_id == IM_START_ID


def test_large_files_are_cut_into_shards_that_load_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "MAX_SHARD_BYTES", 200_000)
    model = tiny_llama()
    folder = converted(tmp_path, model=model)
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert_same_weights(AutoModelForCausalLM.from_pretrained(folder), model)
    load_decoder(ModelConfig(path=folder), torch.device("cpu"))


def test_progress_counts_every_weight(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    folder = tmp_path / "out"
    folder.mkdir()
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    convert_gguf(path, folder, lambda stage, done, total: told.append((stage, done, total)))
    assert told[-1][1] == told[-1][2] == 4 * tiny_llama(tie_word_embeddings=True).num_parameters()


# ---- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"extra_numbers": {"llama.expert_count": 8}}, "llama.expert_count"),
        ({"extra_numbers": {"llama.attention.sliding_window": 64}}, "llama.attention.sliding_window"),
        (
            {"extra_numbers": {"llama.attention.value_length": 32}},
            "value_length differs from the head width",
        ),
        (
            {"extra_tensors": {"rope_factors_long.weight": np.ones(8, np.float32)}},
            "needs the tensors rope_factors_short.weight and rope_factors_long.weight",
        ),
        (
            {"extra_tensors": {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}},
            "blk.0.attn_q_norm.weight",
        ),
    ],
)
def test_what_would_be_left_out_is_refused_by_name(
    settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        converted(tmp_path, **settings)
    assert words in str(caught.value)
    assert "tiny.gguf" in str(caught.value)


def test_an_absent_feature_that_is_declared_as_zero_is_harmless(tmp_path: Path) -> None:
    assert converted(tmp_path, extra_numbers={"llama.expert_count": 0}).is_dir()


def test_a_file_that_is_no_gguf_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "noise.gguf"
    path.write_bytes(b"not a model at all")
    with pytest.raises(ModelLoadError, match=r"noise.gguf is no GGUF file"):
        convert_gguf(path, tmp_path)


@pytest.mark.parametrize("share", [0.02, 0.5, 0.99])
def test_a_truncated_file_is_refused_by_name(share: float, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    folder = tmp_path / "out"
    folder.mkdir()
    with pytest.raises(ModelLoadError, match=r"tiny.gguf"):
        convert_gguf(path, folder)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"nowhere.gguf is missing"):
        convert_gguf(tmp_path / "nowhere.gguf", tmp_path)
