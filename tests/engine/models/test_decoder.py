"""The decoder against transformers: same folder, same ids, logits equal at every position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from headrace.engine.config import ModelConfig
from headrace.engine.models import layers
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.loader import load_decoder
from tests.support.contiguous_attention import ContiguousAttention
from tests.support.model_files import edited_json
from tests.support.tiny_models import MAX_POSITIONS, VOCAB_SIZE, write_tiny_llama

CPU = torch.device("cpu")
TOLERANCE = 1e-4

ORIGINAL = 64
LLAMA3 = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
    "rope_theta": 10000.0,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL, "rope_theta": 10000.0}
ROPE_VARIANTS: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "yarn": {"rope_type": "yarn", **YARN},
    "yarn, attention factor": {"rope_type": "yarn", **YARN, "attention_factor": 1.7},
    "yarn, mscale": {"rope_type": "yarn", **YARN, "mscale": 1.3, "mscale_all_dim": 0.7},
    "yarn, betas, not truncated": {
        "rope_type": "yarn",
        **YARN,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
}


def random_ids(length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed))


def load(folder: Path, dtype: str = "float32") -> Decoder:
    return load_decoder(ModelConfig(path=folder, dtype=dtype), CPU).decoder


def logits_of(decoder: Decoder, ids: Tensor) -> Tensor:
    """Logits at every position, all tokens in one step."""
    positions = torch.arange(len(ids))
    return decoder.forward(ids, positions, ContiguousAttention(), positions)


@torch.inference_mode()
def reference_logits(folder: Path, ids: Tensor) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    logits: Tensor = model(ids[None]).logits[0]
    return logits


def assert_equals_reference(folder: Path, length: int = MAX_POSITIONS) -> None:
    ids = random_ids(length)
    torch.testing.assert_close(
        logits_of(load(folder), ids), reference_logits(folder, ids), atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize("variant", ROPE_VARIANTS)
def test_every_rope_variant_gives_the_reference_logits_up_to_the_last_position(
    variant: str, tmp_path: Path
) -> None:
    assert_equals_reference(write_tiny_llama(tmp_path, rope_parameters=ROPE_VARIANTS[variant]))


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("variant", ROPE_VARIANTS)
def test_the_older_spelling_of_rope_settings_means_the_same(variant: str, key: str, tmp_path: Path) -> None:
    settings = dict(ROPE_VARIANTS[variant])
    folder = write_tiny_llama(tmp_path, rope_parameters=settings)
    with edited_json(folder / "config.json") as config:
        config.pop("rope_parameters")
        config["rope_theta"] = settings.pop("rope_theta")
        config["rope_scaling"] = {key: settings.pop("rope_type"), **settings}
    assert_equals_reference(folder)


@pytest.mark.parametrize("rope_type", ["llama3", "yarn"])
def test_a_missing_original_length_is_read_as_the_reference_reads_it(rope_type: str, tmp_path: Path) -> None:
    settings: dict[str, object] = {"rope_type": rope_type, **(LLAMA3 if rope_type == "llama3" else YARN)}
    folder = write_tiny_llama(tmp_path, rope_parameters=settings)
    with edited_json(folder / "config.json") as config:
        del settings["original_max_position_embeddings"]
        config["rope_parameters"] = settings
    assert_equals_reference(folder)


@pytest.mark.parametrize(
    "overrides",
    [
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"head_dim": 24},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4},
        {"num_hidden_layers": 1},
        {"rms_norm_eps": 1e-2},
        {"hidden_act": "swish"},
        {"hidden_act": "gelu_new"},
        {"hidden_act": "gelu_fast", "head_dim": 8, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ],
    ids=str,
)
def test_every_shape_of_the_family_gives_the_reference_logits(
    overrides: dict[str, Any], tmp_path: Path
) -> None:
    assert_equals_reference(write_tiny_llama(tmp_path, **overrides), length=48)


@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_logits_do_not_depend_on_how_the_sequence_is_cut_into_steps(chunk: int, tmp_path: Path) -> None:
    decoder = load(write_tiny_llama(tmp_path))
    ids = random_ids(40)
    attention = ContiguousAttention()
    steps = [
        decoder.forward(ids[rows], rows, attention, torch.arange(len(rows)))
        for rows in torch.split(torch.arange(40), chunk)
    ]
    torch.testing.assert_close(torch.cat(steps), logits_of(decoder, ids), atol=TOLERANCE, rtol=0)


def test_only_the_wanted_rows_get_logits_in_the_wanted_order(tmp_path: Path) -> None:
    decoder = load(write_tiny_llama(tmp_path))
    ids = random_ids(20)
    rows = torch.tensor([19, 3, 3, 0])
    logits = decoder.forward(ids, torch.arange(20), ContiguousAttention(), rows)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, logits_of(decoder, ids)[rows], atol=TOLERANCE, rtol=0)


def test_a_step_that_wants_no_logits_still_writes_the_kv_of_every_layer(tmp_path: Path) -> None:
    decoder = load(write_tiny_llama(tmp_path))
    ids, positions, nothing = random_ids(20), torch.arange(20), torch.empty(0, dtype=torch.int64)
    attention = ContiguousAttention()
    assert decoder.forward(ids[:12], positions[:12], attention, nothing).shape == (0, VOCAB_SIZE)
    rest = decoder.forward(ids[12:], positions[12:], attention, torch.arange(8))
    torch.testing.assert_close(rest, logits_of(decoder, ids)[12:], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_bfloat16_stays_close_to_the_fp32_reference(tied: bool, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path, tie_word_embeddings=tied)
    ids = random_ids(64)
    ours, exact = logits_of(load(folder, "bfloat16"), ids), reference_logits(folder, ids)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    with torch.inference_mode():
        their_error = (theirs(ids[None]).logits[0].float() - exact).square().mean().sqrt()
    assert (ours - exact).square().mean().sqrt() < 1.5 * their_error


def test_plain_linears_give_the_reference_logits_where_none_can_be_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "can_prepack", lambda _: False)
    assert_equals_reference(write_tiny_llama(tmp_path, attention_bias=True, mlp_bias=True), length=48)


def test_positions_decide_and_not_places_in_the_step(tmp_path: Path) -> None:
    decoder = load(write_tiny_llama(tmp_path))
    ids = random_ids(16)
    # Rotary positions are relative: the same distance apart, the same logits.
    shifted = decoder.forward(ids, torch.arange(100, 116), ContiguousAttention(), torch.arange(16))
    torch.testing.assert_close(shifted, logits_of(decoder, ids), atol=1e-3, rtol=0)
    stretched = decoder.forward(ids, torch.arange(0, 48, 3), ContiguousAttention(), torch.arange(16))
    assert (stretched - shifted).abs().max() > 0.1
