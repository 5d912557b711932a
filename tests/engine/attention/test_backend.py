"""Each rule of the kernels' contract, broken once: the checker that guards CPU runs must notice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from headrace.engine.attention.backend import AttentionMetadata, AttentionSpec
from headrace.engine.attention.reference import ReferenceBackend
from headrace.engine.config import CacheLayout
from headrace.engine.kv.storage import KVShape, KVStorage
from tests.support.attention_cases import AttentionCase, make_case
from tests.support.contract_backend import ContractCheckingBackend, ContractViolationError

SPEC = AttentionSpec(scale=0.25)
# The last row ends in the middle of its second block.
ROWS = [(3, 2), (1, 3), (5, 1)]
BLOCK = 4


def case_of(**options: int | float | torch.dtype) -> AttentionCase:
    return make_case(ROWS, **{"block_size": BLOCK, "table_padding": 1, **options})  # type: ignore[arg-type]


def edited(tensor: torch.Tensor, place: int | tuple[int, int], value: int) -> torch.Tensor:
    changed = tensor.clone()
    changed[place] = value
    return changed


Broken = Callable[[AttentionMetadata], AttentionMetadata]

BROKEN_METADATA: Mapping[str, tuple[str, Broken]] = {
    "tables of int64": (
        "block_table is torch.int64",
        lambda m: replace(m, block_table=m.block_table.long()),
    ),
    "lengths of int64": ("seq_lens is torch.int64", lambda m: replace(m, seq_lens=m.seq_lens.long())),
    "query borders of int64": (
        "cu_seqlens_q is torch.int64",
        lambda m: replace(m, cu_seqlens_q=m.cu_seqlens_q.long()),
    ),
    "KV borders of int64": (
        "cu_seqlens_k is torch.int64",
        lambda m: replace(m, cu_seqlens_k=m.cu_seqlens_k.long()),
    ),
    "slots of int32": (
        "slot_mapping is torch.int32",
        lambda m: replace(m, slot_mapping=m.slot_mapping.int()),
    ),
    "a table that is not contiguous": (
        "block_table is not contiguous",
        lambda m: replace(m, block_table=m.block_table.T.contiguous().T),
    ),
    "a table for another batch": (
        "block_table is",
        lambda m: replace(m, block_table=m.block_table[:-1]),
    ),
    "padding of -1": (
        "outside of the pool",
        lambda m: replace(m, block_table=edited(m.block_table, (0, -1), -1)),
    ),
    "padding of another's block": (
        "padding of its table is not the null block",
        lambda m: replace(m, block_table=edited(m.block_table, (0, -1), int(m.block_table[1, 0]))),
    ),
    "an id beyond the pool": (
        "outside of the pool",
        lambda m: replace(m, block_table=edited(m.block_table, (0, 0), 1000)),
    ),
    "tokens in the null block": (
        "keeps tokens in the null block",
        lambda m: replace(m, block_table=edited(m.block_table, (0, 0), 0)),
    ),
    "a block twice": (
        "a block twice",
        lambda m: replace(m, block_table=edited(m.block_table, (0, 0), int(m.block_table[0, 1]))),
    ),
    "a table that is too narrow": (
        "max_seq_len is|can't hold",
        lambda m: replace(m, block_table=m.block_table[:, :1].contiguous()),
    ),
    "lengths before this step": (
        "leaves out this step's tokens",
        lambda m: replace(
            m,
            seq_lens=m.seq_lens - m.cu_seqlens_q.diff(),
            cu_seqlens_k=m.cu_seqlens_k - m.cu_seqlens_q,
            max_seq_len=int((m.seq_lens - m.cu_seqlens_q.diff()).max()),
        ),
    ),
    "KV borders that are no sums": (
        "cu_seqlens_k is not the sum",
        lambda m: replace(m, cu_seqlens_k=edited(m.cu_seqlens_k, 1, 4)),
    ),
    "query borders without the leading 0": (
        "cu_seqlens_q does not begin with 0",
        lambda m: replace(m, cu_seqlens_q=m.cu_seqlens_q + 1),
    ),
    "a row without queries": (
        "a row has no query token",
        lambda m: replace(m, cu_seqlens_q=edited(m.cu_seqlens_q, 1, 0)),
    ),
    "queries left over": (
        "does not end at the number of tokens",
        lambda m: replace(m, cu_seqlens_q=edited(m.cu_seqlens_q, 3, 7), max_query_len=3),
    ),
    "a longest query of another step": (
        "max_query_len is not",
        lambda m: replace(m, max_query_len=2),
    ),
    "a longest row that is too short": ("max_seq_len is below", lambda m: replace(m, max_seq_len=5)),
    "a longest row on the device": (
        "not a number of the host",
        lambda m: replace(m, max_seq_len=m.seq_lens.max()),  # type: ignore[arg-type]
    ),
    "a slot of another row": (
        "its slots are not where its table says",
        lambda m: replace(m, slot_mapping=m.slot_mapping.flip(0)),
    ),
    "an empty batch": (
        "an empty batch",
        lambda m: replace(
            m,
            slot_mapping=m.slot_mapping[:0],
            block_table=m.block_table[:0],
            seq_lens=m.seq_lens[:0],
            cu_seqlens_q=m.cu_seqlens_q[:1],
            cu_seqlens_k=m.cu_seqlens_k[:1],
        ),
    ),
}


@pytest.mark.parametrize(("message", "break_it"), BROKEN_METADATA.values(), ids=BROKEN_METADATA.keys())
def test_metadata_that_a_kernel_would_misread_is_refused(message: str, break_it: Broken) -> None:
    case = case_of()
    backend = ContractCheckingBackend(case.storage)
    backend.begin_step(case.metadata)

    with pytest.raises(ContractViolationError, match=message):
        backend.begin_step(break_it(case.metadata))


@pytest.mark.parametrize(
    ("message", "slot", "num_queries"),
    [("writes outside of the null block", 4, 1), ("more than one query token", 0, 2)],
)
def test_a_row_of_padding_is_one_token_of_the_null_block(message: str, slot: int, num_queries: int) -> None:
    case = case_of()
    metadata = case.metadata

    def padded(slot: int, num_queries: int) -> AttentionMetadata:
        slots = torch.full((num_queries,), slot, dtype=torch.int64)
        end = metadata.cu_seqlens_q[-1:] + num_queries
        return replace(
            metadata,
            slot_mapping=torch.cat((metadata.slot_mapping, slots)),
            block_table=torch.nn.functional.pad(metadata.block_table, (0, 0, 0, 1)),
            seq_lens=torch.nn.functional.pad(metadata.seq_lens, (0, 1)),
            cu_seqlens_q=torch.cat((metadata.cu_seqlens_q, end)),
            cu_seqlens_k=torch.cat((metadata.cu_seqlens_k, metadata.cu_seqlens_k[-1:])),
        )

    backend = ContractCheckingBackend(case.storage)
    backend.begin_step(padded(slot=0, num_queries=1))

    with pytest.raises(ContractViolationError, match=message):
        backend.begin_step(padded(slot, num_queries))


Operand = Callable[[torch.Tensor], torch.Tensor]


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("is torch.bfloat16, the cache torch.float32", lambda t: t.bfloat16()),
        ("not contiguous on its last axis", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)),
        ("not aligned to 16 bytes", lambda t: torch.nn.functional.pad(t, (1, 0))[..., 1:]),
        ("is", lambda t: t[:-1]),
    ],
    ids=["type", "layout", "alignment", "tokens"],
)
@pytest.mark.parametrize("operand", ["query", "key", "value"])
def test_operands_that_a_kernel_would_refuse_are_refused(operand: str, message: str, change: Operand) -> None:
    case = case_of()
    changed = {
        "query": replace(case, query=change(case.query)),
        "key": replace(case, key=change(case.key)),
        "value": replace(case, value=change(case.value)),
    }[operand]

    with pytest.raises(ContractViolationError, match=message):
        changed.run(ContractCheckingBackend(case.storage), SPEC)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("block size 4 is no multiple of 256", {}),
        ("head width 20 would be padded", {"head_dim": 20, "block_size": 256}),
        ("head width 264 would be padded", {"head_dim": 264, "block_size": 256}),
    ],
)
def test_caches_that_a_kernel_would_refuse_are_refused(message: str, options: dict[str, int]) -> None:
    case = case_of(**options)

    with pytest.raises(ContractViolationError, match=message):
        ContractCheckingBackend(case.storage, block_size_multiple=256)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("cache is", lambda cache: cache.transpose(2, 3).contiguous()),
        ("cache is torch.bfloat16, not torch.float32", torch.Tensor.bfloat16),
        ("not contiguous on its last axis", lambda cache: cache.mT.contiguous().mT),
    ],
    ids=["heads before slots", "type", "last axis"],
)
@pytest.mark.parametrize("which", ["key", "value"])
def test_caches_that_are_laid_out_otherwise_are_refused(which: str, message: str, change: Operand) -> None:
    storage = case_of().storage
    setattr(storage, which, change(getattr(storage, which)))

    with pytest.raises(ContractViolationError, match=message):
        ContractCheckingBackend(storage)


def test_a_loaded_page_that_is_not_finite_is_noticed() -> None:
    case = case_of(filler=float("nan"))

    with pytest.raises(ContractViolationError, match="a loaded page holds a NaN"):
        case.run(ContractCheckingBackend(case.storage), SPEC)


def test_attending_before_the_write_is_noticed() -> None:
    case = case_of()
    step = ContractCheckingBackend(case.storage).begin_step(case.metadata)

    with pytest.raises(ContractViolationError, match="attends before its KV is written"):
        step.attend(0, case.query, SPEC)


def test_writing_twice_is_noticed() -> None:
    case = case_of()
    step = ContractCheckingBackend(case.storage).begin_step(case.metadata)
    step.write_kv(0, case.key, case.value)

    with pytest.raises(ContractViolationError, match="written twice"):
        step.write_kv(0, case.key, case.value)


def test_kv_that_is_written_elsewhere_is_noticed() -> None:
    case = case_of()
    elsewhere = KVStorage(case.storage.layout, case.storage.shape, torch.device("cpu"))

    with pytest.raises(ContractViolationError, match="K is not where the slot mapping says"):
        case.run(ContractCheckingBackend(case.storage, ReferenceBackend(elsewhere)), SPEC)


def test_what_keeps_the_contract_passes() -> None:
    case = case_of()

    out = case.run(ContractCheckingBackend(case.storage), SPEC)

    assert torch.equal(out, case.run(ReferenceBackend(case.storage), SPEC))


def test_a_new_cache_is_finite_everywhere() -> None:
    storage = KVStorage(CacheLayout(3, BLOCK), KVShape(2, 1, 8, torch.float16), torch.device("cpu"))

    assert not storage.key.any()
    assert not storage.value.any()
