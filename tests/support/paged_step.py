"""One step of one sequence over a paged cache, without scheduler or runner."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.engine.attention.backend import AttentionMetadata
from headrace.engine.attention.reference import ReferenceBackend
from headrace.engine.config import CacheLayout
from headrace.engine.kv.storage import KVShape, KVStorage
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.spec import DecoderSpec


def storage_for(
    spec: DecoderSpec, num_blocks: int, block_size: int = 16, dtype: torch.dtype = torch.float32
) -> KVStorage:
    """A cache of the decoder's shape."""
    shape = KVShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype)
    return KVStorage(CacheLayout(num_blocks, block_size), shape, torch.device("cpu"))


def logits_of(decoder: Decoder, ids: Tensor) -> Tensor:
    """Logits at every position, all tokens in one step."""
    length, block_size = len(ids), 16
    num_blocks = -(-length // block_size)
    positions = torch.arange(length)
    borders = torch.tensor([0, length], dtype=torch.int32)
    metadata = AttentionMetadata(
        slot_mapping=positions + block_size,
        block_table=torch.arange(1, num_blocks + 1, dtype=torch.int32)[None],
        seq_lens=borders[1:],
        cu_seqlens_q=borders,
        cu_seqlens_k=borders,
        max_query_len=length,
        max_seq_len=length,
    )
    backend = ReferenceBackend(storage_for(decoder.spec, num_blocks + 1, dtype=decoder.dtype))
    return decoder.forward(ids, positions, backend.begin_step(metadata), positions)
