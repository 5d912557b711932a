"""Captured decode steps: the bookkeeping, over "graphs" that run their launches again.

What they capture is frozen all the same: the addresses of the buffers, and every number of the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from headrace.engine.attention.backend import AttentionBackend
from headrace.engine.attention.flash import FlashBackend, FlashKernels
from headrace.engine.attention.reference import ReferenceBackend
from headrace.engine.attention.torch_varlen import TorchVarlenBackend
from headrace.engine.config import CacheLayout, ModelConfig
from headrace.engine.kv.storage import KVStorage
from headrace.engine.models import decoder as decoder_module
from headrace.engine.models import layers, rope
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.loader import load_decoder
from headrace.engine.runner.cuda_graphs import (
    MAX_CAPTURED_ROWS,
    DecodeGraphs,
    captured_sizes,
    graph_reserve,
)
from headrace.engine.runner.model_runner import ModelRunner
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.scheduling.plan import ScheduledSequence, StepPlan, StepResult
from headrace.engine.sequence import SequenceId
from tests.support.contract_backend import ContractCheckingBackend
from tests.support.emulated_kernels import EmulatedKernels
from tests.support.paged_step import storage_for
from tests.support.plan_loop import (
    GREEDY,
    make_sequences,
    num_blocks_for,
    run_ahead_to_end,
    run_to_end,
)
from tests.support.recorded_graphs import RecordingMaker
from tests.support.tiny_models import MAX_POSITIONS, write_tiny_llama

PROMPTS = [(7, 8, 9), (5,), tuple(range(20, 60)), (42, 42), (300, 301, 302, 303), (9, 9, 9)]
FP32 = frozenset({torch.float32})


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    return load_decoder(ModelConfig(folder, dtype="float32"), torch.device("cpu")).decoder


@dataclass
class RepeatingMaker:
    """Notes which captured launch ran when, in the order of capture."""

    num_captured: int = 0
    replayed: list[int] = field(default_factory=list)

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        place = self.num_captured
        self.num_captured += 1
        launch()

        def replay() -> None:
            self.replayed.append(place)
            launch()

        return replay

    def num_bytes(self) -> int:
        return 1000 * self.num_captured


def reference(storage: KVStorage) -> AttentionBackend:
    return ContractCheckingBackend(storage)


def flash(storage: KVStorage) -> AttentionBackend:
    backend = FlashBackend(storage, EmulatedKernels(dtypes=(torch.float32,)).flash)
    return ContractCheckingBackend(storage, backend, block_size_multiple=256, dtypes=FP32)


def torch_varlen(storage: KVStorage) -> AttentionBackend:
    backend = TorchVarlenBackend(storage, EmulatedKernels(dtypes=(torch.float32,)).varlen_attn)
    return ContractCheckingBackend(storage, backend, block_size_multiple=256, dtypes=FP32)


def make_graphs(
    decoder: Decoder,
    attention: AttentionBackend,
    layout: CacheLayout,
    maker: RepeatingMaker,
    max_num_seqs: int = 6,
) -> DecodeGraphs:
    graphs = DecodeGraphs(
        decoder,
        attention,
        layout,
        max_num_seqs=max_num_seqs,
        max_model_len=MAX_POSITIONS,
        maker=maker,
    )
    graphs.capture()
    return graphs


def decode_row(
    sequence_id: int = 0, first_position: int = 4, num_tokens: int = 1, **changes: object
) -> ScheduledSequence:
    row = ScheduledSequence(
        SequenceId(sequence_id),
        first_position,
        tuple(range(1, num_tokens + 1)),
        0,
        tuple(range(1 + 4 * sequence_id, 5 + 4 * sequence_id)),
        True,
        GREEDY,
    )
    return row._replace(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make_backend", "block_size"), [(reference, 4), (reference, 256), (flash, 256), (torch_varlen, 256)]
)
def test_replayed_steps_say_what_plain_ones_say(
    decoder: Decoder, make_backend: Callable[[KVStorage], AttentionBackend], block_size: int
) -> None:
    """Sequences that end one after the other, so that steps shrink through the captured sizes."""

    def outputs(*, with_graphs: bool) -> list[list[int]]:
        sequences = make_sequences(PROMPTS, 9, block_size)
        for i, sequence in enumerate(sequences):
            sequence.max_len -= i
        layout = CacheLayout(num_blocks_for(sequences), block_size)
        attention = make_backend(storage_for(decoder.spec, layout.num_blocks, block_size))
        maker = RepeatingMaker()
        graphs = make_graphs(decoder, attention, layout, maker) if with_graphs else None
        runner = ModelRunner(decoder, attention, layout, graphs=graphs)
        tokens = run_to_end(runner, sequences, chunk=16)
        if with_graphs:
            # Captured at 6, 4, 2 and 1 rows. Three steps compute chunks of a prompt, too; then there are
            # 6, 5, 4, 3, 3 and 2 rows.
            assert maker.replayed == [0, 0, 1, 1, 1, 2]
        return tokens

    assert outputs(with_graphs=True) == outputs(with_graphs=False)


@pytest.fixture
def plain_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """One that computes with torch's own operations alone, as on a GPU: compiled kernels are not recorded."""
    for module in (decoder_module, layers, rope):
        monkeypatch.setattr(module, "native_kit", lambda: None)
    monkeypatch.setattr(layers, "can_prepack", lambda _: False)
    folder = write_tiny_llama(tmp_path, max_position_embeddings=1024)
    return load_decoder(ModelConfig(folder, dtype="float32"), torch.device("cpu")).decoder


@pytest.mark.parametrize("name", ["flash", "torch_varlen"])
@pytest.mark.parametrize("run", [run_to_end, run_ahead_to_end], ids=["known tokens", "tokens of the device"])
def test_what_is_captured_holds_for_every_later_step(
    plain_decoder: Decoder, name: str, run: Callable[..., list[list[int]]]
) -> None:
    """Addresses and numbers of the host stay those of the capture, while rows, lengths and tables change."""
    prompts = [*PROMPTS[:4], tuple(range(20, 272)), tuple(range(40, 300))]

    def outputs(maker: RecordingMaker | None) -> list[list[int]]:
        sequences = make_sequences(prompts, 9, 256)
        for i, sequence in enumerate(sequences):
            sequence.max_len -= i
        layout = CacheLayout(num_blocks_for(sequences), 256)
        storage = storage_for(plain_decoder.spec, layout.num_blocks, 256)
        emulated = EmulatedKernels(dtypes=(torch.float32,))
        kernel = maker.kernel if maker is not None else lambda function: function
        backend: AttentionBackend = FlashBackend(
            storage,
            FlashKernels(kernel(emulated.flash_attn_varlen_func), kernel(emulated.flash_attn_with_kvcache)),
        )
        if name == "torch_varlen":
            backend = TorchVarlenBackend(storage, kernel(emulated.varlen_attn))
        graphs = None
        if maker is not None:
            graphs = DecodeGraphs(
                plain_decoder, backend, layout, max_num_seqs=6, max_model_len=1024, maker=maker
            )
            graphs.capture()
        runner = ModelRunner(plain_decoder, backend, layout, graphs=graphs)
        tokens = (run_to_end if maker is None else run)(runner, sequences)
        assert maker is None or maker.num_replays == 8
        return tokens

    assert outputs(RecordingMaker()) == outputs(None)


def test_drawing_and_logprobs_are_those_of_plain_steps(decoder: Decoder) -> None:
    sampling = [
        SamplingParams(temperature=0.9, seed=i, num_logprobs=2, banned_token_ids=frozenset({3}))
        for i in range(len(PROMPTS))
    ]

    def results(*, with_graphs: bool) -> list[StepResult]:
        sequences = make_sequences(PROMPTS, 5, 4, sampling)
        layout = CacheLayout(num_blocks_for(sequences), 4)
        attention = reference(storage_for(decoder.spec, layout.num_blocks, 4))
        graphs = make_graphs(decoder, attention, layout, RepeatingMaker()) if with_graphs else None
        seen: list[StepResult] = []
        run_to_end(
            ModelRunner(decoder, attention, layout, graphs=graphs),
            sequences,
            on_step=lambda _, result: seen.append(result),
        )
        return seen

    for mine, plain in zip(results(with_graphs=True), results(with_graphs=False), strict=True):
        assert [row.token_ids for row in mine.rows] == [row.token_ids for row in plain.rows]
        for row, other in zip(mine.rows, plain.rows, strict=True):
            assert [t.chosen.logprob for t in row.logprobs] == pytest.approx(
                [t.chosen.logprob for t in other.logprobs], abs=1e-4
            )


@pytest.mark.parametrize(
    "rows",
    [
        (decode_row(num_tokens=2),),
        (decode_row(), decode_row(1, num_tokens=3)),
        (decode_row(is_sampled=False),),
        (decode_row(first_position=0, num_prompt_logprobs=1, num_prompt_tokens=9),),
        (decode_row(num_tokens=3, num_draft_tokens=2),),
        tuple(decode_row(i) for i in range(7)),
        (decode_row(first_position=MAX_POSITIONS, block_ids=tuple(range(1, 70))),),
        (),
    ],
    ids=["two tokens", "mixed", "not sampled", "prompt told", "drafts", "too many", "too long", "none"],
)
def test_steps_of_another_kind_are_left_to_others(
    decoder: Decoder, rows: tuple[ScheduledSequence, ...]
) -> None:
    layout = CacheLayout(80, 4)
    maker = RepeatingMaker()
    graphs = make_graphs(decoder, reference(storage_for(decoder.spec, 80, 4)), layout, maker)

    assert graphs.hidden(StepPlan(0, rows)) is None
    assert maker.replayed == []


@pytest.mark.parametrize(("num_rows", "place"), [(1, 3), (2, 2), (3, 1), (4, 1), (5, 0), (6, 0)])
def test_the_next_larger_graph_is_taken(decoder: Decoder, num_rows: int, place: int) -> None:
    layout, maker = CacheLayout(80, 4), RepeatingMaker()
    graphs = make_graphs(decoder, reference(storage_for(decoder.spec, 80, 4)), layout, maker)

    hidden = graphs.hidden(StepPlan(0, tuple(decode_row(i) for i in range(num_rows))))

    assert hidden is not None
    assert hidden.shape[0] == num_rows
    assert maker.replayed == [place]


def test_a_step_sees_nothing_of_the_one_before(decoder: Decoder) -> None:
    """A large step with long tables, then a small one that is padded where the large one had rows."""
    layout = CacheLayout(80, 4)
    storage = storage_for(decoder.spec, 80, 4)
    attention = ContractCheckingBackend(storage)
    graphs = make_graphs(decoder, attention, layout, RepeatingMaker())
    large = tuple(decode_row(i, first_position=14) for i in range(6))
    small = tuple(decode_row(i, first_position=2) for i in range(5))
    graphs.hidden(StepPlan(0, large))

    # The checker refuses any trace: lengths, borders, tables and slots have to agree in every row.
    after = graphs.hidden(StepPlan(1, small))

    assert after is not None
    fresh = make_graphs(decoder, attention, layout, RepeatingMaker()).hidden(StepPlan(1, small))
    assert torch.equal(after, fresh)  # type: ignore[arg-type]  # not None: the step before was taken


def test_padding_writes_to_the_null_block_alone(decoder: Decoder) -> None:
    layout, storage = CacheLayout(80, 4), storage_for(decoder.spec, 80, 4)
    graphs = make_graphs(decoder, ReferenceBackend(storage), layout, RepeatingMaker())

    graphs.hidden(StepPlan(0, tuple(decode_row(i) for i in range(5))))

    touched = storage.key.flatten(3).any(dim=-1).any(dim=0).nonzero().tolist()
    # Position 4 is the first slot of the second block of each.
    assert [place for place in touched if place[0]] == [[2 + 4 * i, 0] for i in range(5)]


def test_released_graphs_are_not_replayed(decoder: Decoder) -> None:
    layout, maker = CacheLayout(80, 4), RepeatingMaker()
    attention = reference(storage_for(decoder.spec, 80, 4))
    graphs = make_graphs(decoder, attention, layout, maker)
    runner = ModelRunner(decoder, attention, layout, graphs=graphs)
    runner.execute(StepPlan(0, (decode_row(),)))

    runner.close()

    assert graphs.sizes == ()
    assert graphs.hidden(StepPlan(1, (decode_row(),))) is None
    assert len(maker.replayed) == 1


def test_memory_is_counted(decoder: Decoder) -> None:
    layout = CacheLayout(80, 4)
    graphs = make_graphs(decoder, reference(storage_for(decoder.spec, 80, 4)), layout, RepeatingMaker())

    of_graphs, of_tables = 4 * 1000, 6 * (MAX_POSITIONS // 4) * 4
    of_outputs = 6 * 64 * 4
    assert graphs.num_bytes > of_graphs + of_tables + of_outputs
    assert graphs.num_bytes < of_graphs + of_tables + of_outputs + 500


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 6, 8, 16, 100, 256, 512, 5000])
def test_captured_sizes_end_at_the_largest_step_and_pad_little(max_num_seqs: int) -> None:
    sizes = captured_sizes(max_num_seqs)

    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == min(max_num_seqs, MAX_CAPTURED_ROWS)
    for num_rows in range(1, sizes[-1] + 1):
        padded = next(size for size in sizes if size >= num_rows)
        assert padded - num_rows < max(8, num_rows)
    assert graph_reserve(max_num_seqs) % len(sizes) == 0
