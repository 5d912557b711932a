"""Decode steps captured once as CUDA graphs and replayed: a step costs one launch, not one per kernel.

Only steps in which every row computes one token and draws the next are captured, at some batch sizes. A step
is filled up to the next size with rows of length 0 over the null block. A graph has fixed addresses and
fixed host values: it reads static buffers, and its bounds are those of the longest sequence.

All but `CudaGraphMaker` is plain bookkeeping that runs on any device.

Letters: B rows of the captured size, R rows of the step, M width of the block table.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from headrace.engine.attention.backend import AttentionBackend, AttentionMetadata
from headrace.engine.batch import build_batch, with_drawn
from headrace.engine.config import CacheLayout
from headrace.engine.models.forward import ForwardModel
from headrace.engine.scheduling.plan import StepPlan

logger = logging.getLogger(__name__)

MAX_CAPTURED_ROWS = 512
"""Larger steps keep a GPU busy by themselves."""
GRAPH_BYTES_EACH = 16 * 2**20
"""What is set aside per graph before the KV pool takes the rest."""


class GraphMaker(Protocol):
    """Captures what a function launches."""

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Capture.

        Args:
            launch: reads and writes static buffers alone; called as often as capturing needs it.

        Returns:
            What does the same again.
        """
        ...

    def num_bytes(self) -> int:
        """Memory that all captured graphs hold beside the buffers."""
        ...


class CudaGraphMaker:
    """Graphs that share one memory pool: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._num_bytes = 0

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """See `GraphMaker`."""
        # Libraries set themselves up at their first calls, which must not be captured.
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            launch()
        torch.cuda.current_stream(self._device).wait_stream(side)
        torch.cuda.synchronize(self._device)
        before, _ = torch.cuda.mem_get_info(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            launch()
        after, _ = torch.cuda.mem_get_info(self._device)
        self._num_bytes += max(0, before - after)
        return graph.replay

    def num_bytes(self) -> int:
        """See `GraphMaker`."""
        return self._num_bytes


def captured_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes that are captured, rising: few enough to start soon, close enough to pad little."""
    most = min(max_num_seqs, MAX_CAPTURED_ROWS)
    steps = [1, 2, 4, *range(8, 32, 8), *range(32, 128, 16), *range(128, MAX_CAPTURED_ROWS, 64)]
    return (*(size for size in steps if size < most), most)


class DecodeGraphs:
    """See the module.

    Args:
        model, attention: what the captured steps run; the same that other steps run.
        layout: of the pool that `attention` is over.
        max_num_seqs: most rows of a step.
        max_model_len: longest sequence, tokens.
        maker: captures.
    """

    def __init__(
        self,
        model: ForwardModel,
        attention: AttentionBackend,
        layout: CacheLayout,
        *,
        max_num_seqs: int,
        max_model_len: int,
        maker: GraphMaker,
    ) -> None:
        self._model, self._attention, self._maker = model, attention, maker
        self._block_size = layout.block_size
        self._sizes = captured_sizes(max_num_seqs)
        # No sequence holds more than the pool.
        width = min(layout.num_blocks_for(max_model_len), layout.num_usable_blocks)
        self._buffers = _StaticBuffers(self._sizes[-1], width, model.device)
        self._replays: dict[int, Callable[[], None]] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes that have a graph, rising."""
        return self._sizes if self._replays else ()

    @property
    def num_bytes(self) -> int:
        """Memory that graphs and buffers hold."""
        return self._buffers.num_bytes + self._maker.num_bytes()

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all sizes, the largest first: the smaller ones then fit into its memory."""
        self._buffers.clear()
        self._replays = {
            size: self._maker.capture(partial(self._launch, size)) for size in reversed(self._sizes)
        }
        logger.info(
            "decode steps are captured as graphs at %s rows, %.1f MiB",
            ", ".join(map(str, self.sizes)),
            self.num_bytes / 2**20,
        )

    @torch.inference_mode()
    def hidden(self, plan: StepPlan, drawn: Tensor | None = None) -> Tensor | None:
        """Run a step by its graph.

        Args:
            drawn: (P,), int64: what the step draws that this one follows; None where it follows none.

        Returns:
            (R, hidden size), as `ForwardModel.hidden` gives it; good until the next call. None where the step
            is not of the captured kind: then nothing was done.
        """
        size = self._size_for(plan)
        if size is None:
            return None
        self._buffers.fill(plan, self._block_size, size, drawn)
        self._replays[size]()
        return self._buffers.out[: len(plan.rows)]

    def release(self) -> None:
        """Let go of the graphs; every step then is not of the captured kind."""
        self._replays.clear()

    def _size_for(self, plan: StepPlan) -> int | None:
        """The least captured size that holds the step; None where the step is of another kind."""
        num_rows, sizes = len(plan.rows), self.sizes
        if not sizes or not 0 < num_rows <= sizes[-1]:
            return None
        most = self._buffers.width * self._block_size
        for row in plan.rows:
            if len(row.token_ids) != 1 or not row.is_sampled or row.end_position > most:
                return None
            if row.num_prompt_logprobs is not None and row.num_prompt_successors:
                return None
        return sizes[bisect_left(sizes, num_rows)]

    def _launch(self, size: int) -> None:
        buffers = self._buffers
        step = self._attention.begin_step(buffers.metadata(size, self._block_size))
        buffers.keep(
            self._model.hidden(
                buffers.input_ids[:size], buffers.positions[:size], step, buffers.all_rows[:size]
            )
        )


class _StaticBuffers:
    """What graphs read and write: always at the same addresses."""

    def __init__(self, num_rows: int, width: int, device: torch.device) -> None:
        self.width = width
        self._device = device
        # By kind of number, so that a step's are brought here in three copies.
        self._longs = torch.zeros((4, num_rows), dtype=torch.int64, device=device)
        self._ints = torch.zeros(2 * num_rows + 1, dtype=torch.int32, device=device)
        self._table = torch.zeros((num_rows, width), dtype=torch.int32, device=device)
        self.input_ids, self.positions, self._slots, self._taken_from = self._longs
        self._seq_lens, self._cu_seqlens_k = self._ints[:num_rows], self._ints[num_rows:]
        self._cu_seqlens_q = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self.all_rows = torch.arange(num_rows, device=device)
        self.out = torch.empty((0, 0), device=device)

    @property
    def num_bytes(self) -> int:
        """Memory of all of them."""
        return sum(
            tensor.nbytes
            for tensor in (self._longs, self._ints, self._table, self._cu_seqlens_q, self.all_rows, self.out)
        )

    def metadata(self, size: int, block_size: int) -> AttentionMetadata:
        """The first `size` rows, with bounds that cover whatever they will hold."""
        return AttentionMetadata(
            slot_mapping=self._slots[:size],
            block_table=self._table[:size],
            seq_lens=self._seq_lens[:size],
            cu_seqlens_q=self._cu_seqlens_q[: size + 1],
            cu_seqlens_k=self._cu_seqlens_k[: size + 1],
            max_query_len=1,
            max_seq_len=self.width * block_size,
        )

    def clear(self) -> None:
        """Padding alone: what is there while a graph is captured."""
        for tensor in (self._longs, self._ints, self._table):
            tensor.zero_()

    def fill(self, plan: StepPlan, block_size: int, size: int, drawn: Tensor | None) -> None:
        """Bring a step's numbers here, padded with rows of length 0.

        Copies need not be through when this returns: what they read belongs to torch's allocator of
        page-locked memory, which keeps it until they are.
        """
        batch = build_batch(plan, block_size)
        attention, num_rows = batch.attention, len(plan.rows)
        longs = self._staged(self._longs.shape, torch.int64)
        longs[0, :num_rows] = batch.input_ids
        longs[1, :num_rows] = batch.positions
        longs[2, :num_rows] = attention.slot_mapping
        if drawn is not None:
            longs[3, :num_rows] = batch.taken_from
        ints = self._staged(self._ints.shape, torch.int32)
        ints[:num_rows] = attention.seq_lens
        cumulated = ints[len(self._seq_lens) :]
        cumulated[: num_rows + 1] = attention.cu_seqlens_k
        cumulated[num_rows + 1 :] = attention.cu_seqlens_k[-1]
        table = self._staged((size, self.width), torch.int32)
        table[:num_rows, : attention.block_table.shape[1]] = attention.block_table
        self._longs.copy_(longs, non_blocking=True)
        if drawn is not None:
            mine = self.input_ids[:num_rows]
            mine.copy_(with_drawn(mine, self._taken_from[:num_rows], drawn))
        self._ints.copy_(ints, non_blocking=True)
        self._table[:size].copy_(table, non_blocking=True)

    def keep(self, hidden: Tensor) -> None:
        """Copy a step's result to its place. The first, and so largest, decides how much place there is."""
        if self.out.shape[0] < hidden.shape[0]:
            self.out = torch.empty_like(hidden)
        self.out[: hidden.shape[0]].copy_(hidden)

    def _staged(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=self._device.type == "cuda")


def graph_reserve(max_num_seqs: int) -> int:
    """Bytes to keep free for graphs of steps of up to so many rows."""
    return GRAPH_BYTES_EACH * len(captured_sizes(max_num_seqs))
