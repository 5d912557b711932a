"""Logprobs through the real runner over a tiny model are those of transformers, however steps are cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from headrace.engine.attention.backend import AttentionStep
from headrace.engine.attention.cpu import CpuBackend
from headrace.engine.config import CacheLayout, ModelConfig
from headrace.engine.kv.storage import KVStorage
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.forward import ForwardModel
from headrace.engine.models.loader import load_decoder
from headrace.engine.outputs import TokenLogprobs
from headrace.engine.runner.model_runner import ModelRunner
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.scheduling.plan import StepPlan
from tests.support.plan_loop import LoopSequence, make_sequences, num_blocks_for, run_to_end
from tests.support.tiny_models import tiny_llama, write_tiny_llama

PROMPTS = (
    (7, 8, 9),
    (100, 200, 300, 400, 500, 11, 12, 13, 14, 15, 16, 17, 18),
    (5,),
    tuple(range(20, 160)),
    (42, 42, 42, 42, 42, 42, 42),
)
NUM_NEW = 6
BLOCK_SIZE = 4
TELLING = (
    SamplingParams(temperature=0.0, num_logprobs=5, num_prompt_logprobs=3),
    SamplingParams(temperature=0.9, seed=4, num_logprobs=0, num_prompt_logprobs=0),
    SamplingParams(temperature=0.8, top_p=0.9, num_logprobs=20),
    SamplingParams(temperature=0.0, num_prompt_logprobs=1),
    SamplingParams(
        temperature=1.2, repetition_penalty=1.4, frequency_penalty=0.5, num_logprobs=2, num_prompt_logprobs=5
    ),
)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    return load_decoder(ModelConfig(folder, dtype="float32"), torch.device("cpu")).decoder


def make_runner(decoder: Decoder, layout: CacheLayout, model: ForwardModel | None = None) -> ModelRunner:
    storage = KVStorage(layout, decoder.kv_shape, torch.device("cpu"))
    return ModelRunner(decoder if model is None else model, CpuBackend(storage), layout)


def run(
    decoder: Decoder,
    sequences: Sequence[LoopSequence],
    *,
    chunk: int = 10**9,
    model: ForwardModel | None = None,
) -> Sequence[LoopSequence]:
    layout = CacheLayout(num_blocks_for(sequences), BLOCK_SIZE)
    run_to_end(make_runner(decoder, layout, model), sequences, chunk=chunk)
    return sequences


@cache
def reference(token_ids: tuple[int, ...]) -> Tensor:
    """(tokens, V): log-probabilities of what follows each, by transformers."""
    with torch.no_grad():
        logits: Tensor = tiny_llama()(torch.tensor([token_ids])).logits[0]
    return torch.log_softmax(logits, dim=-1)


def assert_told(entry: TokenLogprobs, logprobs: Tensor, token_id: int, num_top: int) -> None:
    """`entry` tells the (V,) of transformers."""
    assert entry.chosen.token_id == token_id
    assert len(entry.top) == num_top
    assert [told.rank for told in entry.top] == list(range(1, num_top + 1))
    # Whoever has a rank here, transformers may rank a neighbour that is as likely to 1e-4.
    ordered = logprobs.sort(descending=True).values
    for told in (entry.chosen, *entry.top):
        assert told.logprob == pytest.approx(logprobs[told.token_id].item(), abs=1e-4)
        assert told.logprob == pytest.approx(ordered[told.rank - 1].item(), abs=1e-4)


def assert_all_told(sequence: LoopSequence) -> None:
    """Every place once, equal to transformers, and nothing that was not asked for."""
    params, num_prompt = sequence.sampling, sequence.num_prompt_tokens
    expected = reference(tuple(sequence.token_ids))
    if params.num_logprobs is None:
        assert sequence.logprobs == []
    else:
        assert len(sequence.logprobs) == NUM_NEW
        for position, entry in enumerate(sequence.logprobs, start=num_prompt):
            token_id = sequence.token_ids[position]
            assert_told(entry, expected[position - 1], token_id, params.num_logprobs)
    if params.num_prompt_logprobs is None:
        assert sequence.prompt_logprobs == {}
    else:
        assert sorted(sequence.prompt_logprobs) == list(range(1, num_prompt))
        for position, entry in sequence.prompt_logprobs.items():
            token_id = sequence.token_ids[position]
            assert_told(entry, expected[position - 1], token_id, params.num_prompt_logprobs)


def alone(decoder: Decoder, prompt: tuple[int, ...], params: SamplingParams) -> LoopSequence:
    return run(decoder, make_sequences([prompt], NUM_NEW, BLOCK_SIZE, [params]))[0]


@pytest.mark.parametrize("params", TELLING, ids=lambda p: f"{p.num_logprobs}-{p.num_prompt_logprobs}")
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_alone(decoder: Decoder, prompt: tuple[int, ...], params: SamplingParams) -> None:
    """The longest prompt has more to tell than is held at a time."""
    assert_all_told(alone(decoder, prompt, params))


@pytest.mark.parametrize("chunk", range(1, 14))
def test_every_chunk_size_of_one_prompt(decoder: Decoder, chunk: int) -> None:
    sequence = make_sequences(PROMPTS[1:2], NUM_NEW, BLOCK_SIZE, TELLING[:1])

    assert_all_told(run(decoder, sequence, chunk=chunk)[0])


@pytest.mark.parametrize("chunk", [1, 2, 5, 16, 63, 64, 65, 139, 140, 10**9])
def test_batched_and_chunked(decoder: Decoder, chunk: int) -> None:
    """Rows that tell much, little and nothing share their steps, and draw what they draw alone."""
    sequences = run(decoder, make_sequences(PROMPTS, NUM_NEW, BLOCK_SIZE, TELLING), chunk=chunk)

    for sequence, prompt, params in zip(sequences, PROMPTS, TELLING, strict=True):
        assert_all_told(sequence)
        assert sequence.token_ids == alone(decoder, prompt, params).token_ids


@pytest.mark.parametrize("chunk", [3, 10**9])
@pytest.mark.parametrize("after_step", [0, 2, 4])
def test_after_a_preemption(decoder: Decoder, chunk: int, after_step: int) -> None:
    """What is computed again tells nothing of the output again, and the prompt the same."""
    sequences = make_sequences(PROMPTS[:3], NUM_NEW, BLOCK_SIZE, TELLING[:3])
    layout = CacheLayout(num_blocks_for(sequences), BLOCK_SIZE)
    runner = make_runner(decoder, layout)
    step = 0
    while rows := [(seq, row) for seq in sequences if (row := seq.next_row(chunk)) is not None]:
        result = runner.execute(StepPlan(step, tuple(row for _, row in rows)))
        for (seq, row), outcome in zip(rows, result.rows, strict=True):
            seq.take(row, outcome)
        if step == after_step:
            sequences[1].num_computed = 0
        step += 1

    for sequence, prompt, params in zip(sequences, PROMPTS[:3], TELLING[:3], strict=True):
        assert_all_told(sequence)
        assert sequence.token_ids == alone(decoder, prompt, params).token_ids


def test_telling_changes_no_token_and_controls_change_no_logprob(decoder: Decoder) -> None:
    """Logprobs are the model's own: those of a forced token, too."""
    plain = alone(decoder, PROMPTS[0], SamplingParams(temperature=0.0))
    told = alone(decoder, PROMPTS[0], TELLING[0])
    forced = alone(decoder, PROMPTS[0], replace(TELLING[0], allowed_token_ids=frozenset({17})))

    assert told.token_ids == plain.token_ids
    assert forced.token_ids[3:] == [17] * NUM_NEW
    assert_all_told(forced)
    assert forced.logprobs[0].top == told.logprobs[0].top
    assert forced.logprobs[0].chosen.rank > 1


def test_rows_whose_masks_leave_nothing_fail_alone_and_say_why(decoder: Decoder) -> None:
    greedy = SamplingParams(temperature=0.0, num_logprobs=1)
    impossible = replace(greedy, allowed_token_ids=frozenset({4}), bad_words=((4, 4, 4),))
    sequences = run(decoder, make_sequences(PROMPTS[:3], NUM_NEW, 4, [greedy, impossible, greedy]))

    assert sequences[1].token_ids == [*PROMPTS[1], 4, 4]
    assert len(sequences[1].logprobs) == 2
    assert len(sequences[1].failures) == 1
    assert "leaves no token that could be drawn" in sequences[1].failures[0]
    for sequence in (sequences[0], sequences[2]):
        assert sequence.failures == []
        assert_all_told(sequence)


class SickHead:
    """Turns the logits behind one token id into NaN."""

    def __init__(self, decoder: Decoder, token_id: int) -> None:
        self._decoder, self._token_id = decoder, token_id

    @property
    def device(self) -> torch.device:
        return self._decoder.device

    def hidden(self, input_ids: Tensor, positions: Tensor, attention: AttentionStep, rows: Tensor) -> Tensor:
        hidden = self._decoder.hidden(input_ids, positions, attention, rows)
        return hidden.masked_fill((input_ids == self._token_id)[rows][:, None], math.nan)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden)


@pytest.mark.parametrize("chunk", [2, 10**9])
def test_a_prompt_whose_logits_are_not_finite_fails_alone(decoder: Decoder, chunk: int) -> None:
    prompts = [PROMPTS[0], (1, 66, 3, 4, 5, 6, 7, 8), PROMPTS[1]]
    params = [TELLING[0]] * 3
    sequences = run(
        decoder, make_sequences(prompts, NUM_NEW, 4, params), chunk=chunk, model=SickHead(decoder, 66)
    )

    assert len(sequences[1].failures) == 1
    assert "not finite" in sequences[1].failures[0]
    assert sequences[1].token_ids == list(prompts[1])
    for sequence in (sequences[0], sequences[2]):
        assert_all_told(sequence)


class FlatHead:
    """Says of every token that it is as likely as each other one, and remembers how many rows at a time."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.num_rows: list[int] = []

    @property
    def device(self) -> torch.device:
        return self._decoder.device

    def hidden(self, input_ids: Tensor, positions: Tensor, attention: AttentionStep, rows: Tensor) -> Tensor:
        return self._decoder.hidden(input_ids, positions, attention, rows)

    def logits(self, hidden: Tensor) -> Tensor:
        self.num_rows.append(hidden.shape[0])
        return torch.zeros(hidden.shape[0], 8)


def test_equals_share_a_rank_and_few_rows_of_a_long_prompt_are_held_at_a_time(decoder: Decoder) -> None:
    model = FlatHead(decoder)
    prompt = tuple(i % 8 for i in range(140))
    params = SamplingParams(temperature=0.0, num_logprobs=3, num_prompt_logprobs=2)

    (sequence,) = run(decoder, make_sequences([prompt], 1, 4, [params]), model=model)

    assert len(sequence.logprobs) == 1
    assert sorted(sequence.prompt_logprobs) == list(range(1, 140))
    for position, entry in [*sequence.prompt_logprobs.items(), (140, sequence.logprobs[0])]:
        entries = (entry.chosen, *entry.top)
        likeliest = [0, 1, 2] if position == 140 else [0, 1]
        assert [told.token_id for told in entries] == [sequence.token_ids[position], *likeliest]
        assert {told.rank for told in entries} == {1}
        assert [told.logprob for told in entries] == pytest.approx([-math.log(8)] * len(entries))
    assert sum(model.num_rows) == 140
    assert max(model.num_rows) == 64
