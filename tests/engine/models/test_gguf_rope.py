"""Rotary positions out of GGUF files: logits of the model that the file was made of, in every place."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from headrace.engine.config import ModelConfig
from headrace.engine.errors import ModelLoadError
from headrace.engine.models.gguf import convert_gguf
from headrace.engine.models.loader import LoadedDecoder, load_decoder
from tests.support.paged_step import logits_of
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import MAX_POSITIONS, VOCAB_SIZE, tiny_family, tiny_llama

THETA, HEAD_DIM, ORIGINAL = 10_000.0, 16, 64
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": THETA,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": THETA,
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}


def loaded(tmp_path: Path, model: PreTrainedModel, **settings: Any) -> LoadedDecoder:
    folder = tmp_path / "converted"
    folder.mkdir()
    max_model_len = settings.pop("max_model_len", None)
    convert_gguf(write_tiny_gguf(tmp_path / "tiny.gguf", model=model, **settings), folder)
    config = ModelConfig(path=folder, dtype="float32", max_model_len=max_model_len)
    return load_decoder(config, torch.device("cpu"))


def assert_same_logits(loaded: LoadedDecoder, model: PreTrainedModel, length: int = MAX_POSITIONS) -> None:
    ids = torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model(ids[None]).logits[0]
    torch.testing.assert_close(logits_of(loaded.decoder, ids), expected, atol=1e-4, rtol=0)


def llama3_factors() -> NDArray[np.float32]:
    """What llama.cpp's converter writes for `LLAMA3`, one number for each pair of coordinates."""
    factors = []
    for pair in range(HEAD_DIM // 2):
        wavelength = 2 * math.pi * THETA ** (2 * pair / HEAD_DIM)
        if wavelength < ORIGINAL / 4.0:
            factors.append(1.0)
        elif wavelength > ORIGINAL / 1.0:
            factors.append(8.0)
        else:
            smooth = (ORIGINAL / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / 8.0 + smooth))
    return np.array(factors, dtype=np.float32)


def test_llama_3s_factors_give_the_logits_of_its_scaling(tmp_path: Path) -> None:
    model = tiny_llama(rope_parameters=LLAMA3)
    factors = llama3_factors()
    assert len({*factors.tolist()}) > 3
    found = loaded(tmp_path, model, extra_tensors={"rope_freqs.weight": factors})
    assert found.info.max_model_len == MAX_POSITIONS
    assert_same_logits(found, model)


def test_factors_and_linear_scaling_are_both_heeded(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 6.0, "rope_theta": THETA}
    model = tiny_llama(rope_parameters=scaling)
    factors = np.full(HEAD_DIM // 2, 3.0, dtype=np.float32)
    found = loaded(tmp_path, model, extra_tensors={"rope_freqs.weight": factors}, linear_rope_factor=2.0)
    assert_same_logits(found, model)


@pytest.mark.parametrize(
    ("scaling", "metadata"),
    [
        ({}, {}),
        ({"beta_fast": 16.0, "beta_slow": 2.0}, {"yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}),
        ({"attention_factor": 1.5 * (0.1 * math.log(4.0) + 1)}, {"attn_factor": 1.5}),
        ({}, {"yarn_ext_factor": 1.0, "attn_factor": 1.0, "finetuned": 1}),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_yarn_gives_the_logits_of_the_model_that_the_file_was_made_of(
    family: str, scaling: dict[str, float], metadata: dict[str, float], tmp_path: Path
) -> None:
    model = tiny_family(family, rope_parameters={**YARN, **scaling})
    prefix = f"{family}.rope.scaling."
    numbers = {
        f"{prefix}type": "yarn",
        f"{prefix}factor": 4.0,
        f"{prefix}original_context_length": ORIGINAL,
        **{prefix + key: value for key, value in metadata.items()},
    }
    assert_same_logits(loaded(tmp_path, model, extra_numbers=numbers), model)


@pytest.mark.parametrize("variant", ["phi3", "phi3, longrope"])
@pytest.mark.parametrize("is_long", [False, True])
def test_phi_3_gives_the_logits_of_the_model_that_the_file_was_made_of(
    variant: str, is_long: bool, tmp_path: Path
) -> None:
    model = tiny_family(variant)
    rope = model.config.rope_parameters
    settings: dict[str, Any] = {}
    if variant != "phi3":
        attention_factor = math.sqrt(1 + math.log(800 / 200) / math.log(200))
        settings = {
            "extra_numbers": {
                "phi3.rope.scaling.original_context_length": 200,
                "phi3.rope.scaling.attn_factor": attention_factor,
            },
            "extra_tensors": {
                "rope_factors_short.weight": np.array(rope["short_factor"], dtype=np.float32),
                "rope_factors_long.weight": np.array(rope["long_factor"], dtype=np.float32),
            },
        }
    longest = model.config.max_position_embeddings
    found = loaded(tmp_path, model, max_model_len=longest if is_long else None, **settings)
    assert_same_logits(found, model, longest if is_long else 200)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"type": "longrope"}, "needs the tensors rope_factors_short.weight and rope_factors_long.weight"),
        (
            {"type": "squeezed"},
            "'squeezed' can't be converted exactly; supported: none, linear, yarn, longrope",
        ),
        ({"type": "yarn"}, "llama.rope.scaling.factor is missing"),
        ({"type": "yarn", "factor": 4.0, "yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5"),
        ({"attn_factor": 1.2}, "attn_factor is 1.2"),
        (
            {"type": "yarn", "factor": 4.0, "yarn_log_multiplier": 0.1},
            "yarn_log_multiplier can't be converted",
        ),
    ],
)
def test_what_would_turn_otherwise_is_refused(
    numbers: dict[str, float | str], words: str, tmp_path: Path
) -> None:
    named = {f"llama.rope.scaling.{key}": value for key, value in numbers.items()}
    with pytest.raises(ModelLoadError) as caught:
        loaded(tmp_path, tiny_llama(), extra_numbers=named)
    assert words in str(caught.value)


def test_factors_of_the_wrong_number_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="has 3 entries: it needs 8"):
        loaded(tmp_path, tiny_llama(), extra_tensors={"rope_freqs.weight": np.ones(3, np.float32)})
