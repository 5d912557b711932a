"""The backend over torch's own flash attention, which is emulated here: there is no CPU kernel of it."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from headrace.engine.attention import torch_varlen
from headrace.engine.attention.backend import AttentionSpec
from headrace.engine.attention.reference import ReferenceBackend
from headrace.engine.attention.torch_varlen import TorchVarlenBackend
from headrace.engine.errors import ConfigError
from tests.support.attention_cases import make_case
from tests.support.contract_backend import ContractCheckingBackend
from tests.support.emulated_kernels import EmulatedKernels

ROWS = {
    "prompts": [(0, 7), (0, 300), (0, 1)],
    "decodes": [(0, 1), (255, 1), (256, 1), (700, 1)],
    "verification": [(9, 4), (254, 4), (300, 4)],
    "mixed": [(0, 70), (300, 1), (12, 5), (511, 1)],
}


@pytest.mark.parametrize("window", [None, 1, 6, 300])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4)], ids=["grouped", "one each"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_gives_what_the_reference_gives(
    rows: list[tuple[int, int]], heads: tuple[int, int], window: int | None
) -> None:
    case = make_case(
        rows,
        block_size=256,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        dtype=torch.bfloat16,
        table_padding=1,
    )
    backend = TorchVarlenBackend(case.storage, EmulatedKernels().varlen_attn)
    spec = AttentionSpec(scale=0.25, window=window)

    out = case.run(ContractCheckingBackend(case.storage, backend, block_size_multiple=256), spec)

    torch.testing.assert_close(out, case.run(ReferenceBackend(case.storage), spec), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("num_splits", [None, 1])
def test_the_number_of_splits_can_be_fixed(num_splits: int | None) -> None:
    case, kernels = make_case([(300, 1)], block_size=256, dtype=torch.float16), EmulatedKernels()

    case.run(
        TorchVarlenBackend(case.storage, kernels.varlen_attn, num_splits=num_splits), AttentionSpec(scale=1.0)
    )

    assert kernels.calls[0].terms.num_splits == num_splits


def test_capped_scores_are_refused_not_ignored() -> None:
    case = make_case([(3, 1)], block_size=256, dtype=torch.bfloat16)

    with pytest.raises(ConfigError, match="does not cap scores"):
        case.run(
            TorchVarlenBackend(case.storage, EmulatedKernels().varlen_attn),
            AttentionSpec(scale=1.0, soft_cap=2.0),
        )


def test_the_emulation_has_the_arguments_of_the_installed_function() -> None:
    real = inspect.signature(varlen_attn).parameters
    emulated = inspect.signature(EmulatedKernels().varlen_attn).parameters

    assert list(emulated) == list(real)
    assert [p.kind for p in emulated.values()] == [p.kind for p in real.values()]
    assert [p.default for p in emulated.values()] == [p.default for p in real.values()]


def test_this_torch_has_the_function() -> None:
    missing = torch_varlen.missing()

    # A CPU build lacks the kernels alone.
    assert missing is None or "built without flash attention" in missing
    assert torch_varlen.load_kernel() is not None


@pytest.mark.parametrize(
    ("said", "changes"),
    [
        ("enable_gqa", {"enable_gqa": False}),
        ("block_table requires seqused_k", {"seqused_k": None}),
        ("seqused_k must have dtype int32", {"seqused_k": torch.tensor([70, 301, 17, 512])}),
        ("block_table must be (batch_size", {"block_table": torch.zeros(3, 3, dtype=torch.int32)}),
        ("dtype torch.int32", {"block_table": torch.zeros(4, 3, dtype=torch.int64)}),
        ("max_seqlen must be int", {"max_q": torch.tensor(70)}),
        ("more queries than max_q", {"max_q": 1}),
        ("longer than max_k", {"max_k": 300}),
        # Causal is a window here: to say so in flash-attn's words hides nothing.
        ("gives something else", {"window_size": (-1, -1)}),
    ],
    ids=lambda value: "" if isinstance(value, str) else ", ".join(value),
)
def test_a_broken_call_shows(said: str, changes: dict[str, object]) -> None:
    case = make_case([(0, 70), (300, 1), (12, 5), (511, 1)], block_size=256, dtype=torch.bfloat16)
    spec, kernels = AttentionSpec(scale=0.25), EmulatedKernels()

    def broken(*operands: torch.Tensor, **given: object) -> torch.Tensor:
        return kernels.varlen_attn(*operands, **given | changes)  # type: ignore[arg-type]

    try:
        out = case.run(TorchVarlenBackend(case.storage, broken), spec)
    except (RuntimeError, TypeError, ValueError, AssertionError) as refusal:
        outcome = str(refusal)
    else:
        expected = case.run(ReferenceBackend(case.storage), spec)
        is_like = torch.allclose(out.float(), expected.float(), rtol=1e-2, atol=1e-2)
        outcome = "gives the same" if is_like else "gives something else"

    assert said in outcome
