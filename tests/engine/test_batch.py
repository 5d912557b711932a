"""The tensors of a step against the plan that they come from, slot by slot."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.attention.backend import AttentionMetadata
from headrace.engine.batch import BatchBuilder, ModelInput, build_batch, uploaded
from headrace.engine.config import CacheLayout
from headrace.engine.errors import IntegrityError
from headrace.engine.kv.storage import KVShape, KVStorage
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.scheduling.plan import ScheduledSequence, StepPlan
from headrace.engine.sequence import SequenceId
from tests.support.contract_backend import check_metadata
from tests.support.shadow_kv import ShadowKV, ShadowViolationError


def make_row(
    sequence_id: int,
    first_position: int,
    token_ids: tuple[int, ...],
    block_ids: tuple[int, ...],
    *,
    is_sampled: bool = True,
) -> ScheduledSequence:
    return ScheduledSequence(
        SequenceId(sequence_id), first_position, token_ids, 0, block_ids, is_sampled, SamplingParams()
    )


def make_storage(num_blocks: int, block_size: int) -> KVStorage:
    shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=8, dtype=torch.float32)
    return KVStorage(CacheLayout(num_blocks, block_size), shape, torch.device("cpu"))


def test_a_step_of_a_prompt_a_chunk_and_a_decode() -> None:
    plan = StepPlan(
        step=0,
        rows=(
            make_row(0, 0, (10, 11, 12), (7,)),
            make_row(1, 3, (20, 21, 22), (2, 5), is_sampled=False),
            make_row(2, 8, (30,), (1, 3, 4)),
        ),
    )

    batch = build_batch(plan, block_size=4)

    assert batch.input_ids.tolist() == [10, 11, 12, 20, 21, 22, 30]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 8]
    assert batch.logits_rows.tolist() == [2, 6]
    attention = batch.attention
    assert attention.slot_mapping.tolist() == [28, 29, 30, 11, 20, 21, 16]
    assert attention.block_table.tolist() == [[7, 0, 0], [2, 5, 0], [1, 3, 4]]
    assert attention.seq_lens.tolist() == [3, 6, 9]
    assert attention.cu_seqlens_q.tolist() == [0, 3, 6, 7]
    assert attention.cu_seqlens_k.tolist() == [0, 3, 9, 18]
    assert (attention.max_query_len, attention.max_seq_len) == (3, 9)


def test_types_are_those_of_the_kernels() -> None:
    batch = build_batch(StepPlan(0, (make_row(0, 0, (1,), (1,)),)), block_size=4)

    assert {t.dtype for t in (batch.input_ids, batch.positions, batch.logits_rows)} == {torch.int64}
    check_metadata(batch.attention, make_storage(2, 4))


def test_what_goes_to_a_device_keeps_its_place_and_its_contract() -> None:
    plan = StepPlan(0, (make_row(0, 0, (10, 11, 12), (1,)), make_row(1, 8, (30,), (2, 3, 4))))
    batch = build_batch(plan, block_size=4)

    there = uploaded(batch, torch.device("cpu"))

    check_metadata(there.attention, make_storage(5, 4))
    for name in ("input_ids", "positions", "logits_rows", "prompt_rows"):
        assert torch.equal(getattr(there, name), getattr(batch, name))
    for name in ("slot_mapping", "block_table", "seq_lens", "cu_seqlens_q", "cu_seqlens_k"):
        assert torch.equal(getattr(there.attention, name), getattr(batch.attention, name))
    assert (there.attention.max_query_len, there.attention.max_seq_len) == (3, 9)


def test_blocks_held_ahead_stay_out_of_the_table() -> None:
    batch = build_batch(StepPlan(0, (make_row(0, 0, (1, 2), (4, 5, 6)),)), block_size=2)

    assert batch.attention.block_table.tolist() == [[4]]


def test_a_step_without_sampled_rows_wants_no_logits() -> None:
    batch = build_batch(StepPlan(0, (make_row(0, 0, (1, 2), (4,), is_sampled=False),)), block_size=2)

    assert batch.logits_rows.shape == (0,)


@pytest.mark.parametrize(
    "plan",
    [
        StepPlan(3, ()),
        StepPlan(3, (make_row(0, 0, (), (1,)),)),
        StepPlan(3, (make_row(0, 0, (1, 2, 3), (1,)),)),
    ],
    ids=["no rows", "no tokens", "short table"],
)
def test_a_broken_plan_is_refused(plan: StepPlan) -> None:
    with pytest.raises(IntegrityError):
        build_batch(plan, block_size=2)


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, int, list[StepPlan]]:
    """Block size, number of blocks, and steps that bring some sequences forward in random chunks."""
    block_size = draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=5))
    num_blocks = [-(-length // block_size) for length in lengths]
    ids = iter(draw(st.permutations(range(1, sum(num_blocks) + 1))))
    tables = [tuple(next(ids) for _ in range(n)) for n in num_blocks]
    done = [0] * len(lengths)
    steps: list[StepPlan] = []
    while any(d < length for d, length in zip(done, lengths, strict=True)):
        rows = []
        for i, length in enumerate(lengths):
            if done[i] == length:
                continue
            chunk = draw(st.integers(1, length - done[i]))
            tokens = tuple(100 * i + p for p in range(done[i], done[i] + chunk))
            rows.append(make_row(i, done[i], tokens, tables[i], is_sampled=draw(st.booleans())))
            done[i] += chunk
        steps.append(StepPlan(len(steps), tuple(rows)))
    return block_size, sum(num_blocks) + 1, steps


@given(plans())
def test_every_token_is_written_where_its_row_reads_it(case: tuple[int, int, list[StepPlan]]) -> None:
    block_size, num_blocks, steps = case
    storage = make_storage(num_blocks, block_size)
    shadow = ShadowKV(storage.layout)

    for plan in steps:
        batch = build_batch(plan, block_size)
        check_metadata(batch.attention, storage)
        shadow.step(plan, batch)
        assert batch.input_ids.tolist() == [t for row in plan.rows for t in row.token_ids]

    for row in {row.sequence_id: row for plan in steps for row in plan.rows}.values():
        assert shadow.tokens(row.sequence_id) == [100 * row.sequence_id + p for p in range(row.end_position)]


def test_the_shadow_notices_a_block_that_two_sequences_hold() -> None:
    shadow = ShadowKV(CacheLayout(4, 2))
    first = StepPlan(0, (make_row(0, 0, (1, 2), (1,)),))
    second = StepPlan(1, (make_row(1, 0, (3,), (1,)),))
    third = StepPlan(2, (make_row(0, 2, (4,), (1, 2)),))
    shadow.step(first, build_batch(first, 2))
    shadow.step(second, build_batch(second, 2))

    with pytest.raises(ShadowViolationError, match="sequence 0, position 0"):
        shadow.step(third, build_batch(third, 2))


def test_metadata_names_its_length_with_this_steps_tokens() -> None:
    attention: AttentionMetadata = build_batch(
        StepPlan(0, (make_row(0, 5, (1, 2), (1, 2, 3, 4)),)), block_size=2
    ).attention

    assert attention.seq_lens.tolist() == [7]


@pytest.mark.parametrize(
    ("first_position", "num_tokens", "num_prompt_tokens", "told"),
    [
        (0, 3, 3, [1, 2]),
        (0, 3, 9, [1, 2, 3]),
        (4, 3, 7, [1, 2]),
        (4, 3, 5, []),
        (4, 3, 2, []),
        (0, 1, 1, []),
    ],
    ids=["whole prompt", "chunk", "last chunk", "last token and output", "output alone", "one token"],
)
def test_rows_that_tell_their_prompt_want_what_stands_before_each_of_its_tokens(
    first_position: int, num_tokens: int, num_prompt_tokens: int, told: list[int]
) -> None:
    silent = make_row(0, 0, (9,), (1,))
    telling = make_row(1, first_position, tuple(range(num_tokens)), (2, 3))._replace(
        num_prompt_tokens=num_prompt_tokens, num_prompt_logprobs=0
    )

    batch = build_batch(StepPlan(0, (silent, telling, silent)), block_size=4)

    assert batch.prompt_rows.tolist() == told
    assert batch.logits_rows.tolist() == [0, num_tokens, num_tokens + 1]


@st.composite
def decoding(draw: st.DrawFn) -> tuple[int, list[StepPlan]]:
    """Block size and steps, nearly all of which only decode, of sequences that come, grow and go; each holds
    some blocks ahead."""
    block_size = draw(st.integers(1, 3))
    tables: dict[int, tuple[int, ...]] = {}
    positions: dict[int, int] = {}
    ids, steps = iter(range(1, 10_000)), list[StepPlan]()
    for step in range(draw(st.integers(1, 12))):
        for i in draw(st.sets(st.integers(0, 4), min_size=1)):
            if i in tables and draw(st.booleans()):
                del tables[i], positions[i]
            elif i not in tables:
                tables[i], positions[i] = (), draw(st.integers(0, 9))
        rows = []
        for i, position in positions.items():
            if position >= block_size * len(tables[i]):
                num_new = position // block_size + 1 - len(tables[i]) + draw(st.integers(0, 2))
                tables[i] += tuple(next(ids) for _ in range(num_new))
            rows.append(
                make_row(i, position, (next(ids),), tables[i], is_sampled=draw(st.integers(0, 20)) > 0)
            )
            positions[i] += 1
        if rows:
            steps.append(StepPlan(step, tuple(rows)))
    return block_size, steps


@given(decoding())
def test_tensors_that_are_kept_say_what_new_ones_would(case: tuple[int, list[StepPlan]]) -> None:
    block_size, steps = case
    builder = BatchBuilder(block_size)

    for plan in steps:
        assert _told(builder.build(plan)) == _told(build_batch(plan, block_size))


def _told(batch: ModelInput) -> list[object]:
    """All numbers of a step; of the block table the columns that say anything."""
    attention = batch.attention
    table = attention.block_table
    while table.shape[1] > 1 and not table[:, -1].any():
        table = table[:, :-1]
    tensors = (
        *(batch.input_ids, batch.positions, batch.logits_rows, batch.prompt_rows, batch.taken_from, table),
        *(attention.slot_mapping, attention.seq_lens, attention.cu_seqlens_q, attention.cu_seqlens_k),
    )
    numbers = [(tensor.dtype, tensor.tolist()) for tensor in tensors]
    return [*numbers, attention.max_query_len, attention.max_seq_len]


def test_a_step_that_was_refused_leaves_nothing_behind() -> None:
    builder = BatchBuilder(block_size=2)
    good = StepPlan(0, (make_row(0, 3, (1,), (4, 5)), make_row(1, 1, (2,), (6,))))
    builder.build(good)
    with pytest.raises(IntegrityError, match="sequence 1: 3 tokens in 1 blocks"):
        builder.build(StepPlan(1, (make_row(2, 4, (3,), (7, 8, 9)), make_row(1, 2, (4,), (6,)))))

    assert _told(builder.build(good)) == _told(build_batch(good, 2))
