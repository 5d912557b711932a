"""Nobody waits for a device while a step runs: whatever its rows ask for, one copy to the host ends it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.engine.attention.flash import FlashBackend, FlashKernels
from headrace.engine.config import CacheLayout
from headrace.engine.kv.storage import KVStorage
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.loader import read_spec
from headrace.engine.models.spec import DecoderSpec
from headrace.engine.runner.model_runner import ModelRunner
from headrace.engine.sampling.constraint import AllowedTokens, ConstraintMatcher, RowConstraint
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.scheduling.ahead import row_behind
from headrace.engine.scheduling.plan import DraftWork, ScheduledSequence, StepPlan
from headrace.engine.sequence import SequenceId
from headrace.engine.speculative.draft_model import DraftModel
from tests.support.far_device import FAR, Watch, watching
from tests.support.tiny_models import write_tiny_family

BLOCK = 256
LAYOUT = CacheLayout(64, BLOCK)
HOT = SamplingParams(temperature=0.8, seed=1)


class EmptyWeights:
    """Tensors of the right shapes on the far device."""

    def __init__(self, spec: DecoderSpec) -> None:
        self._shapes = spec.tensors()

    def read(self, name: str) -> Tensor:
        return torch.empty(self._shapes[name], dtype=torch.bfloat16, device=FAR)


class EverySecond:
    """Lets every second token follow."""

    def __init__(self, vocab_size: int) -> None:
        self._bits = b"\x55" * (-(-vocab_size // 8))

    def allowed(self, output_token_ids: tuple[int, ...]) -> AllowedTokens:
        return AllowedTokens(self._bits, may_end=True, is_over=False)

    def fork(self) -> ConstraintMatcher:
        return self


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma2", "mistral", "phi3", "olmo2"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return far_decoder(tmp_path_factory.mktemp("tiny"), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return far_decoder(tmp_path_factory.mktemp("tiny"), "llama")


def far_decoder(folder: Path, family: str) -> Decoder:
    _, spec = read_spec(write_tiny_family(folder, family))
    return Decoder(spec, EmptyWeights(spec), max_len=1024)


def storage_of(decoder: Decoder) -> KVStorage:
    return KVStorage(LAYOUT, decoder.kv_shape, FAR)


def attention_of(decoder: Decoder) -> FlashBackend:
    kernels = FlashKernels(
        lambda q, *_, **_terms: torch.empty_like(q), lambda q, *_, **_terms: torch.empty_like(q)
    )
    return FlashBackend(storage_of(decoder), kernels)


def runner_of(decoder: Decoder) -> ModelRunner:
    spec = decoder.spec
    draft = DraftModel(
        decoder,
        attention_of(decoder),
        block_size=BLOCK,
        vocab_size=spec.vocab_size,
        num_common_ids=spec.vocab_size,
    )
    return ModelRunner(decoder, attention_of(decoder), LAYOUT, draft)


def row(sampling: SamplingParams, num_tokens: int = 1, **changes: object) -> ScheduledSequence:
    known = tuple(range(3, 12))
    made = ScheduledSequence(
        SequenceId(0),
        first_position=8,
        token_ids=tuple(range(11, 11 + num_tokens)),
        num_draft_tokens=0,
        block_ids=(1,),
        is_sampled=True,
        sampling=sampling,
        num_prompt_tokens=6,
        known_token_ids=known if sampling.needs_history else (),
        num_logprobs=sampling.num_logprobs,
    )
    return made._replace(**changes)  # type: ignore[arg-type]


CONSTRAINT = RowConstraint(EverySecond(512), (4, 5, 6), frozenset({2}))
ROWS = {
    "greedy": row(SamplingParams(temperature=0.0)),
    "drawn": row(HOT),
    "top-k": row(SamplingParams(temperature=0.8, top_k=5, seed=1)),
    "top-p": row(SamplingParams(temperature=0.8, top_p=0.9, seed=1)),
    "top-k and top-p": row(SamplingParams(temperature=0.8, top_k=9, top_p=0.9, seed=1)),
    "typical-p": row(SamplingParams(temperature=0.8, typical_p=0.9, seed=1)),
    "min-p": row(SamplingParams(temperature=0.8, min_p=0.1, seed=1)),
    "repetition": row(SamplingParams(temperature=0.0, repetition_penalty=1.2)),
    "frequency and presence": row(
        SamplingParams(temperature=0.8, seed=1, frequency_penalty=0.5, presence_penalty=0.5)
    ),
    "bias": row(SamplingParams(temperature=0.0, logit_bias=((4, 1.5), (9, -2.0)))),
    "banned": row(SamplingParams(temperature=0.8, seed=1, banned_token_ids=frozenset({4}))),
    "allowed": row(SamplingParams(temperature=0.8, seed=1, allowed_token_ids=frozenset({4, 5}))),
    "bad words": row(SamplingParams(temperature=0.0, bad_words=((11, 5), (7,)))),
    "too early to end": row(HOT, suppressed_token_ids=frozenset({2}), num_suppressed=3),
    "constraint": row(HOT, constraint=CONSTRAINT),
    "the chosen one's logprob": row(SamplingParams(temperature=0.0, num_logprobs=0)),
    "logprobs": row(SamplingParams(temperature=0.8, top_p=0.9, seed=1, num_logprobs=5)),
    "the prompt's logprobs": row(
        HOT,
        num_tokens=4,
        first_position=0,
        num_prompt_tokens=4,
        known_token_ids=(11, 12, 13, 14),
        num_prompt_logprobs=3,
    ),
    "drafts": row(HOT, num_tokens=4, num_draft_tokens=3),
    "drafts of a greedy row": row(SamplingParams(temperature=0.0), num_tokens=4, num_draft_tokens=3),
    "a piece of a prompt": row(HOT, num_tokens=4, is_sampled=False),
}


def watched(runner: ModelRunner, rows: Sequence[ScheduledSequence]) -> Watch:
    with watching() as watch:
        runner.execute(StepPlan(0, tuple(rows)))
    return watch


def test_a_step_of_all_kinds_of_rows_is_waited_for_once(decoder: Decoder) -> None:
    watch = watched(runner_of(decoder), list(ROWS.values()))

    assert watch.waits == []
    assert watch.num_downloads == 1


@pytest.mark.parametrize("kind", ROWS)
def test_each_kind_by_itself_is_waited_for_once(llama: Decoder, kind: str) -> None:
    watch = watched(runner_of(llama), [ROWS[kind]] * 2)

    assert watch.waits == []
    assert watch.num_downloads == (0 if kind == "a piece of a prompt" else 1)


PLAIN = [each for name, each in ROWS.items() if each.is_sampled and "draft" not in name]


def test_a_step_and_the_one_that_follows_it_are_launched_without_any_wait(decoder: Decoder) -> None:
    """Nothing but the token ids is unknown to the host, and it needn't know them."""
    runner = runner_of(decoder)
    following = [row_behind(each, number, (1,)) for number, each in enumerate(PLAIN)]

    with watching() as watch:
        launched = runner.launch(StepPlan(0, tuple(PLAIN)))
        behind = runner.launch(StepPlan(1, tuple(following), follows=0))
        assert (watch.waits, watch.num_downloads) == ([], 0)
        launched.fetch()
        behind.fetch()

    assert (watch.waits, watch.num_downloads) == ([], 2)


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), HOT], ids=["greedy", "drawn"])
@pytest.mark.parametrize("is_coupled", [True, False])
@pytest.mark.parametrize("least_chance", [0.0, 0.5])
def test_a_draft_model_is_waited_for_once_per_draft(
    llama: Decoder, sampling: SamplingParams, least_chance: float, *, is_coupled: bool
) -> None:
    work = DraftWork(8, (11,), num_drafts=3, is_coupled=is_coupled, least_chance=least_chance)

    watch = watched(runner_of(llama), [row(sampling, draft=work, block_ids=(1, 2))] * 2)

    assert watch.waits == []
    assert watch.num_downloads == 3 + 1


@pytest.mark.parametrize(
    ("said", "look"),
    [
        ("is_nonzero|_local_scalar_dense", lambda t: bool(t.any())),
        ("item|_local_scalar_dense", lambda t: t.sum().item()),
        ("nonzero", torch.nonzero),
        ("by a mask", lambda t: t[t > 0]),
        ("bincount", lambda t: torch.bincount(t.long())),
        ("repeat_interleave", lambda t: t.repeat_interleave(t.long())),
        ("host's numbers", lambda t: torch.tensor([1.0], device=t.device)),
        ("from cpu to meta", lambda t: torch.ones(3).to(t.device)),
        ("from cpu to meta", lambda t: t.copy_(torch.ones(3))),
        ("from meta to cpu", torch.Tensor.cpu),
    ],
    ids=[
        "any",
        "item",
        "nonzero",
        "mask",
        "bincount",
        "repeat",
        "made there",
        "to the device",
        "into the device",
        "to the host",
    ],
)
@pytest.mark.parametrize("is_inference", [True, False], ids=["inference", "plain"])
def test_what_would_wait_is_noticed(said: str, look: object, *, is_inference: bool) -> None:
    """The watch itself, on a device that has no numbers: some of these it refuses besides."""
    numbers = torch.ones(3, device=FAR)

    with torch.inference_mode(is_inference), watching() as watch:
        try:
            look(numbers)  # type: ignore[operator]
        except (RuntimeError, NotImplementedError):
            watch.waits.append("refused")

    assert re.search(said, watch.waits[0])
