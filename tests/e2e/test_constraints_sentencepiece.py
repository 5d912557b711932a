"""Constraints over a vocabulary that puts a space before every text: what is told is what the form says."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.engine import (
    AsyncEngine,
    CacheConfig,
    Constraint,
    ConstraintKind,
    EngineConfig,
    FailureEvent,
    FinishReason,
    ModelConfig,
    OutputParams,
    SamplingParams,
    SchedulerConfig,
    TokenEvent,
    load_model,
)
from headrace.engine.models.gguf import convert_gguf
from tests.support.requests import make_request
from tests.support.tiny_gguf import write_sentencepiece_gguf

# With a space first, without one, and either way. The vocabulary has "▁the", "▁", "the" and bytes for "ß".
FORMS = {
    "space": (Constraint(ConstraintKind.REGEX, " the mill[ß0-9]"), " the mill[ß0-9]"),
    "no space": (Constraint(ConstraintKind.REGEX, "the mill[ß0-9]"), "the mill[ß0-9]"),
    "either": (Constraint(ConstraintKind.REGEX, " {0,3}the( mill)?"), " {0,3}the( mill)?"),
    "choice": (Constraint(ConstraintKind.CHOICE, choices=(" yes", "no", "  ß")), " yes|no|  ß"),
    "grammar": (Constraint(ConstraintKind.GRAMMAR, 'root ::= " "? "wheel" " "?\n'), " ?wheel ?"),
    "json": (Constraint(ConstraintKind.JSON_SCHEMA, '{"enum": [" a", "b"]}'), '" a"|"b"'),
}
NUM_SEEDS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sentencepiece")
    write_sentencepiece_gguf(folder / "tiny.gguf", "llama")
    (folder / "converted").mkdir()
    convert_gguf(folder / "tiny.gguf", folder / "converted")
    return folder / "converted"


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(
        ModelConfig(folder, dtype="float32"),
        CacheConfig(block_size=4, num_blocks=256),
        SchedulerConfig(max_num_seqs=8),
    )
    async with AsyncEngine(load_model(config), config) as engine:
        yield engine


async def texts_of(engine: AsyncEngine, constraint: Constraint, *, is_echoed: bool = False) -> list[str]:
    """What seeded requests tell."""
    compiled = await engine.constraints.compile(constraint)

    async def one(seed: int) -> str:
        sampling = SamplingParams(temperature=1.5, seed=seed)
        request = make_request(
            prompt=tuple(engine.tokenizer.encode("The mill")),
            max_tokens=40,
            sampling=sampling,
            output=OutputParams(is_echoed=is_echoed),
        )
        text, end = "", None
        async for event in engine.submit(replace(request, constraint=compiled)):
            assert not isinstance(event, FailureEvent), event
            if isinstance(event, TokenEvent):
                text += event.text
            else:
                end = event
        assert end is not None
        assert end.reason is FinishReason.STOP
        return text

    return await asyncio.gather(*map(one, range(NUM_SEEDS)))


@pytest.mark.parametrize("name", FORMS)
async def test_what_is_told_has_the_form_to_the_first_space(engine: AsyncEngine, name: str) -> None:
    constraint, pattern = FORMS[name]
    texts = await texts_of(engine, constraint)
    assert all(re.fullmatch(pattern, text) for text in texts), texts
    if name in ("either", "choice", "grammar"):
        assert {text.startswith(" ") for text in texts} == {True, False}


async def test_behind_an_echoed_prompt_only_the_prompts_first_space_is_dropped(engine: AsyncEngine) -> None:
    texts = await texts_of(engine, FORMS["choice"][0], is_echoed=True)
    assert all(re.fullmatch("The mill( yes|no|  ß)", text) for text in texts), texts
