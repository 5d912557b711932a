"""A draft model that fails costs its drafts, nothing else."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.engine import (
    CacheConfig,
    DraftSampling,
    EngineConfig,
    LoadedModel,
    ModelConfig,
    Request,
    SamplingParams,
    SchedulerConfig,
    Speculation,
    SpeculationConfig,
)
from headrace.engine.attention.backend import AttentionStep
from headrace.engine.attention.cpu import CpuBackend
from headrace.engine.config import CacheLayout
from headrace.engine.kv.storage import KVStorage
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.loader import LoadedDecoder, load_decoder
from headrace.engine.models.tokenizer import load_tokenizer
from headrace.engine.runner.model_runner import ModelRunner
from headrace.engine.speculative.draft_model import DraftModel
from tests.support.requests import make_request
from tests.support.speculation import Answer, CoreLoop
from tests.support.tiny_models import write_tiny_llama

LAYOUT = CacheLayout(400, 4)
Fault = Callable[[int], bool]
"""Whether the draft model fails at its call of this number."""


class FaultyModel:
    """Computes what a decoder does, but for the calls that fail."""

    def __init__(self, decoder: Decoder, *, raises: Fault, is_nan: Fault) -> None:
        self.device = decoder.device
        self._decoder = decoder
        self._raises = raises
        self._is_nan = is_nan
        self.num_calls = 0

    def hidden(self, input_ids: Tensor, positions: Tensor, attention: AttentionStep, rows: Tensor) -> Tensor:
        self.num_calls += 1
        if self._raises(self.num_calls):
            raise RuntimeError("out of memory, say")
        return self._decoder.hidden(input_ids, positions, attention, rows)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._decoder.logits(hidden).clone()
        if self._is_nan(self.num_calls):
            logits[0] = math.nan
        return logits


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedDecoder, Path]:
    folder = write_tiny_llama(tmp_path_factory.mktemp("faults") / "target")
    return load_decoder(ModelConfig(folder, dtype="float32"), torch.device("cpu")), folder


def backend(decoder: Decoder) -> CpuBackend:
    return CpuBackend(KVStorage(LAYOUT, decoder.kv_shape, torch.device("cpu")))


def never(call: int) -> bool:
    return False


def always(call: int) -> bool:
    return True


def sometimes(call: int) -> bool:
    return call % 4 == 1


def make_server(
    loaded: tuple[LoadedDecoder, Path],
    *,
    raises: Fault = never,
    is_nan: Fault = never,
    is_plain: bool = False,
    sampling: DraftSampling = DraftSampling.COUPLED,
) -> tuple[CoreLoop, FaultyModel]:
    """A server whose model is its own draft model, which fails now and then."""
    (target, folder), draft = loaded, FaultyModel(loaded[0].decoder, raises=raises, is_nan=is_nan)
    drafting = DraftModel(
        draft, backend(target.decoder), block_size=4, vocab_size=target.info.vocab_size, num_common_ids=512
    )
    model = LoadedModel(
        target.info,
        LAYOUT,
        ModelRunner(target.decoder, backend(target.decoder), LAYOUT, drafting),
        load_tokenizer(folder),
        256,
    )
    speculation = SpeculationConfig(Speculation.DRAFT_MODEL, folder, 3, draft_sampling=sampling)
    config = EngineConfig(
        model=ModelConfig(folder, dtype="float32"),
        cache=CacheConfig(block_size=4, num_blocks=399),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        speculation=SpeculationConfig() if is_plain else speculation,
    )
    return CoreLoop(model, config), draft


def requests(sampling: SamplingParams) -> list[Request]:
    return [
        make_request(
            prompt=tuple(range(3 + i, 12 + 3 * i)), max_tokens=40, sampling=sampling, ignore_eos=True
        )
        for i in range(3)
    ]


def ids(answers: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    ("raises", "is_nan"),
    [(sometimes, never), (never, sometimes), (always, never), (never, always)],
    ids=["raises at times", "is NaN at times", "always raises", "is always NaN"],
)
def test_answers_are_those_of_plain_decoding_and_failures_are_counted_and_told_once(
    loaded: tuple[LoadedDecoder, Path],
    caplog: pytest.LogCaptureFixture,
    temperature: float,
    raises: Fault,
    is_nan: Fault,
) -> None:
    asked = requests(SamplingParams(temperature=temperature, seed=5))
    server, draft = make_server(loaded, raises=raises, is_nan=is_nan)

    with caplog.at_level(logging.WARNING):
        told = ids(server.answers(asked))

    assert told == ids(make_server(loaded, is_plain=True)[0].answers(asked))
    told_failures = [record for record in caplog.records if "draft model failed" in record.getMessage()]
    assert len(told_failures) == 1
    assert (told_failures[0].exc_info is not None) == (raises is not never)
    totals = server.core.load.totals.speculation
    assert totals.num_draft_failures > 0
    if sometimes in (raises, is_nan):
        # Those drafts that could be made were made, from good KV: they are right.
        assert totals.num_draft_tokens > 20
        assert totals.acceptance_rate == 1.0
    elif raises is always:
        assert totals.num_draft_tokens == 0
        # Asked ever more seldom: at the steps 1, 3, 6, 11, 20, 37 and in the prompt's.
        assert draft.num_calls <= 3 * 7


def test_drafts_of_rejection_sampling_may_fail_too(loaded: tuple[LoadedDecoder, Path]) -> None:
    server, _ = make_server(loaded, is_nan=sometimes, sampling=DraftSampling.REJECTION)

    answers = server.answers(requests(SamplingParams(temperature=0.9, seed=5)))

    totals = server.core.load.totals.speculation
    assert [len(answer.token_ids) for answer in answers] == [40] * 3
    assert totals.num_draft_failures > 0
    # The target and the draft model are the same: equal distributions keep every draft.
    assert totals.num_draft_tokens > 20
    assert totals.acceptance_rate > 0.99
