"""Every type of tensor that a GGUF file may hold: read to the bit as its own package reads it, or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headrace.engine.config import ModelConfig
from headrace.engine.errors import ModelLoadError
from headrace.engine.models.gguf import convert_gguf
from headrace.engine.models.loader import load_decoder
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import tiny_family, tiny_llama

# Blocks of 256 are the largest there are.
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "tie_word_embeddings": True}

PLAIN = ("F32", "F16", "BF16")
BLOCKS_OF_32 = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "NVFP4")
BLOCKS_OF_256 = (
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"),
)
REFUSED = ("Q8_1", "Q8_K", "Q1_0")
NAMES = {
    "token_embd": "model.embed_tokens",
    "blk.0.attn_q": "model.layers.0.self_attn.q_proj",
    "blk.0.attn_v": "model.layers.0.self_attn.v_proj",
    "blk.0.attn_output": "model.layers.0.self_attn.o_proj",
    "blk.0.ffn_up": "model.layers.0.mlp.up_proj",
    "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
}


def converted(tmp_path: Path, kind: str) -> Path:
    folder = tmp_path / "converted"
    folder.mkdir()
    # Qwen's: nothing is done to the rows of its matrices on the way.
    model = tiny_family("qwen2", **SIZES)
    convert_gguf(
        write_tiny_gguf(tmp_path / "tiny.gguf", model=model, kind=GGMLQuantizationType[kind]), folder
    )
    return folder


@pytest.mark.parametrize("kind", [*PLAIN, *BLOCKS_OF_32, *BLOCKS_OF_256])
def test_values_are_those_of_the_package_and_are_served(kind: str, tmp_path: Path) -> None:
    folder = converted(tmp_path, kind)
    ours = load_file(folder / "model.safetensors")
    stored = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "tiny.gguf").tensors}
    for name, target in NAMES.items():
        tensor = stored[f"{name}.weight"]
        assert tensor.tensor_type.name == kind
        expected = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        assert torch.equal(ours[f"{target}.weight"], expected), name
    load_decoder(ModelConfig(path=folder, dtype="float32"), torch.device("cpu"))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16", "Q4_K", "Q6_K"])
def test_values_equal_those_of_transformers_bit_for_bit(kind: str, tmp_path: Path) -> None:
    (tmp_path / "converted").mkdir()
    path = write_tiny_gguf(tmp_path / "tiny.gguf", model=tiny_llama(**SIZES), kind=GGMLQuantizationType[kind])
    convert_gguf(path, tmp_path / "converted")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], atol=0, rtol=0, msg=name)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_type_that_the_package_does_not_read_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=rf"is stored as {kind}, which .* does not read.*such as Q8_0"):
        converted(tmp_path, kind)


def test_every_type_is_in_one_of_the_lists() -> None:
    integers = {"I8", "I16", "I32", "I64", "F64"}
    listed = {*PLAIN, *BLOCKS_OF_32, *BLOCKS_OF_256, *REFUSED}
    assert {kind.name for kind in GGMLQuantizationType} == listed | integers


@pytest.mark.parametrize(("dtype", "kind"), [(np.int8, "I8"), (np.int32, "I32"), (np.float64, "F64")])
def test_whole_and_double_numbers_are_refused_by_name(dtype: type, kind: str, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", extra_tensors={"rope_freqs.weight": np.ones(8, dtype)})
    with pytest.raises(ModelLoadError, match=rf"rope_freqs.weight is stored as {kind}"):
        convert_gguf(path, tmp_path)
