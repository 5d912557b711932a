"""Constrained texts and drafts, good and bad ones: the form holds, and refused drafts leave no trace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch

from headrace.engine import (
    CacheConfig,
    Constraint,
    ConstraintKind,
    DraftSampling,
    EngineConfig,
    FinishReason,
    ModelConfig,
    SamplingParams,
    SchedulerConfig,
    Speculation,
    SpeculationConfig,
    load_model,
)
from headrace.engine.sampling.constraint import CompiledConstraint
from headrace.engine.sampling.constraint_compiler import GrammarCompiler
from tests.support.requests import make_request
from tests.support.schemas import SCHEMAS
from tests.support.speculation import Answer, CoreLoop
from tests.support.tiny_models import write_tiny_llama

NAMES = ("nested objects", "enum")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("constrained")
    return {
        "perfect": write_tiny_llama(root / "target"),
        "useless": write_tiny_llama(root / "other", seed=9, num_hidden_layers=1),
    }


class Servers:
    """Loops over one model, and what its texts are held to."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._folders = folders
        self._base = EngineConfig(
            model=ModelConfig(folders["perfect"], dtype="float32"),
            cache=CacheConfig(block_size=4, num_blocks=2000),
            scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256),
            num_threads=torch.get_num_threads(),
        )
        self.plain = CoreLoop(load_model(self._base), self._base)
        info = self.plain.model.info
        compiler = GrammarCompiler(self.plain.model.tokenizer, info.vocab_size, info.eos_token_ids)
        self.compiled: dict[str, CompiledConstraint] = {
            name: compiler.compile(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMAS[name])))
            for name in NAMES
        }
        compiler.close()

    def speculating(self, proposer: str, num_tokens: int, sampling: DraftSampling) -> CoreLoop:
        if proposer == "prompt_lookup":
            speculation = SpeculationConfig(Speculation.PROMPT_LOOKUP, None, num_tokens)
            return CoreLoop(self.plain.model, replace(self._base, speculation=speculation))
        speculation = SpeculationConfig(
            Speculation.DRAFT_MODEL, self._folders[proposer], num_tokens, draft_sampling=sampling
        )
        config = replace(self._base, speculation=speculation)
        return CoreLoop(load_model(config), config)

    def answers(self, loop: CoreLoop, name: str, sampling: SamplingParams, number: int) -> list[Answer]:
        return loop.answers(
            [
                make_request(
                    prompt=(5, 6, 7 + i % 3),
                    max_tokens=160,
                    sampling=replace(sampling, seed=i),
                    constraint=self.compiled[name],
                )
                for i in range(number)
            ]
        )


@pytest.fixture(scope="module")
def servers(folders: dict[str, Path]) -> Servers:
    return Servers(folders)


def texts(answers: list[Answer]) -> list[tuple[list[int], FinishReason]]:
    return [(answer.token_ids, answer.last.reason) for answer in answers]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("proposer", "num_tokens"), [("perfect", 5), ("useless", 1), ("useless", 4), ("prompt_lookup", 3)]
)
def test_constrained_answers_are_those_of_plain_decoding(
    servers: Servers, name: str, proposer: str, num_tokens: int
) -> None:
    fast = servers.speculating(proposer, num_tokens, DraftSampling.COUPLED)
    for sampling in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)):
        assert texts(servers.answers(fast, name, sampling, 4)) == texts(
            servers.answers(servers.plain, name, sampling, 4)
        )
    if proposer == "perfect":
        # The draft model keeps to the form as the target does: nothing it says is refused.
        assert fast.core.load.totals.speculation.acceptance_rate > 0.98


@pytest.mark.parametrize("name", NAMES)
def test_drafts_that_are_judged_by_rejection_sampling_keep_the_form_too(servers: Servers, name: str) -> None:
    fast = servers.speculating("useless", 3, DraftSampling.REJECTION)
    ended = [
        answer
        for answer in servers.answers(fast, name, SamplingParams(temperature=1.0), 40)
        if answer.last.reason is FinishReason.STOP
    ]
    assert len(ended) >= 20
    for answer in ended:
        jsonschema.validate(json.loads(answer.text), SCHEMAS[name])
