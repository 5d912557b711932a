"""The flash-attn backend over an emulation of the package: what it calls, with what, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from headrace.engine.attention import flash
from headrace.engine.attention.backend import AttentionMetadata, AttentionSpec
from headrace.engine.attention.flash import FlashBackend
from headrace.engine.attention.reference import ReferenceBackend
from headrace.engine.errors import ConfigError
from tests.support.attention_cases import AttentionCase, make_case
from tests.support.contract_backend import ContractCheckingBackend
from tests.support.emulated_kernels import EmulatedKernels, installed_as_flash_attn

ROWS = {
    "prompts": [(0, 7), (0, 300), (0, 1)],
    "chunks": [(255, 3), (256, 40), (511, 2)],
    "decodes": [(0, 1), (255, 1), (256, 1), (700, 1)],
    "verification": [(9, 4), (254, 4), (300, 4)],
    "mixed": [(0, 70), (300, 1), (12, 5), (511, 1)],
}
SPECS = {
    "plain": AttentionSpec(scale=0.25),
    "window": AttentionSpec(scale=0.25, window=6),
    "window of one": AttentionSpec(scale=0.25, window=1),
    "soft cap": AttentionSpec(scale=4.0, soft_cap=2.0),
    "both": AttentionSpec(scale=4.0, window=300, soft_cap=2.0),
}


def make_flash_case(rows: Sequence[tuple[int, int]], **options: int | torch.dtype) -> AttentionCase:
    return make_case(rows, **{"block_size": 256, "dtype": torch.bfloat16, "table_padding": 1, **options})  # type: ignore[arg-type]


def run_both(case: AttentionCase, spec: AttentionSpec) -> tuple[EmulatedKernels, torch.Tensor, torch.Tensor]:
    """The kernels that were called, the backend's output and the reference's."""
    kernels = EmulatedKernels()
    backend = ContractCheckingBackend(
        case.storage, FlashBackend(case.storage, kernels.flash), block_size_multiple=256
    )
    out = case.run(backend, spec)
    return kernels, out, case.run(ReferenceBackend(case.storage), spec)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_gives_what_the_reference_gives(rows: list[tuple[int, int]], spec: AttentionSpec) -> None:
    _, out, expected = run_both(make_flash_case(rows), spec)

    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 64), (6, 2, 128), (8, 1, 8)])
def test_head_counts_widths_and_types(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    case = make_flash_case(
        ROWS["mixed"], dtype=dtype, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
    )

    _, out, expected = run_both(case, SPECS["plain"])

    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("rows", "function", "q_shape"),
    [
        (ROWS["decodes"], "with_kvcache", (4, 1, 6, 16)),
        (ROWS["verification"], "with_kvcache", (3, 4, 6, 16)),
        (ROWS["mixed"], "varlen", (77, 6, 16)),
        ([(9, 64)], "with_kvcache", (1, 64, 6, 16)),
        ([(9, 65)], "varlen", (65, 6, 16)),
        # Five tokens each on the average, and not all of them five.
        ([(0, 5), (0, 4), (0, 6)], "varlen", (15, 6, 16)),
    ],
    ids=["decodes", "verification", "mixed", "a short chunk", "a long chunk", "not quite equal"],
)
def test_rows_of_equal_length_take_the_kernel_that_splits(
    rows: list[tuple[int, int]], function: str, q_shape: tuple[int, ...]
) -> None:
    kernels, _, _ = run_both(make_flash_case(rows), SPECS["plain"])

    assert [(call.function, call.q_shape) for call in kernels.calls] == [(function, q_shape)]


@pytest.mark.parametrize(
    ("spec", "window_size", "softcap"),
    [
        (SPECS["plain"], (-1, 0), 0.0),
        (SPECS["window"], (5, 0), 0.0),
        (SPECS["window of one"], (0, 0), 0.0),
        (SPECS["soft cap"], (-1, 0), 2.0),
    ],
)
@pytest.mark.parametrize("rows", ["decodes", "mixed"])
def test_the_layer_is_passed_on_as_the_kernels_spell_it(
    rows: str, spec: AttentionSpec, window_size: tuple[int, int], softcap: float
) -> None:
    kernels, _, _ = run_both(make_flash_case(ROWS[rows]), spec)

    terms = kernels.calls[0].terms
    assert (terms.causal, terms.window_size, terms.softcap) == (True, window_size, softcap)
    assert terms.scale == spec.scale


def test_queries_that_are_a_part_of_something_larger_are_not_copied() -> None:
    case = make_flash_case(ROWS["decodes"])
    wide = torch.cat((case.query, torch.zeros_like(case.query)), dim=1)
    case = replace(case, query=wide[:, : case.query.shape[1]])

    _, out, expected = run_both(case, SPECS["plain"])

    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("num_splits", [0, 1])
def test_the_number_of_splits_can_be_fixed(num_splits: int) -> None:
    case, kernels = make_flash_case(ROWS["decodes"]), EmulatedKernels()

    case.run(FlashBackend(case.storage, kernels.flash, num_splits=num_splits), SPECS["plain"])

    assert kernels.calls[0].terms.num_splits == num_splits


def test_padding_rows_give_zero_and_leave_the_others_alone() -> None:
    """What a captured graph is replayed with: rows of length 0 over the null block."""
    case = make_flash_case(ROWS["decodes"])
    metadata, num_padding = case.metadata, 3
    padded = AttentionMetadata(
        slot_mapping=torch.cat((metadata.slot_mapping, torch.zeros(num_padding, dtype=torch.int64))),
        block_table=torch.nn.functional.pad(metadata.block_table, (0, 0, 0, num_padding)),
        seq_lens=torch.nn.functional.pad(metadata.seq_lens, (0, num_padding)),
        cu_seqlens_q=torch.arange(len(case.rows) + num_padding + 1, dtype=torch.int32),
        cu_seqlens_k=torch.cat((metadata.cu_seqlens_k, metadata.cu_seqlens_k[-1:].repeat(num_padding))),
        max_query_len=1,
        max_seq_len=metadata.block_table.shape[1] * 256,
    )

    def with_padding(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat((tensor, torch.ones_like(tensor[:1]).repeat(num_padding, 1, 1)))

    wide = replace(
        case,
        metadata=padded,
        query=with_padding(case.query),
        key=with_padding(case.key),
        value=with_padding(case.value),
    )

    _, out, expected = run_both(wide, SPECS["plain"])

    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
    assert not out[len(case.rows) :].any()
    _, alone, _ = run_both(case, SPECS["plain"])
    assert torch.equal(out[: len(case.rows)], alone)


@pytest.mark.parametrize("rows", ["decodes", "mixed"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float32}, "only support fp16 and bf16"),
        ({"block_size": 128}, "divisible by 256"),
        ({"head_dim": 264}, "at most 256"),
    ],
    ids=["type", "block size", "head width"],
)
def test_the_emulation_refuses_what_the_package_refuses(
    rows: str, options: dict[str, int | torch.dtype], message: str
) -> None:
    case = make_flash_case(ROWS[rows], **options)

    with pytest.raises(RuntimeError, match=message):
        case.run(FlashBackend(case.storage, EmulatedKernels().flash), SPECS["plain"])


def test_the_kernels_are_taken_from_the_installed_package() -> None:
    kernels = EmulatedKernels()

    with installed_as_flash_attn(kernels):
        loaded = flash.load_kernels()

    case = make_flash_case(ROWS["decodes"])
    case.run(FlashBackend(case.storage, loaded), SPECS["plain"])
    assert len(kernels.calls) == 1


def test_a_package_that_does_not_load_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "flash_attn", None)

    with pytest.raises(ConfigError, match="compile it again for torch"):
        flash.load_kernels()
