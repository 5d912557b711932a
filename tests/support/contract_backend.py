"""A backend that takes nothing a CUDA kernel would not take, so that a CPU run fails where a GPU would.

The rules are those of flash-attn's paged kernels: types, contiguity, what lengths and tables mean, finite
contents of every page that is loaded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.engine.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    AttentionStep,
    Capabilities,
)
from headrace.engine.attention.reference import ReferenceBackend
from headrace.engine.kv.storage import KVStorage


class ContractViolationError(AssertionError):
    """A kernel would refuse this, or read something wrong."""


def require(holds: bool, what: str) -> None:
    """Raise unless `holds`."""
    if not holds:
        raise ContractViolationError(what)


class ContractCheckingBackend:
    """Checks every call, then lets another backend do the work.

    Args:
        storage: the cache that both look at.
        inner: the reference backend if none is given.
        block_size_multiple: what the kernel asks of the block size; 256 for flash-attn 2.
        dtypes: types to take in place of those that `inner` names: an emulated kernel may know more.
    """

    def __init__(
        self,
        storage: KVStorage,
        inner: AttentionBackend | None = None,
        *,
        block_size_multiple: int = 1,
        dtypes: frozenset[torch.dtype] | None = None,
    ) -> None:
        self._storage = storage
        self._inner = ReferenceBackend(storage) if inner is None else inner
        self._capabilities = Capabilities(
            name="contract",
            dtypes=self._inner.capabilities.dtypes if dtypes is None else dtypes,
            block_size_multiple=block_size_multiple,
            max_head_dim=256,
            head_dim_multiple=8,
            supports_graphs=True,
        )
        self.num_steps = 0
        check_storage(storage, self._capabilities)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def begin_step(self, metadata: AttentionMetadata) -> AttentionStep:
        check_metadata(metadata, self._storage)
        self.num_steps += 1
        return _CheckedStep(self._storage, metadata, self._inner.begin_step(metadata))


class _CheckedStep:
    def __init__(self, storage: KVStorage, metadata: AttentionMetadata, inner: AttentionStep) -> None:
        self._storage, self._metadata, self._inner = storage, metadata, inner
        self._written: set[int] = set()

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        shape = self._storage.shape
        wanted = (self._metadata.slot_mapping.shape[0], shape.num_kv_heads, shape.head_dim)
        for name, new in (("key", key), ("value", value)):
            require(tuple(new.shape) == wanted, f"{name} is {tuple(new.shape)}, not {wanted}")
            check_operand(name, new, self._storage)
        require(layer not in self._written, f"layer {layer} was written twice in one step")
        self._inner.write_kv(layer, key, value)
        self._written.add(layer)
        slots = self._metadata.slot_mapping
        # All padding shares the slots of the null block, where anything may stand in the end.
        is_real = slots >= self._storage.layout.block_size
        for name, new, cache in zip(("K", "V"), (key, value), self._storage.layer(layer), strict=True):
            written = cache.flatten(0, 1)[slots[is_real]]
            require(
                torch.equal(written.nan_to_num(), new[is_real].nan_to_num()),
                f"{name} is not where the slot mapping says",
            )

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        shape = self._storage.shape
        require(layer in self._written, f"layer {layer} attends before its KV is written: lengths include it")
        num_tokens = self._metadata.slot_mapping.shape[0]
        require(
            query.dim() == 3 and query.shape[0] == num_tokens and query.shape[2] == shape.head_dim,
            f"query is {tuple(query.shape)} for {num_tokens} tokens of head width {shape.head_dim}",
        )
        require(query.shape[1] % shape.num_kv_heads == 0, "query heads are no multiple of the KV heads")
        check_operand("query", query, self._storage)
        check_loaded_pages(layer, self._metadata, self._storage)
        out = self._inner.attend(layer, query, spec)
        require(out.shape == query.shape and out.dtype == query.dtype, "the output is not like the query")
        return out


def check_storage(storage: KVStorage, capabilities: Capabilities) -> None:
    """One tensor each for K and V, laid out (L, N, S, H_kv, D), of sizes that the kernel takes."""
    layout, shape = storage.layout, storage.shape
    wanted = (shape.num_layers, layout.num_blocks, layout.block_size, shape.num_kv_heads, shape.head_dim)
    for name, cache in (("key", storage.key), ("value", storage.value)):
        require(tuple(cache.shape) == wanted, f"the {name} cache is {tuple(cache.shape)}, not {wanted}")
        require(cache.dtype is shape.dtype, f"the {name} cache is {cache.dtype}, not {shape.dtype}")
        require(cache.stride(-1) == 1, f"the {name} cache is not contiguous on its last axis")
    require(shape.dtype in capabilities.dtypes, f"{shape.dtype} is not one of {capabilities.dtypes}")
    multiple = capabilities.block_size_multiple
    require(layout.block_size % multiple == 0, f"block size {layout.block_size} is no multiple of {multiple}")
    require(
        shape.head_dim % capabilities.head_dim_multiple == 0 and shape.head_dim <= capabilities.max_head_dim,
        f"head width {shape.head_dim} would be padded, with a copy of the whole cache, or refused",
    )


def check_metadata(metadata: AttentionMetadata, storage: KVStorage) -> None:
    """Types, shapes, and that all parts tell the same story."""
    num_rows, num_tokens = metadata.seq_lens.shape[0], metadata.slot_mapping.shape[0]
    require(num_rows > 0 and num_tokens > 0, "an empty batch is refused")
    for name, tensor, dtype, shape in (
        ("slot_mapping", metadata.slot_mapping, torch.int64, (num_tokens,)),
        ("seq_lens", metadata.seq_lens, torch.int32, (num_rows,)),
        ("cu_seqlens_q", metadata.cu_seqlens_q, torch.int32, (num_rows + 1,)),
        ("cu_seqlens_k", metadata.cu_seqlens_k, torch.int32, (num_rows + 1,)),
        ("block_table", metadata.block_table, torch.int32, (num_rows, metadata.block_table.shape[-1])),
    ):
        require(tensor.dtype is dtype, f"{name} is {tensor.dtype}, not {dtype}")
        require(tuple(tensor.shape) == shape, f"{name} is {tuple(tensor.shape)}, not {shape}")
        require(tensor.is_contiguous(), f"{name} is not contiguous")
        require(
            tensor.device == storage.device, f"{name} is on {tensor.device}, the cache on {storage.device}"
        )
    query_lens = metadata.cu_seqlens_q.diff()
    require(metadata.cu_seqlens_q[0].item() == 0, "cu_seqlens_q does not begin with 0")
    require(bool((query_lens > 0).all()), "a row has no query token")
    is_padding = metadata.seq_lens == 0
    require(bool((query_lens[is_padding] == 1).all()), "a row of padding has more than one query token")
    require(
        metadata.cu_seqlens_q[-1].item() == num_tokens, "cu_seqlens_q does not end at the number of tokens"
    )
    expected_k = torch.cat((torch.zeros(1, dtype=torch.int64), metadata.seq_lens.cumsum(0)))
    require(torch.equal(metadata.cu_seqlens_k.long(), expected_k), "cu_seqlens_k is not the sum of seq_lens")
    require(
        bool((metadata.seq_lens >= query_lens)[~is_padding].all()), "a length leaves out this step's tokens"
    )
    for name, value in (("max_query_len", metadata.max_query_len), ("max_seq_len", metadata.max_seq_len)):
        require(type(value) is int, f"{name} is a {type(value).__name__}, not a number of the host")
    require(metadata.max_query_len == int(query_lens.max()), "max_query_len is not the longest query")
    # A captured graph holds the longest row that it may ever be replayed with.
    longest = metadata.block_table.shape[1] * storage.layout.block_size
    require(
        int(metadata.seq_lens.max()) <= metadata.max_seq_len <= longest,
        "max_seq_len is below the longest row, or beyond what the tables hold",
    )
    _check_tables(metadata, storage)


def _check_tables(metadata: AttentionMetadata, storage: KVStorage) -> None:
    block_size, table = storage.layout.block_size, metadata.block_table
    require(
        bool(((table >= 0) & (table < storage.layout.num_blocks)).all()), "a block id is outside of the pool"
    )
    borders = metadata.cu_seqlens_q.tolist()
    for row, seq_len in enumerate(metadata.seq_lens.tolist()):
        num_blocks = -(-seq_len // block_size)
        require(
            num_blocks <= table.shape[1], f"row {row}: {table.shape[1]} blocks can't hold {seq_len} tokens"
        )
        used, padding = table[row, :num_blocks], table[row, num_blocks:]
        require(bool((used > 0).all()), f"row {row} keeps tokens in the null block")
        require(len(set(used.tolist())) == num_blocks, f"row {row} has a block twice")
        require(bool((padding == 0).all()), f"row {row}: padding of its table is not the null block")
        if seq_len == 0:
            slot = int(metadata.slot_mapping[borders[row]])
            require(0 <= slot < block_size, f"row {row} is padding and writes outside of the null block")
            continue
        positions = torch.arange(seq_len - (borders[row + 1] - borders[row]), seq_len)
        slots = used[positions // block_size].long() * block_size + positions % block_size
        require(
            torch.equal(metadata.slot_mapping[borders[row] : borders[row + 1]], slots),
            f"row {row}: its slots are not where its table says that its last tokens go",
        )
    real = metadata.slot_mapping[metadata.slot_mapping >= block_size].tolist()
    require(len(set(real)) == len(real), "two tokens of the step share a slot")


def check_operand(name: str, tensor: Tensor, storage: KVStorage) -> None:
    """What holds for query, key and value alike."""
    require(tensor.dtype is storage.shape.dtype, f"{name} is {tensor.dtype}, the cache {storage.shape.dtype}")
    require(tensor.stride(-1) == 1, f"{name} is not contiguous on its last axis")
    require(tensor.device == storage.device, f"{name} is on {tensor.device}, the cache on {storage.device}")
    # The kernels load 16 bytes at a time.
    jumps = (tensor.storage_offset(), *tensor.stride()[:-1])
    require(
        all(jump * tensor.element_size() % 16 == 0 for jump in jumps), f"{name} is not aligned to 16 bytes"
    )


def check_loaded_pages(layer: int, metadata: AttentionMetadata, storage: KVStorage) -> None:
    """A kernel loads whole pages: slots past a row's length take part with weight 0, and 0 x NaN is NaN."""
    block_size = storage.layout.block_size
    offsets = torch.arange(metadata.block_table.shape[1] * block_size)
    is_unused = offsets >= metadata.seq_lens[:, None]
    for cache in storage.layer(layer):
        pages = cache[metadata.block_table.long()].flatten(1, 2)
        require(bool(torch.isfinite(pages[is_unused]).all()), "a loaded page holds a NaN or an infinity")
