"""Paged attention on the CPU with torch's own operators, over the cache layout that flash-attn reads.

Short rows (decode, verification, small prompts) of all sequences go through one padded batch. Their KV is
cut into pieces of equal size, so that a row's arithmetic depends on its own length alone and ragged lengths
cost no padding; the pieces' scores meet in one softmax, the pieces' outputs in one sum (split-KV as in
Flash-Decoding, with the scores kept). Long rows (chunks of prompts) go one by one, in tiles of query tokens.

A NaN never leaves its row: a place without a token loads the row's own last token, never another's slot.

Letters as in `headrace.engine.attention.backend`; G = H_q / H_kv, R rows of a group, Q its query tokens per
row, C tokens per KV piece, P pieces of all rows, W pieces of the longest row.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.attention.backend import AttentionMetadata, AttentionSpec, Capabilities
from headrace.engine.kv.storage import KVStorage

CAPABILITIES = Capabilities(name="cpu", dtypes=frozenset({torch.float32, torch.bfloat16}))

_PIECE = 64
"""C: small enough to pad little, large enough for a matrix product."""
_MAX_SHORT = 64
"""Longest query that goes through the padded batch."""
_TILE = 128
"""Query tokens of a long row whose scores are in memory at once."""

_IntArray = NDArray[np.int64]


class CpuBackend:
    """Attention for CPUs. Keeps its temporaries: fresh ones would be mapped and unmapped at each call."""

    def __init__(self, storage: KVStorage) -> None:
        self._cache = _SlotCache(storage)
        self._workspace = _Workspace(storage.shape.dtype)

    @property
    def capabilities(self) -> Capabilities:
        """See `AttentionBackend`."""
        return CAPABILITIES

    def begin_step(self, metadata: AttentionMetadata) -> CpuStep:
        """See `AttentionBackend`."""
        return CpuStep(self._cache, self._workspace, metadata)


class CpuStep:
    """See `AttentionStep`."""

    def __init__(self, cache: _SlotCache, workspace: _Workspace, metadata: AttentionMetadata) -> None:
        self._cache = cache
        self._slot_mapping = metadata.slot_mapping
        starts = metadata.cu_seqlens_q.numpy().astype(np.int64)
        query_lens = np.diff(starts)
        seq_lens = metadata.seq_lens.numpy().astype(np.int64)
        block_table = metadata.block_table.numpy()
        self._groups: list[_ShortRows | _LongRow] = []
        rows_by_width: defaultdict[int, list[int]] = defaultdict(list)
        for row, query_len in enumerate(query_lens.tolist()):
            if query_len <= _MAX_SHORT:
                rows_by_width[1 << (query_len - 1).bit_length()].append(row)
            else:
                slots = _slots(block_table[row : row + 1], seq_lens[row : row + 1], cache.block_size)
                span = _Span(int(starts[row]), query_len, int(seq_lens[row]))
                self._groups.append(_LongRow(cache, workspace, span, slots[0]))
        for width, members in sorted(rows_by_width.items()):
            rows = _Rows(starts[members], query_lens[members], seq_lens[members])
            self._groups.append(_ShortRows(cache, workspace, rows, block_table[members], width))

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See `AttentionStep`."""
        self._cache.key_slots[layer].index_copy_(0, self._slot_mapping, key)
        self._cache.value_slots[layer].index_copy_(0, self._slot_mapping, value)

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        """See `AttentionStep`."""
        out = torch.empty(query.shape, dtype=query.dtype)
        for group in self._groups:
            group.attend(layer, query, spec, out)
        return out


class _SlotCache:
    """The cache seen as a list of slots, and as a list of (slot, head) lines of D numbers."""

    def __init__(self, storage: KVStorage) -> None:
        self.block_size = storage.layout.block_size
        self.num_kv_heads = storage.shape.num_kv_heads
        self.key_slots = [layer.flatten(0, 1) for layer in storage.key]
        self.value_slots = [layer.flatten(0, 1) for layer in storage.value]
        self.key_lines = [layer.flatten(0, 2) for layer in storage.key]
        self.value_lines = [layer.flatten(0, 2) for layer in storage.value]

    def lines(self, slots: _IntArray) -> Tensor:
        """Lines of some slots, head by head.

        Args:
            slots: (n, C).

        Returns:
            (n * H_kv * C,), int64.
        """
        heads = np.arange(self.num_kv_heads)[None, :, None]
        return torch.from_numpy((slots[:, None, :] * self.num_kv_heads + heads).reshape(-1))


class _Workspace:
    """Buffers by name, kept from call to call and grown when they are too small."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of that shape whose content is undefined; the last one of that name is gone."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[0] < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=self._dtype)
        return buffer[:size].view(shape)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows, (R,) each: where their query tokens begin on the flat axis, how many, their KV length."""

    starts: _IntArray
    query_lens: _IntArray
    seq_lens: _IntArray


@dataclass(frozen=True, slots=True)
class _Span:
    """One row."""

    start: int
    query_len: int
    seq_len: int


def _slots(
    block_table: NDArray[np.int32], seq_lens: _IntArray, block_size: int, multiple: int = 1
) -> _IntArray:
    """Slot of every KV position, up to the longest row's length rounded up to `multiple`.

    Returns:
        (R, positions); past a row's length, its last token's slot again.
    """
    longest = -(-int(seq_lens.max(initial=1)) // multiple) * multiple
    positions = np.minimum(np.arange(longest), np.maximum(seq_lens, 1)[:, None] - 1)
    block_ids: _IntArray = np.take_along_axis(block_table, positions // block_size, axis=1).astype(np.int64)
    slots: _IntArray = block_ids * block_size + positions % block_size
    return slots


class _ShortRows:
    """Rows of at most Q query tokens each, as one padded batch."""

    def __init__(
        self,
        cache: _SlotCache,
        workspace: _Workspace,
        rows: _Rows,
        block_table: NDArray[np.int32],
        width: int,
    ) -> None:
        self._cache, self._workspace, self._rows = cache, workspace, rows
        num_rows = len(rows.starts)
        num_pieces = np.maximum(-(-rows.seq_lens // _PIECE), 1)
        max_pieces = int(num_pieces.max())
        self._shape = (num_rows, width, int(num_pieces.sum()), max_pieces)
        exists = np.arange(max_pieces) < num_pieces[:, None]
        slots = _slots(block_table, rows.seq_lens, cache.block_size, _PIECE)
        self._lines = cache.lines(slots.reshape(num_rows, max_pieces, _PIECE)[exists])

        # Piece of each place in the padded scores; a place without one shows the row's first piece, masked.
        first_pieces = np.cumsum(num_pieces) - num_pieces
        self._piece_of_place = np.where(
            exists, first_pieces[:, None] + np.arange(max_pieces), first_pieces[:, None]
        )
        self._place_of_piece = np.flatnonzero(exists)
        self._row_of_piece = torch.from_numpy(np.repeat(np.arange(num_rows), num_pieces))
        self._first_pieces = torch.from_numpy(first_pieces)
        self._piece_ids = torch.arange(self._shape[2])

        offsets = np.arange(width)
        self._is_token = offsets < rows.query_lens[:, None]
        tokens = rows.starts[:, None] + np.minimum(offsets, rows.query_lens[:, None] - 1)
        first, is_run = (
            int(tokens[0, 0]),
            bool(np.array_equal(tokens.ravel(), tokens[0, 0] + np.arange(tokens.size))),
        )
        self._token_run = slice(first, first + tokens.size) if is_run else None
        self._tokens = torch.from_numpy(tokens.reshape(-1))
        self._positions = rows.seq_lens[:, None] - rows.query_lens[:, None] + (tokens - rows.starts[:, None])
        self._moves: dict[int, tuple[Tensor, Tensor]] = {}
        self._biases: dict[int | None, Tensor] = {}
        blind = self._positions < 0
        self._blind = torch.from_numpy(blind)[:, None, :, None, None] if blind.any() else None

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec, out: Tensor) -> None:
        """Fill this group's tokens of `out`."""
        cache, workspace = self._cache, self._workspace
        num_rows, width, num_pieces, max_pieces = self._shape
        num_kv_heads, head_dim = cache.num_kv_heads, query.shape[2]
        group_size = query.shape[1] // num_kv_heads
        padded = (
            query[self._token_run] if self._token_run is not None else query.index_select(0, self._tokens)
        )
        # (R, H_kv, Q * G, D): the query heads of one KV head are more rows of the same product.
        per_head = padded.view(num_rows, width, num_kv_heads, group_size, head_dim).transpose(1, 2)
        per_head = per_head.reshape(num_rows, num_kv_heads, width * group_size, head_dim)

        lines_shape = (num_pieces * num_kv_heads, _PIECE, head_dim)
        keys = workspace.take("keys", (len(self._lines), head_dim))
        torch.index_select(cache.key_lines[layer], 0, self._lines, out=keys)
        queries = per_head if num_pieces == num_rows else per_head.index_select(0, self._row_of_piece)
        scores = workspace.take("scores", (num_pieces * num_kv_heads, width * group_size, _PIECE))
        torch.bmm(
            queries.reshape(-1, width * group_size, head_dim),
            keys.view(lines_shape).transpose(1, 2),
            out=scores,
        )

        probs = self._softmax(scores, group_size, spec)
        values = workspace.take("keys", (len(self._lines), head_dim))
        torch.index_select(cache.value_lines[layer], 0, self._lines, out=values)
        parts = workspace.take("parts", (num_pieces * num_kv_heads, width * group_size, head_dim))
        torch.bmm(probs, values.view(lines_shape), out=parts)
        if max_pieces > 1:
            parts, _, _, _ = torch.embedding_bag(
                parts.view(num_pieces, -1), self._piece_ids, self._first_pieces, mode=0
            )
        result = parts.view(num_rows, num_kv_heads, width, group_size, head_dim).transpose(1, 2)
        if self._token_run is not None:
            out[self._token_run].view(result.shape).copy_(result)
        else:
            is_token = torch.from_numpy(self._is_token)
            out[self._tokens.view(num_rows, width)[is_token]] = result[is_token].flatten(1, 2)

    def _softmax(self, scores: Tensor, group_size: int, spec: AttentionSpec) -> Tensor:
        """Probabilities of all pieces, laid out as their scores.

        Args:
            scores: (P * H_kv, Q * G, C), not scaled.
        """
        num_rows, width, _, max_pieces = self._shape
        num_kv_heads = self._cache.num_kv_heads
        to_places, to_pieces = self._moves_of(group_size)
        whole = scores
        if max_pieces > 1:
            whole = self._workspace.take("whole", (len(to_places), _PIECE))
            torch.index_select(scores.view(-1, _PIECE), 0, to_places, out=whole)
        whole = whole.view(num_rows, num_kv_heads, width, group_size, max_pieces * _PIECE)
        bias = self._bias(spec.window, scores.dtype)
        if spec.soft_cap is None:
            torch.add(bias, whole, alpha=spec.scale, out=whole)
        else:
            whole.mul_(spec.scale / spec.soft_cap).tanh_().mul_(spec.soft_cap).add_(bias)
        probs = self._workspace.take("probs", tuple(whole.shape))
        torch.softmax(whole, -1, out=probs)
        if self._blind is not None:
            probs.masked_fill_(self._blind, 0.0)
        if max_pieces == 1:
            return probs.view(scores.shape)
        return torch.index_select(probs.view(-1, _PIECE), 0, to_pieces, out=scores.view(-1, _PIECE)).view(
            scores.shape
        )

    def _moves_of(self, group_size: int) -> tuple[Tensor, Tensor]:
        """Lines of C scores, from the pieces' order to the rows' and back.

        The pieces' order is (piece, H_kv, Q * G), the rows' (row, H_kv, Q * G, W).
        """
        moves = self._moves.get(group_size)
        if moves is None:
            _, width, _, max_pieces = self._shape
            lines_per_piece = self._cache.num_kv_heads * width * group_size
            line = np.arange(lines_per_piece)
            to_places = self._piece_of_place[:, None, :] * lines_per_piece + line[None, :, None]
            row, piece = np.divmod(self._place_of_piece, max_pieces)
            to_pieces = (row[:, None] * lines_per_piece + line) * max_pieces + piece[:, None]
            moves = (torch.from_numpy(to_places.reshape(-1)), torch.from_numpy(to_pieces.reshape(-1)))
            self._moves[group_size] = moves
        return moves

    def _bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """(R, 1, Q, 1, W * C): 0 where a token may look, else minus infinity."""
        bias = self._biases.get(window)
        if bias is None:
            slots = np.arange(self._shape[3] * _PIECE)
            seen = slots <= self._positions[:, :, None]
            if window is not None:
                seen &= slots > self._positions[:, :, None] - window
            bias = torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf))).to(dtype)
            bias = self._biases[window] = bias[:, None, :, None, :]
        return bias


class _LongRow:
    """One row of many query tokens: its KV is loaded once, its scores are made tile by tile."""

    def __init__(self, cache: _SlotCache, workspace: _Workspace, span: _Span, slots: _IntArray) -> None:
        self._cache, self._workspace, self._span = cache, workspace, span
        self._lines = cache.lines(slots[None, :])
        self._biases: dict[tuple[int, int, int | None], Tensor] = {}

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec, out: Tensor) -> None:
        """Fill this row's tokens of `out`."""
        cache, workspace, span = self._cache, self._workspace, self._span
        num_kv_heads, head_dim = cache.num_kv_heads, query.shape[2]
        group_size = query.shape[1] // num_kv_heads
        tokens = slice(span.start, span.start + span.query_len)
        kv_shape = (num_kv_heads, len(self._lines) // num_kv_heads, head_dim)
        keys = workspace.take("keys", (len(self._lines), head_dim))
        torch.index_select(cache.key_lines[layer], 0, self._lines, out=keys)
        values = workspace.take("values", (len(self._lines), head_dim))
        torch.index_select(cache.value_lines[layer], 0, self._lines, out=values)
        keys, values = keys.view(kv_shape).transpose(1, 2), values.view(kv_shape)

        # (H_kv, Q, G, D), so that a tile of query tokens is one matrix per KV head.
        queries = workspace.take("queries", (num_kv_heads, span.query_len, group_size, head_dim))
        queries.copy_(query[tokens].view(span.query_len, num_kv_heads, group_size, head_dim).transpose(0, 1))
        result = out[tokens].view(span.query_len, num_kv_heads, group_size, head_dim).transpose(0, 1)
        for first in range(0, span.query_len, _TILE):
            last = min(first + _TILE, span.query_len)
            begin, end = self._kv_range(first, last, spec.window)
            tile_rows = (last - first) * group_size
            scores = workspace.take("scores", (num_kv_heads, tile_rows, end - begin))
            factor = spec.scale if spec.soft_cap is None else spec.scale / spec.soft_cap
            tile = queries[:, first:last].flatten(1, 2)
            # With beta = 0 the old content of `scores` is not read, not even a NaN.
            torch.baddbmm(scores, tile, keys[:, :, begin:end], beta=0, alpha=factor, out=scores)
            if spec.soft_cap is not None:
                scores.tanh_().mul_(spec.soft_cap)
            self._mask(scores, first, last, spec.window)
            probs = workspace.take("probs", tuple(scores.shape))
            torch.softmax(scores, -1, out=probs)
            parts = workspace.take("parts", (num_kv_heads, tile_rows, head_dim))
            torch.bmm(probs, values[:, begin:end], out=parts)
            result[:, first:last].copy_(parts.view(num_kv_heads, last - first, group_size, head_dim))

    def _kv_range(self, first: int, last: int, window: int | None) -> tuple[int, int]:
        """KV positions that the query tokens `first` to `last` see between them."""
        past = self._span.seq_len - self._span.query_len
        begin = 0 if window is None else max(0, past + first - window + 1)
        return begin, past + last

    def _mask(self, scores: Tensor, first: int, last: int, window: int | None) -> None:
        """Take what its query tokens may not see out of a tile, in place.

        Args:
            scores: (H_kv, Q * G, K).
        """
        begin, end = self._kv_range(first, last, window)
        num_masked = end - begin if window is not None else last - first
        tile = scores.view(scores.shape[0], last - first, -1, end - begin)
        bias = self._bias(last - first, num_masked, window, scores.dtype)
        tile[..., end - begin - num_masked :].add_(bias)

    def _bias(self, num_queries: int, num_slots: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """(Q, 1, K): 0 where a token may look, else minus infinity; aligned at the bottom right."""
        key = (num_queries, num_slots, window)
        bias = self._biases.get(key)
        if bias is None:
            positions = torch.arange(num_slots - num_queries, num_slots)[:, None]
            slots = torch.arange(num_slots)[None, :]
            hidden = slots > positions
            if window is not None:
                hidden |= slots <= positions - window
            bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))[:, None, :]
            self._biases[key] = bias
        return bias
