"""Loading a folder: head, types, lengths, end ids; logits of what loads are compared in test_decoder.py."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from headrace.engine.config import ModelConfig, SamplingDefaults
from headrace.engine.errors import ConfigError, ModelLoadError
from headrace.engine.models import loader
from headrace.engine.models.loader import LoadedDecoder, choose_dtype, load_decoder, suits_kept
from headrace.engine.models.spec import DecoderSpec
from headrace.engine.native.quantised import WeightKind, quantise
from tests.support.contiguous_attention import ContiguousAttention
from tests.support.model_files import edited_json, edited_tensors
from tests.support.tiny_models import (
    IM_END_ID,
    MAX_POSITIONS,
    VOCAB_SIZE,
    write_tiny_family,
    write_tiny_llama,
)

CPU = torch.device("cpu")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load(folder: Path, *, tokenizer_eos_token_ids: tuple[int, ...] = (), **settings: Any) -> LoadedDecoder:
    config = ModelConfig(path=folder, **{"dtype": "float32", **settings})
    return load_decoder(config, CPU, tokenizer_eos_token_ids=lambda: tokenizer_eos_token_ids)


def logits_of(folder: Path) -> Tensor:
    ids = torch.arange(10, 40)
    positions = torch.arange(len(ids))
    return load(folder).decoder.forward(ids, positions, ContiguousAttention(), positions)


@torch.inference_mode()
def reference_logits(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model(torch.arange(10, 40)[None]).logits[0]


# ---- the head --------------------------------------------------------------------------------------


def test_a_tied_head_that_is_stored_all_the_same_changes_nothing(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path, tie_word_embeddings=True)
    expected = logits_of(folder)
    with edited_tensors(folder / "model.safetensors") as tensors:
        tensors[HEAD] = tensors[EMBEDDING].clone()
    torch.testing.assert_close(logits_of(folder), expected)


def test_a_tied_head_that_differs_is_used_as_the_reference_uses_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tiny_llama(tmp_path, tie_word_embeddings=True)
    with edited_tensors(folder / "model.safetensors") as tensors:
        tensors[HEAD] = tensors[EMBEDDING].flip(0).contiguous()
    with caplog.at_level(logging.WARNING, logger="headrace"):
        ours = logits_of(folder)
    torch.testing.assert_close(ours, reference_logits(folder), atol=1e-4, rtol=0)
    assert HEAD in caplog.text


def test_an_untied_model_without_a_head_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    with edited_tensors(folder / "model.safetensors") as tensors:
        del tensors[HEAD]
    with pytest.raises(ModelLoadError, match=f"missing: {HEAD}"):
        load(folder)


@pytest.mark.parametrize(("tied", "num_heads"), [(True, 0), (False, 1)])
def test_shared_weights_are_counted_once(tied: bool, num_heads: int, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert load(folder).info.num_parameters == expected


# ---- values and types ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name(value: float, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    with edited_tensors(folder / "model.safetensors") as tensors:
        tensors[name][3, 7] = value
    with pytest.raises(
        ModelLoadError, match=f"{name} in .*model.safetensors holds a value that is not finite"
    ):
        load(folder)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_the_type_of_the_files_does_not_bind(stored: torch.dtype, wanted: str, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    with edited_tensors(folder / "model.safetensors") as tensors:
        tensors.update({name: tensor.to(stored) for name, tensor in tensors.items()})
    loaded = load(folder, dtype=wanted)
    assert loaded.info.dtype == wanted
    assert str(loaded.decoder.dtype) == f"torch.{wanted}"


@pytest.mark.parametrize(
    ("abilities", "expected"),
    [
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
        ({"avx512_bf16": False, "amx_bf16": False}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_auto_takes_bfloat16_only_where_the_processor_multiplies_it(
    abilities: dict[str, bool],
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: abilities)
    with caplog.at_level(logging.INFO, logger="headrace"):
        assert choose_dtype("auto", CPU) == expected
    assert f"dtype auto: {expected}" in caplog.text


def test_weights_stored_in_bfloat16_stay_so_and_nothing_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_llama(tmp_path)
    with edited_tensors(folder / "model.safetensors") as tensors:
        for name, tensor in tensors.items():
            # As some files do, the gains in another type.
            tensors[name] = tensor.bfloat16().to(torch.float32 if "norm" in name else torch.bfloat16)
    with caplog.at_level(logging.INFO, logger="headrace"):
        ours = logits_of(folder)
    if not suits_kept(torch.float32, CPU):
        pytest.skip("the kernels are not built, or multiply bfloat16 themselves")
    assert "stay so" in caplog.text
    monkeypatch.setattr(loader, "suits_kept", lambda dtype, device: False)
    assert torch.equal(ours, logits_of(folder))


@pytest.mark.parametrize(
    ("kinds", "told"),
    [
        # Of the layers, and of embedding and head.
        ((WeightKind.INT4, WeightKind.INT8), "whole numbers of 4 bits, or of 8"),
        ((WeightKind.INT8, WeightKind.INT8), "whole numbers of 8 bits with"),
        ((WeightKind.INT4, None), "whole numbers of 4 bits, or of 8"),
    ],
)
def test_weights_that_were_whole_numbers_stay_so_and_nothing_changes(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    kinds: tuple[WeightKind, WeightKind | None],
    told: str,
) -> None:
    folder = write_tiny_llama(tmp_path, hidden_size=64, intermediate_size=96)
    with edited_tensors(folder / "model.safetensors") as tensors:
        for name, tensor in tensors.items():
            kind = kinds[name in (HEAD, EMBEDDING)]
            if tensor.ndim > 1 and kind is not None:
                tensors[name] = quantise(tensor, kind).restored()
    with caplog.at_level(logging.INFO, logger="headrace"):
        ours = logits_of(folder)
    if not suits_kept(torch.float32, CPU):
        pytest.skip("the kernels are not built, or keep no weights in fewer bits on this processor")
    assert told in caplog.text
    monkeypatch.setattr(loader, "suits_kept", lambda dtype, device: False)
    assert torch.equal(ours, logits_of(folder))


def test_weights_stored_in_another_type_are_not_rounded_to_bfloat16(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tiny_llama(tmp_path)
    with edited_tensors(folder / "model.safetensors") as tensors:
        for name, tensor in tensors.items():
            tensors[name] = tensor if name == HEAD else tensor.bfloat16()
    with caplog.at_level(logging.INFO, logger="headrace"):
        ours = logits_of(folder)
    assert "stay so" not in caplog.text
    torch.testing.assert_close(ours, reference_logits(folder), atol=1e-4, rtol=0)


def test_half_precision_is_refused_on_a_cpu_with_what_to_use() -> None:
    with pytest.raises(ConfigError, match="bfloat16, float32 or auto"):
        choose_dtype("float16", CPU)


def test_progress_reaches_the_total_and_never_goes_back(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    load_decoder(
        ModelConfig(path=write_tiny_llama(tmp_path), dtype="float32"),
        CPU,
        lambda stage, done, total: told.append((stage, done, total)),
    )
    counts = [done for _, done, _ in told]
    assert counts == sorted(counts)
    assert counts[-1] == told[-1][2] == load(tmp_path).info.num_parameters * 4
    assert {stage for stage, _, _ in told} == {"reading weights"}


# ---- length ----------------------------------------------------------------------------------------


def test_the_models_own_length_is_the_default(tmp_path: Path) -> None:
    assert load(write_tiny_llama(tmp_path)).info.max_model_len == MAX_POSITIONS


def test_a_shorter_length_can_be_asked_for(tmp_path: Path) -> None:
    assert load(write_tiny_llama(tmp_path), max_model_len=32).info.max_model_len == 32


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "default"}, MAX_POSITIONS),
        ({"rope_type": "dynamic", "factor": 2.0}, MAX_POSITIONS),
        ({"rope_type": "linear", "factor": 2.0}, 2 * MAX_POSITIONS),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, MAX_POSITIONS),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, 400),
    ],
)
def test_a_length_beyond_the_model_is_refused_with_the_greatest(
    rope: dict[str, object], longest: int, tmp_path: Path
) -> None:
    folder = write_tiny_llama(tmp_path, rope_parameters={"rope_theta": 10000.0, **rope})
    assert load(folder, max_model_len=longest).info.max_model_len == longest
    with pytest.raises(ConfigError, match=f"use {longest} or less"):
        load(folder, max_model_len=longest + 1)


def test_a_model_whose_rotation_switches_is_served_as_far_as_it_does_not_unless_more_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tiny_family(tmp_path, "phi3, longrope")
    assert load(folder).info.max_model_len == 200
    assert "max_model_len up to 800" in caplog.text
    assert load(folder, max_model_len=800).info.max_model_len == 800
    with pytest.raises(ConfigError, match="use 800 or less"):
        load(folder, max_model_len=801)


# ---- end ids, name ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "expected"),
    [
        (5, None, (), {5}),
        ([5, 6], None, (), {5, 6}),
        (None, 7, (), {7}),
        (None, None, (8,), {8}),
        ([5, 6], [6, 7], (8,), {5, 6, 7, 8}),
        (None, None, (), set()),
        ([5, -1], None, (VOCAB_SIZE + 3,), {5}),
    ],
)
def test_end_ids_are_the_union_of_all_that_declare_some(
    config: object, generation: object, tokenizer: tuple[int, ...], expected: set[int], tmp_path: Path
) -> None:
    folder = write_tiny_llama(tmp_path)
    with edited_json(folder / "config.json") as fields:
        fields["eos_token_id"] = config
    with edited_json(folder / "generation_config.json") as fields:
        fields["eos_token_id"] = generation
    assert load(folder, tokenizer_eos_token_ids=tokenizer).info.eos_token_ids == expected


def test_a_folder_without_generation_config_loads(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    (folder / "generation_config.json").unlink()
    assert load(folder).info.eos_token_ids == {IM_END_ID}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, SamplingDefaults()),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, SamplingDefaults(0.6, 20, 0.95)),
        ({"min_p": 0.1, "repetition_penalty": 1.05}, SamplingDefaults(min_p=0.1, repetition_penalty=1.05)),
        ({"do_sample": True, "temperature": 0.7}, SamplingDefaults(temperature=0.7)),
        ({"do_sample": False, "temperature": 0.1, "top_k": 1}, SamplingDefaults(0.0, 1)),
        ({"do_sample": False}, SamplingDefaults(temperature=0.0)),
        ({"temperature": None, "top_k": None}, SamplingDefaults()),
        ({"top_k": -1, "top_p": 0.9}, SamplingDefaults(top_p=0.9)),
    ],
)
def test_what_the_folder_suggests_for_sampling_is_told_as_it_is_written(
    fields: dict[str, object],
    expected: SamplingDefaults,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = write_tiny_llama(tmp_path)
    with edited_json(folder / "generation_config.json") as file:
        file.update(fields)
    with caplog.at_level(logging.INFO, logger="headrace"):
        assert load(folder).info.sampling_defaults == expected
    neutral = asdict(SamplingDefaults())
    suggested = [f"{name} {value:g}" for name, value in asdict(expected).items() if value != neutral[name]]
    assert ("suggests " in caplog.text) == bool(suggested)
    assert ", ".join(suggested) in caplog.text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": -1}, "temperature is -1.0, which no request could ask for"),
        ({"temperature": "warm"}, "temperature is 'warm'"),
        ({"top_p": 0}, "top_p is 0.0"),
        ({"top_k": -2}, "top_k is -2"),
        ({"min_p": 2}, "min_p is 2.0"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0.0"),
        ({"do_sample": "no"}, "do_sample is 'no'"),
    ],
)
def test_a_suggestion_that_no_request_could_make_is_refused(
    fields: dict[str, object], words: str, tmp_path: Path
) -> None:
    folder = write_tiny_llama(tmp_path)
    with edited_json(folder / "generation_config.json") as file:
        file.update(fields)
    with pytest.raises(ModelLoadError) as caught:
        load(folder)
    assert words in str(caught.value)
    assert "generation_config.json" in str(caught.value)


def test_a_malformed_end_id_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    with edited_json(folder / "generation_config.json") as fields:
        fields["eos_token_id"] = "two"
    with pytest.raises(ModelLoadError, match=r"generation_config.json: eos_token_id is 'two'"):
        load(folder)


def test_the_name_is_the_configured_one_or_the_folders(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tiny-wheel")
    assert load(folder).info.name == "tiny-wheel"
    assert load(folder, name="mill").info.name == "mill"


@pytest.mark.parametrize(
    ("file", "field"),
    [
        ("config.json", "bos_token_id"),
        ("config.json", "eos_token_id"),
        ("generation_config.json", "eos_token_id"),
    ],
)
def test_a_special_id_beyond_the_vocabulary_is_refused_by_name(file: str, field: str, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    with edited_json(folder / file) as fields:
        fields[field] = VOCAB_SIZE
    with pytest.raises(ModelLoadError, match=f"{file}: {field} is {VOCAB_SIZE}: it must be below vocab_size"):
        load(folder)


def test_a_spec_that_fails_in_an_unforeseen_way_is_the_files_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(config: object) -> DecoderSpec:
        raise OverflowError("int too large")

    folder = write_tiny_llama(tmp_path)
    monkeypatch.setattr(loader, "spec_of", failing)
    with pytest.raises(ModelLoadError, match=r"config.json: it can't be served: int too large"):
        load(folder)
