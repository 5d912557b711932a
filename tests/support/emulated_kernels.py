"""The paged attention functions of flash-attn 2.8.3 and of torch, emulated on the CPU.

Same arguments, same meaning, and the same refusals as the real ones have before they launch a kernel: types,
layouts, sizes. Written from what those functions document, not from the engine's reference backend, so that
the two can disagree.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from itertools import pairwise

import torch
from torch import Tensor

from headrace.engine.attention.flash import FlashKernels

_HALF = (torch.float16, torch.bfloat16)


def check(holds: bool, what: str) -> None:
    """The extension's way of refusing: a RuntimeError."""
    if not holds:
        raise RuntimeError(what)


@dataclass(frozen=True)
class Terms:
    """How to attend, as it came.

    Args:
        num_splits: None where the function has no such argument.
    """

    scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float = 0.0
    num_splits: int | None = None


@dataclass(frozen=True)
class Call:
    """A call that got through the checks."""

    function: str
    q_shape: tuple[int, ...]
    terms: Terms


@dataclass
class EmulatedKernels:
    """The functions, and what they were called with.

    Args:
        dtypes: types that are taken; add fp32, which the real ones refuse, to compare whole models exactly.
    """

    dtypes: tuple[torch.dtype, ...] = _HALF
    calls: list[Call] = field(default_factory=list)

    @property
    def flash(self) -> FlashKernels:
        """Both functions of flash-attn."""
        return FlashKernels(self.flash_attn_varlen_func, self.flash_attn_with_kvcache)

    def flash_attn_varlen_func(  # noqa: PLR0917  as the real one
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        """As in flash-attn 2.8.3, paged and without dropout, slopes or probabilities."""
        check(
            not (dropout_p or deterministic or return_attn_probs or alibi_slopes is not None), "unused here"
        )
        assert block_table is not None, "the emulation is of the paged case alone"
        self._check_operands(q, k, v)
        check(q.dim() == 3, "q must be (total_q, nheads, headdim)")
        check(
            q.shape[2] % 8 == 0, "query, key, value, and out_ must have a head_size that is a multiple of 8"
        )
        num_rows = cu_seqlens_q.numel() - 1
        check(num_rows > 0, "batch size must be positive")
        _check_int32("cu_seqlens_q", cu_seqlens_q, (num_rows + 1,), q)
        _check_int32("cu_seqlens_k", cu_seqlens_k, (num_rows + 1,), q)
        _check_table(block_table, num_rows, q)
        _check_host_int(max_seqlen_q, max_seqlen_k)
        borders, k_borders = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        # Nothing checks these in the kernels: they compute too little of the output instead.
        assert _longest(borders) <= max_seqlen_q, "a row has more queries than max_seqlen_q"
        assert _longest(k_borders) <= max_seqlen_k, "a row is longer than max_seqlen_k"
        terms = Terms(softmax_scale, causal, window_size, softcap)
        self.calls.append(Call("varlen", tuple(q.shape), terms))
        out = torch.full_like(q, float("nan"))
        for row in range(num_rows):
            tokens = slice(borders[row], borders[row + 1])
            seq_len = k_borders[row + 1] - k_borders[row]
            out[tokens] = _attend(q[tokens], (k, v), block_table[row], seq_len, terms)
        return out

    def flash_attn_with_kvcache(  # noqa: PLR0917  as the real one
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: int | Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        block_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: Tensor | None = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor:
        """As in flash-attn 2.8.3, paged, with nothing appended or rotated."""
        unused = (k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, alibi_slopes)
        check(all(tensor is None for tensor in unused) and not return_softmax_lse, "unused here")
        assert block_table is not None, "the emulation is of the paged case alone"
        self._check_operands(q, k_cache, v_cache)
        check(q.dim() == 4, "q must be (batch_size, seqlen, nheads, headdim)")
        num_rows, seqlen_k = q.shape[0], block_table.shape[1] * k_cache.shape[1]
        check(num_rows > 0, "batch size must be positive")
        if isinstance(cache_seqlens, int):
            # One per block of the cache, as the wrapper has it: right by chance alone.
            cache_seqlens = torch.full((k_cache.shape[0],), cache_seqlens, dtype=torch.int32)
        assert cache_seqlens is not None
        _check_int32("seqlens_k", cache_seqlens, (num_rows,), q)
        _check_table(block_table, num_rows, q)
        assert q.shape[3] % 8 == 0, "the whole cache would be padded and copied"
        assert int(cache_seqlens.max()) <= seqlen_k, "a row is longer than its table"
        terms = Terms(softmax_scale, causal, window_size, softcap, num_splits)
        self.calls.append(Call("with_kvcache", tuple(q.shape), terms))
        return torch.stack(
            [
                _attend(q[row], (k_cache, v_cache), block_table[row], seq_len, terms)
                for row, seq_len in enumerate(cache_seqlens.tolist())
            ]
        )

    def varlen_attn(  # noqa: PLR0917  as the real one
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        *,
        return_aux: object = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        seqused_k: Tensor | None = None,
        block_table: Tensor | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """As `torch.nn.attention.varlen.varlen_attn` of torch 2.13, paged."""
        check(return_aux is None, "unused here")
        assert block_table is not None, "the emulation is of the paged case alone"
        if not enable_gqa and query.shape[1] != key.shape[2]:
            raise ValueError("Try setting enable_gqa=True for GQA.")
        if enable_gqa and query.shape[1] % key.shape[2]:
            raise ValueError("Expect number of query heads to be a multiple of kv heads for GQA")
        check(seqused_k is not None, "block_table requires seqused_k")
        assert seqused_k is not None
        self._check_operands(query, key, value)
        check(query.shape[2] % 8 == 0, "head_size must be a multiple of 8")
        num_rows = cu_seq_q.numel() - 1
        check(num_rows > 0, "batch size must be positive")
        _check_int32("cu_seqlens_q", cu_seq_q, (num_rows + 1,), query)
        if cu_seq_k is not None:
            _check_int32("cu_seqlens_k", cu_seq_k, (num_rows + 1,), query)
        _check_int32("seqused_k", seqused_k, (num_rows,), query)
        _check_table(block_table, num_rows, query)
        _check_host_int(max_q, max_k)
        borders, seq_lens = cu_seq_q.tolist(), seqused_k.tolist()
        assert _longest(borders) <= max_q, "a row has more queries than max_q"
        assert max(seq_lens) <= max_k, "a row is longer than max_k"
        terms = Terms(scale, window_size == (-1, 0), window_size, num_splits=num_splits)
        self.calls.append(Call("varlen_attn", tuple(query.shape), terms))
        out = torch.full_like(query, float("nan"))
        for row in range(num_rows):
            tokens = slice(borders[row], borders[row + 1])
            out[tokens] = _attend(query[tokens], (key, value), block_table[row], seq_lens[row], terms)
        return out

    def _check_operands(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        check(q.dtype in self.dtypes, "FlashAttention only support fp16 and bf16 data type")
        check(k.dtype is q.dtype, "query and key must have the same dtype")
        check(v.dtype is q.dtype, "query and value must have the same dtype")
        check(k.device == q.device == v.device, "all must be on one CUDA device")
        for tensor in (q, k, v):
            check(tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension")
            assert tensor.data_ptr() % 16 == 0, "rows are loaded 16 bytes at a time"
        check(k.dim() == 4 and k.shape == v.shape, "must be (num_blocks, page_block_size, nheads_k, headdim)")
        check(k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
        check(q.shape[-1] <= 256, "FlashAttention forward only supports head dimension at most 256")
        check(k.shape[3] == q.shape[-1], "k must have the head dimension of q")
        check(
            q.shape[-2] % k.shape[2] == 0,
            "Number of heads in key/value must divide number of heads in query",
        )


@contextmanager
def installed_as_flash_attn(kernels: EmulatedKernels) -> Iterator[None]:
    """While it lasts, `import flash_attn` finds the emulation."""
    module = types.ModuleType("flash_attn")
    vars(module)["flash_attn_varlen_func"] = kernels.flash_attn_varlen_func
    vars(module)["flash_attn_with_kvcache"] = kernels.flash_attn_with_kvcache
    module.__spec__ = ModuleSpec("flash_attn", loader=None, origin="emulated")
    before = sys.modules.get("flash_attn")
    sys.modules["flash_attn"] = module
    try:
        yield
    finally:
        del sys.modules["flash_attn"]
        if before is not None:
            sys.modules["flash_attn"] = before


def _check_int32(name: str, tensor: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    check(tensor.dtype is torch.int32, f"{name} must have dtype int32")
    check(tensor.device == like.device, f"{name} must be on CUDA")
    check(tensor.is_contiguous(), f"{name} must be contiguous")
    check(tuple(tensor.shape) == shape, f"{name} must have shape {shape}")


def _check_table(block_table: Tensor, num_rows: int, like: Tensor) -> None:
    check(block_table.dtype is torch.int32, "block_table must have dtype torch.int32")
    check(block_table.stride(-1) == 1, "block_table must have contiguous last dimension")
    check(block_table.dim() == 2 and block_table.shape[0] == num_rows, "block_table must be (batch_size, …)")
    check(block_table.device == like.device, "block_table must be on CUDA")


def _check_host_int(*values: object) -> None:
    if not all(type(value) is int for value in values):
        raise TypeError("max_seqlen must be int")


def _longest(borders: Sequence[int]) -> int:
    return max(after - before for before, after in pairwise(borders))


def _attend(q: Tensor, pools: tuple[Tensor, Tensor], table: Tensor, seq_len: int, terms: Terms) -> Tensor:
    """One row: (Q, H_q, D).

    Query i may see keys i + K - Q - left to i + K - Q + right; what sees none is 0.
    """
    num_queries, num_heads, head_dim = q.shape
    if seq_len == 0:
        return torch.zeros_like(q)
    page = pools[0].shape[1]
    # Whole pages are loaded: an id out of range would be a fault on the device.
    pages = table[: -(-seq_len // page)].long()
    assert bool(((pages >= 0) & (pages < pools[0].shape[0])).all()), "a page outside of the cache"
    keys, values = (
        pool[pages].flatten(0, 1)[:seq_len].float().repeat_interleave(num_heads // pool.shape[2], dim=1)
        for pool in pools
    )
    scale = head_dim**-0.5 if terms.scale is None else terms.scale
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if terms.softcap > 0:
        scores = torch.tanh(scores / terms.softcap) * terms.softcap
    left, right = terms.window_size
    # One query sees all that is there: the flag is dropped.
    if terms.causal and num_queries > 1:
        right = 0
    distance = torch.arange(seq_len) - torch.arange(num_queries)[:, None] - (seq_len - num_queries)
    hidden = torch.zeros(num_queries, seq_len, dtype=torch.bool)
    if right >= 0:
        hidden |= distance > right
    if left >= 0:
        hidden |= distance < -left
    # By hand: a row without visible keys would be 0 / 0 in a softmax.
    peaks = scores.masked_fill(hidden, -torch.inf).amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - peaks.masked_fill(peaks == -torch.inf, 0.0)).masked_fill(hidden, 0.0)
    total = weights.sum(dim=-1, keepdim=True)
    out = torch.einsum("hqk,khd->qhd", weights, values) / total.masked_fill(total == 0, 1.0).permute(1, 0, 2)
    return out.to(q.dtype)
