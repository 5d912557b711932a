"""Small distillations: settings, corpora of known texts, and a progress that can break off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.engine import DistillationSettings
from headrace.engine.distillation.corpus import Corpus, Examples, Piece
from headrace.engine.distillation.target import Teacher
from tests.support.tiny_models import VOCAB_SIZE


@dataclass
class RecordedProgress:
    """Keeps what it is told; raises KeyboardInterrupt at the given report of a stage.

    Args:
        breaks_at: of which stage, and which of its reports, counted from 1.
    """

    breaks_at: tuple[str, int] | None = None
    told: list[tuple[str, int, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __call__(self, stage: str, done: int, total: int) -> None:
        """See `headrace.engine.DistillationProgress`."""
        self.told.append((stage, done, total))
        if self.breaks_at == (stage, sum(name == stage for name, _, _ in self.told)):
            raise KeyboardInterrupt

    def note(self, text: str) -> None:
        """See `headrace.engine.DistillationProgress`."""
        self.notes.append(text)


def tick_while_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of a second per look: a time is a number of updates on any machine, some 2 s for each."""
    ticks = count()
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)))
    monkeypatch.setattr("headrace.engine.distillation.training.time", clock)


def tiny_settings(target: Path, output: Path, **others: Any) -> DistillationSettings:
    """Of a distillation that takes a moment, its clock being `tick_while_learning`'s."""
    small = {
        "num_layers": 1,
        "num_corpus_tokens": 1000,
        "training_s": 12.0,
        "max_sequence_len": 32,
        "batch_tokens": 256,
        "num_candidates": 512,
    }
    return DistillationSettings(target, output, **{**small, **others})


def drawn_sequences(lengths: Sequence[int], seed: int = 0) -> list[tuple[int, ...]]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist()) for n in lengths]


def taught_corpus(target: Path, folder: Path, sequences: Sequence[tuple[int, ...]]) -> Examples:
    """These sequences with what the target makes of them."""
    corpus = Corpus(folder)
    token_ids = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int32)
    lengths = tuple(len(sequence) for sequence in sequences)
    corpus.add(Piece(token_ids, Teacher(target, "float32").hidden(sequences), lengths))
    return Examples(corpus)


def reference_hidden(folder: Path, sequence: Sequence[int], num_layers: int | None = None) -> torch.Tensor:
    """(T, width): transformers' last hidden states, of the whole model or of its first layers alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    body = model.base_model
    if num_layers is not None:
        # In place, so that every other setting of the model stays as it was.
        body.layers = body.layers[:num_layers]
        body.config.num_hidden_layers = num_layers
    with torch.no_grad():
        states: torch.Tensor = body(input_ids=torch.tensor([sequence]), use_cache=False)[0][0]
    return states
