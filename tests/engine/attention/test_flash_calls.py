"""Calls that flash-attn's kernels would refuse, or misread: each breaks one rule of theirs, and shows.

The backend's own call is changed on its way to the emulated package. That keeps the emulation honest: a rule
that it let pass would be kept by nobody on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from headrace.engine.attention import flash
from headrace.engine.attention.backend import AttentionSpec
from headrace.engine.attention.flash import FlashBackend, FlashKernels
from headrace.engine.attention.reference import ReferenceBackend
from tests.support.attention_cases import AttentionCase, make_case
from tests.support.emulated_kernels import EmulatedKernels

SPEC = AttentionSpec(scale=0.25)
UNIFORM = [(9, 4), (254, 4), (300, 4)]
RAGGED = [(0, 70), (300, 1), (12, 5), (511, 1)]
UNLIKE = "gives something else"

Arguments = dict[str, Any]
Break = Callable[[Arguments], Arguments]


def change(**changes: Callable[[Any], object]) -> Break:
    """Arguments replaced by what is made of them."""
    return lambda given: given | {name: make(given[name]) for name, make in changes.items()}


def add(**more: object) -> Break:
    """Arguments that come beside the others, or in place of them."""
    return lambda given: given | more


def head_major(cache: torch.Tensor) -> torch.Tensor:
    return cache.transpose(1, 2).contiguous()


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Its last axis no longer contiguous."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def narrow(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[..., :12].contiguous()


WITH_KVCACHE: Mapping[str, tuple[str, Break]] = {
    "fp32 queries": ("only support fp16 and bf16", change(q=torch.Tensor.float)),
    "a cache of another type": ("must have the same dtype", change(k_cache=torch.Tensor.half)),
    "blocks of 128": (
        "divisible by 256",
        change(
            k_cache=lambda k: k.view(-1, 128, *k.shape[2:]), v_cache=lambda v: v.view(-1, 128, *v.shape[2:])
        ),
    ),
    "a head width of 12": (
        "padded and copied",
        change(q=narrow, k_cache=narrow, v_cache=narrow),
    ),
    "5 heads over 2": ("must divide number of heads", change(q=lambda q: q[:, :, :5].contiguous())),
    "heads before slots": ("divisible by 256", change(k_cache=head_major, v_cache=head_major)),
    "a cache that is not contiguous": ("contiguous last dimension", change(k_cache=strided)),
    "tables of int64": ("dtype torch.int32", change(block_table=torch.Tensor.long)),
    "a table that is not contiguous": ("contiguous last dimension", change(block_table=strided)),
    "a table beside batch indices": (
        "unused here",
        add(cache_batch_idx=torch.zeros(3, dtype=torch.int32)),
    ),
    "one number as length": ("seqlens_k must have shape", add(cache_seqlens=304)),
    "lengths of int64": ("must have dtype int32", change(cache_seqlens=torch.Tensor.long)),
    "lengths before this step": (UNLIKE, change(cache_seqlens=lambda lens: lens - 4)),
    "no causal mask": (UNLIKE, add(causal=False, window_size=(-1, -1))),
    "a mask aligned at the top left": (UNLIKE, add(causal=False, window_size=(-1, 4))),
    "a window that counts the token itself": (UNLIKE, add(window_size=(3, 0))),
    "KV to be appended, too": (
        "unused here",
        lambda given: given | {"k": given["k_cache"][:3, :4], "v": given["v_cache"][:3, :4]},
    ),
    "a length beyond the table": (
        "longer than its table",
        change(block_table=lambda table: table[:, :1].contiguous()),
    ),
    "no row": (
        "batch size must be positive",
        change(q=lambda q: q[:0], cache_seqlens=lambda n: n[:0], block_table=lambda t: t[:0]),
    ),
}

VARLEN: Mapping[str, tuple[str, Break]] = {
    "fp32 queries": ("only support fp16 and bf16", change(q=torch.Tensor.float)),
    "blocks of 128": (
        "divisible by 256",
        change(k=lambda k: k.view(-1, 128, *k.shape[2:]), v=lambda v: v.view(-1, 128, *v.shape[2:])),
    ),
    "a head width of 12": ("multiple of 8", change(q=narrow, k=narrow, v=narrow)),
    "tables of int64": ("dtype torch.int32", change(block_table=torch.Tensor.long)),
    "query borders of int64": ("cu_seqlens_q must have dtype int32", change(cu_seqlens_q=torch.Tensor.long)),
    "KV borders of int64": ("cu_seqlens_k must have dtype int32", change(cu_seqlens_k=torch.Tensor.long)),
    "KV lengths in place of borders": (
        "cu_seqlens_k must have shape",
        change(cu_seqlens_k=torch.Tensor.diff),
    ),
    "query borders as those of KV": (
        UNLIKE,
        lambda given: given | {"cu_seqlens_k": given["cu_seqlens_q"]},
    ),
    "no causal mask": (UNLIKE, add(causal=False, window_size=(-1, -1))),
    "a longest query on the device": ("must be int", change(max_seqlen_q=torch.tensor)),
    "a longest query that is too short": ("max_seqlen_q", add(max_seqlen_q=1)),
    "a longest row that is too short": ("max_seqlen_k", add(max_seqlen_k=300)),
    "no row": (
        "batch size must be positive",
        change(cu_seqlens_q=lambda n: n[:1], cu_seqlens_k=lambda n: n[:1], block_table=lambda t: t[:0]),
    ),
}


def outcome(case: AttentionCase, break_it: Break) -> str:
    """What is said of a call that is changed so, or that its result is another."""
    emulated = EmulatedKernels()

    def broken(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        names = (
            ("q", "k_cache", "v_cache") if function == emulated.flash_attn_with_kvcache else ("q", "k", "v")
        )

        def call(*operands: torch.Tensor, **given: object) -> torch.Tensor:
            return function(**break_it(dict(zip(names, operands, strict=True)) | given))

        return call

    kernels = FlashKernels(broken(emulated.flash_attn_varlen_func), broken(emulated.flash_attn_with_kvcache))
    try:
        out = case.run(FlashBackend(case.storage, kernels), SPEC)
    except (RuntimeError, TypeError, AssertionError) as refusal:
        return str(refusal)
    expected = case.run(ReferenceBackend(case.storage), SPEC)
    is_like = torch.allclose(out.float(), expected.float(), rtol=1e-2, atol=1e-2)
    return "gives the same" if is_like else UNLIKE


def case_of(rows: list[tuple[int, int]]) -> AttentionCase:
    return make_case(rows, block_size=256, dtype=torch.bfloat16, table_padding=1)


@pytest.mark.parametrize(("said", "break_it"), WITH_KVCACHE.values(), ids=WITH_KVCACHE.keys())
def test_a_broken_call_of_the_kernel_for_equal_rows_shows(said: str, break_it: Break) -> None:
    assert said in outcome(case_of(UNIFORM), break_it)


@pytest.mark.parametrize(("said", "break_it"), VARLEN.values(), ids=VARLEN.keys())
def test_a_broken_call_of_the_kernel_for_all_rows_shows(said: str, break_it: Break) -> None:
    assert said in outcome(case_of(RAGGED), break_it)


@pytest.mark.parametrize("rows", [UNIFORM, RAGGED], ids=["equal", "ragged"])
def test_an_unbroken_call_shows_nothing(rows: list[tuple[int, int]]) -> None:
    assert outcome(case_of(rows), add()) == "gives the same"


@pytest.mark.parametrize(
    ("installed", "has_code", "said"),
    [
        ({}, False, "flash-attn is not installed"),
        ({"flash-attn-4": "4.0.0b36"}, False, "flash-attn is not installed"),
        ({"flash-attn": "2.8.3.post2"}, True, None),
        ({"flash-attn": "2.7.4"}, True, "written for 2.8"),
        ({"flash-attn": "3.0.0"}, True, "written for 2.8"),
        ({"flash-attn": "2.8.3.post2", "flash-attn-4": "4.0.0b36"}, True, "into the same folder"),
    ],
    ids=["none", "4 alone", "2.8", "older", "newer", "2.8 and 4"],
)
def test_only_the_tested_package_by_itself_is_taken(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    installed: Mapping[str, str],
    said: str | None,
    *,
    has_code: bool,
) -> None:
    if find_spec("flash_attn") is not None:
        pytest.skip("flash-attn is installed here")
    site = tmp_path_factory.mktemp("site")
    if installed:
        (site / "flash_attn" / "cute").mkdir(parents=True)
    if has_code:
        (site / "flash_attn" / "__init__.py").touch()
    for name, version in installed.items():
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(site))

    missing = flash.missing()

    assert missing is None if said is None else said in str(missing)
