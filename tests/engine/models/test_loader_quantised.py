"""Models of eight or four bits: near the whole model, and the same whoever shares the step."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from headrace.engine.batch import build_batch
from headrace.engine.config import CacheLayout, ModelConfig
from headrace.engine.errors import ConfigError
from headrace.engine.kv.storage import KVStorage
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.loader import choose_weight_kind, load_decoder
from headrace.engine.native.backend import NativeCpuBackend
from headrace.engine.native.kit import native_kit
from headrace.engine.native.library import NativeLibrary, load_default
from headrace.engine.native.linear import NativeLinears
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.scheduling.plan import ScheduledSequence, StepPlan
from headrace.engine.sequence import SequenceId
from tests.support.tiny_models import write_tiny_family

CPU = torch.device("cpu")
LENGTHS = (5, 1, 40, 17)
BLOCKS_PER_ROW = 4


def load(folder: Path, weight_dtype: str) -> Decoder:
    kit = native_kit()
    if weight_dtype != "same" and (kit is None or not kit.linears.suits_quantised()):
        pytest.skip("quantised weights need compiled kernels and a processor with AVX2")
    return load_decoder(ModelConfig(folder, dtype="float32", weight_dtype=weight_dtype), CPU).decoder


def logits_of(decoder: Decoder, rows: tuple[int, ...]) -> torch.Tensor:
    """Of every token of some of the prompts, all in one step."""
    spec = decoder.spec
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(0, spec.vocab_size, (length,), generator=generator).tolist() for length in LENGTHS
    ]
    storage = KVStorage(
        CacheLayout(1 + BLOCKS_PER_ROW * len(LENGTHS), 16),
        decoder.kv_shape,
        CPU,
    )
    plan = StepPlan(
        0,
        tuple(
            ScheduledSequence(
                sequence_id=SequenceId(row),
                first_position=0,
                token_ids=tuple(prompts[row]),
                num_draft_tokens=0,
                block_ids=tuple(range(1 + BLOCKS_PER_ROW * row, 1 + BLOCKS_PER_ROW * (row + 1))),
                is_sampled=True,
                sampling=SamplingParams(temperature=0.0),
            )
            for row in rows
        ),
    )
    batch = build_batch(plan, 16)
    step = NativeCpuBackend(storage, load_default()).begin_step(batch.attention)
    return decoder.forward(batch.input_ids, batch.positions, step, torch.arange(plan.num_tokens))


@pytest.mark.parametrize(("weight_dtype", "allowed"), [("int8", 0.1), ("int4", 0.6)])
@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3", "olmo2", "mixtral"])
def test_logits_are_near_those_of_the_whole_weights(
    family: str, weight_dtype: str, allowed: float, tmp_path: Path
) -> None:
    folder, everyone = write_tiny_family(tmp_path, family), tuple(range(len(LENGTHS)))
    narrow = logits_of(load(folder, weight_dtype), everyone)
    whole = logits_of(load(folder, "same"), everyone)
    distance = float((narrow - whole).norm() / whole.norm())
    assert 0 < distance < allowed


@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
def test_who_shares_the_step_changes_no_bit(weight_dtype: str, tmp_path: Path) -> None:
    decoder = load(write_tiny_family(tmp_path, "llama"), weight_dtype)
    together = logits_of(decoder, tuple(range(len(LENGTHS)))).split(LENGTHS)
    for row, expected in enumerate(together):
        assert torch.equal(logits_of(decoder, (row,)), expected)


def test_without_the_kernels_the_refusal_says_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.models.loader.native_kit", lambda: None)
    with pytest.raises(ConfigError, match=r"headrace\.engine\.native\.build, or use weight dtype same"):
        choose_weight_kind("int8", CPU)
    choose_weight_kind("same", CPU)


def test_without_fast_whole_numbers_the_refusal_says_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = native_kit()
    if kit is None:
        pytest.skip("there are no compiled kernels to look at")
    plain = NativeLibrary(kit.library.path, "generic")
    slow = dataclasses.replace(kit, library=plain, linears=NativeLinears(plain))
    monkeypatch.setattr("headrace.engine.models.loader.native_kit", lambda: slow)
    with pytest.raises(
        ConfigError, match="int4 needs an x86 processor with AVX2, FMA and F16C: use weight dtype same"
    ):
        choose_weight_kind("int4", CPU)


def test_on_a_gpu_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="on cuda use weight dtype same"):
        choose_weight_kind("int4", torch.device("cuda"))
