"""Layers in one call against the same layers one by one: not a bit differs; what can't be in is left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.engine.attention.backend import AttentionMetadata, AttentionSpec, AttentionStep
from headrace.engine.batch import build_batch
from headrace.engine.config import CacheLayout, ModelConfig
from headrace.engine.kv.storage import KVShape, KVStorage
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.loader import load_decoder
from headrace.engine.native.backend import NativeCpuBackend, NativeCpuStep
from headrace.engine.native.kit import native_kit
from headrace.engine.native.library import NativeLibrary
from headrace.engine.native.linear import NativeLinear, NativeLinears
from headrace.engine.native.quantised import QuantisedWeight, WeightKind, quantise
from headrace.engine.native.stack import HeadShape, NativeStack, PlainLayer
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.scheduling.plan import ScheduledSequence, StepPlan
from headrace.engine.sequence import SequenceId
from tests.support.tiny_models import write_tiny_family

CPU = torch.device("cpu")
LENGTHS = (1, 70, 33)
BLOCKS_PER_ROW = 10


class OtherStep:
    """The same attention, behind a type that no stack knows: the decoder goes layer by layer."""

    def __init__(self, inner: AttentionStep) -> None:
        self._inner = inner

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._inner.write_kv(layer, key, value)

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        return self._inner.attend(layer, query, spec)


class CountingStep(NativeCpuStep):
    """Counts the layers that the decoder goes through itself."""

    num_layers_seen = 0

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        self.num_layers_seen += 1
        return super().attend(layer, query, spec)


def load(folder: Path, dtype: str, library: NativeLibrary, weight_dtype: str = "same") -> Decoder:
    """A decoder over the library's layers; skips the test where the processor has none for the type."""
    kit = native_kit()
    assert kit is not None
    assert kit.library.path == library.path
    if weight_dtype != "same" and not kit.linears.suits_quantised():
        pytest.skip("this processor does not multiply whole numbers fast enough for quantised weights")
    decoder = load_decoder(ModelConfig(folder, dtype=dtype, weight_dtype=weight_dtype), CPU).decoder
    if not kit.linears.suits(torch.zeros(2, 2, dtype=decoder.dtype)):
        pytest.skip(f"linear layers in {dtype} are another library's on this processor")
    return decoder


def storage_of(decoder: Decoder) -> KVStorage:
    return KVStorage(CacheLayout(1 + BLOCKS_PER_ROW * len(LENGTHS), 16), decoder.kv_shape, CPU)


def plan_of(vocab_size: int, *, first: int) -> StepPlan:
    generator = torch.Generator().manual_seed(first)
    return StepPlan(
        0,
        tuple(
            ScheduledSequence(
                sequence_id=SequenceId(row),
                first_position=first,
                token_ids=tuple(torch.randint(0, vocab_size, (length,), generator=generator).tolist()),
                num_draft_tokens=0,
                block_ids=tuple(1 + BLOCKS_PER_ROW * row + i for i in range(BLOCKS_PER_ROW)),
                is_sampled=True,
                sampling=SamplingParams(temperature=0.0),
            )
            for row, length in enumerate(LENGTHS)
        ),
    )


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [("float32", "same"), ("bfloat16", "same"), ("float32", "int8"), ("bfloat16", "int4")],
)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "smollm3", "phi3"])
def test_layers_in_one_call_give_the_same_bits(
    library: NativeLibrary, family: str, dtype: str, weight_dtype: str, tmp_path: Path
) -> None:
    decoder = load(write_tiny_family(tmp_path, family, num_hidden_layers=4), dtype, library, weight_dtype)
    logits, caches = [], []
    for is_stacked in (True, False):
        storage = storage_of(decoder)
        backend = NativeCpuBackend(storage, library)
        for first in (0, max(LENGTHS)):
            batch = build_batch(plan_of(decoder.spec.vocab_size, first=first), 16)
            step: AttentionStep = backend.begin_step(batch.attention)
            step = step if is_stacked else OtherStep(step)
            logits.append(decoder.forward(batch.input_ids, batch.positions, step, batch.logits_rows))
        caches.append((storage.key, storage.value))
    assert torch.equal(logits[0], logits[2])
    assert torch.equal(logits[1], logits[3])
    assert torch.equal(caches[0][0], caches[1][0])
    assert torch.equal(caches[0][1], caches[1][1])
    assert bool(logits[0].isfinite().all())


@pytest.mark.parametrize(
    ("family", "num_seen"), [("llama", 0), ("smollm3", 0), ("qwen3", 4), ("gemma2", 4), ("mixtral", 4)]
)
def test_plain_layers_are_stacked_and_others_are_not(
    library: NativeLibrary, family: str, num_seen: int, tmp_path: Path
) -> None:
    decoder = load(write_tiny_family(tmp_path, family, num_hidden_layers=4), "float32", library)
    backend = NativeCpuBackend(storage_of(decoder), library)
    batch = build_batch(plan_of(decoder.spec.vocab_size, first=0), 16)
    backend.begin_step(batch.attention)
    step = CountingStep(backend, batch.attention)
    decoder.forward(batch.input_ids, batch.positions, step, batch.logits_rows)
    assert step.num_layers_seen == num_seen


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def make_layer(library: NativeLibrary, *, width: int = 32, inner: int = 48) -> PlainLayer:
    linears = NativeLinears(library)
    return PlainLayer(
        attention_gain=torch.ones(width),
        attention_eps=1e-5,
        qkv=linears.make(numbers(64, width)),
        attention_out=linears.make(numbers(width, 32)),
        attention=AttentionSpec(0.25),
        rotary=None,
        mlp_gain=torch.ones(width),
        mlp_eps=1e-5,
        gate_up=linears.make(numbers(2 * inner, width)),
        down=linears.make(numbers(width, inner)),
    )


HEADS = HeadShape(num_heads=2, num_kv_heads=1, head_dim=16)
KINDS_OF = {"qkv": WeightKind.INT8, "gate_up": WeightKind.INT4, "down": WeightKind.INT8}


def begin(library: NativeLibrary, *, head_dim: int = 16, num_tokens: int = 3) -> NativeCpuStep:
    storage = KVStorage(CacheLayout(3, 16), KVShape(1, 1, head_dim, torch.float32), CPU)
    lens = torch.tensor([num_tokens], dtype=torch.int32)
    borders = torch.tensor([0, num_tokens], dtype=torch.int32)
    slots, table = torch.arange(16, 16 + num_tokens), torch.tensor([[1]], dtype=torch.int32)
    metadata = AttentionMetadata(slots, table, lens, borders, borders, num_tokens, num_tokens)
    return NativeCpuBackend(storage, library).begin_step(metadata)


def test_layers_of_different_shapes_are_refused(library: NativeLibrary) -> None:
    with pytest.raises(ValueError, match="of shapes"):
        NativeStack(library, [make_layer(library), make_layer(library, inner=50)], HEADS)
    with pytest.raises(ValueError, match="of shapes"):
        NativeStack(library, [make_layer(library)], HeadShape(num_heads=4, num_kv_heads=1, head_dim=16))


def test_layers_of_different_types_are_refused(library: NativeLibrary) -> None:
    weight = quantise(numbers(32, 48), WeightKind.INT8)
    narrow = NativeLinears(library).make_quantised(weight, torch.bfloat16)
    with pytest.raises(ValueError, match=r"must be torch\.float32"):
        NativeStack(library, [dataclasses.replace(make_layer(library), down=narrow)], HEADS)


def test_each_weight_may_be_kept_in_a_way_of_its_own(library: NativeLibrary) -> None:
    linears, layer = NativeLinears(library), make_layer(library, inner=64)
    weights = {name: quantise(numbers(*getattr(layer, name).shape), kind) for name, kind in KINDS_OF.items()}
    quantised = {name: linears.make_quantised(weight, torch.float32) for name, weight in weights.items()}
    mixed = with_linears(layer, quantised)
    step, rows = begin(library), torch.arange(3)
    together = NativeStack(library, [mixed], HEADS).run(numbers(3, 32), (), step, rows)
    # With others of the same kinds in their places, each of them counts.
    for name, kind in KINDS_OF.items():
        negative = quantise(-numbers(*getattr(layer, name).shape), kind)
        other = linears.make_quantised(negative, torch.float32)
        changed = NativeStack(library, [with_linears(mixed, {name: other})], HEADS)
        assert not torch.equal(changed.run(numbers(3, 32), (), step, rows), together)
    if linears.suits_kept():
        check_kept_layer(library, layer, weights, step)


def with_linears(layer: PlainLayer, linears: Mapping[str, NativeLinear]) -> PlainLayer:
    """The layer with others in the places of these names."""
    changes: dict[str, Any] = dict(linears)
    return dataclasses.replace(layer, **changes)


def check_kept_layer(
    library: NativeLibrary, layer: PlainLayer, weights: dict[str, QuantisedWeight], step: NativeCpuStep
) -> None:
    """What a layer gives whose weights are kept in different ways is what whole ones give, to the bit."""
    linears, rows = NativeLinears(library), torch.arange(3)
    restored = {name: weight.restored() for name, weight in weights.items()}
    kept = {name: linears.make_kept(weight) for name, weight in restored.items()}
    assert {linear.kind for linear in kept.values()} == {WeightKind.WITH_INT8, WeightKind.WITH_INT4}
    outputs = [
        NativeStack(library, [with_linears(layer, made)], HEADS).run(numbers(3, 32), (), step, rows)
        for made in (kept, {name: linears.make(weight) for name, weight in restored.items()})
    ]
    assert torch.equal(*outputs)


def test_attention_of_another_kind_is_not_taken(library: NativeLibrary) -> None:
    stack = NativeStack(library, [make_layer(library)], HEADS)
    assert stack.takes(begin(library))
    assert not stack.takes(begin(library, head_dim=32))
    assert not stack.takes(OtherStep(begin(library)))


def test_what_does_not_fit_the_step_is_refused(library: NativeLibrary) -> None:
    stack, step = NativeStack(library, [make_layer(library)], HEADS), begin(library)
    rows = torch.arange(3)
    with pytest.raises(ValueError, match="hidden must be"):
        stack.run(numbers(3, 34), (), step, rows)
    with pytest.raises(ValueError, match="hidden must be"):
        stack.run(numbers(32, 3).T, (), step, rows)
    with pytest.raises(ValueError, match="rows must be"):
        stack.run(numbers(3, 32), (), step, rows.int())
    with pytest.raises(ValueError, match="factors must be"):
        stack.run(numbers(3, 32), ((numbers(2, 1, 2, 8), numbers(2, 1, 2, 8)),), step, rows)


def test_no_rows_may_be_wanted(library: NativeLibrary) -> None:
    stack, step = NativeStack(library, [make_layer(library)], HEADS), begin(library)
    assert stack.run(numbers(3, 32), (), step, torch.arange(0)).shape == (0, 32)
