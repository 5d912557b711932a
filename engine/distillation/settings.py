"""What a draft model is made from and how, and how it goes. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from headrace.engine.errors import ConfigError

MAX_LAYERS = 64
MAX_SEED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class DistillationSettings:
    """How a draft model is made (knowledge distillation, arXiv 1503.02531, on the target's own text).

    Args:
        target: folder of the model that it will propose tokens to.
        output: folder that the draft model is written to; unfinished work lies in it, too.
        num_layers: so many of the target's first layers it has.
        text: files whose text it learns from; without any, the target writes the text itself.
        num_corpus_tokens: how much text it learns from, tokens.
        training_s: how long it learns, seconds on the clock.
        max_sequence_len: longest piece of text that is learnt at once, tokens.
        batch_tokens: tokens per update.
        learning_rate: greatest one; it rises at first and falls to nothing in the end.
        draft_vocab_size: so many of the text's most frequent tokens it proposes, by a head that has rows for
            them alone, and is taught to tell apart; 0 is all tokens, by the target's whole head.
        num_candidates: with a whole head so many of the text's most frequent tokens are told apart while it
            learns; the others follow from the likeness of the last layer's output, which is learnt as well.
        seed: of everything that is drawn.
    """

    target: Path
    output: Path
    num_layers: int = 2
    text: tuple[Path, ...] = ()
    num_corpus_tokens: int = 400_000
    training_s: float = 1500.0
    max_sequence_len: int = 256
    batch_tokens: int = 512
    learning_rate: float = 2e-3
    draft_vocab_size: int = 4096
    num_candidates: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("num_layers", 1),
            ("num_corpus_tokens", 1000),
            ("seed", 0),
            ("max_sequence_len", 8),
            ("batch_tokens", 8),
            ("draft_vocab_size", 0),
            ("num_candidates", 2),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} is too small: use {least} or more")
        if self.draft_vocab_size == 1:
            raise ConfigError("draft_vocab_size=1 leaves nothing to tell apart: use 2 or more, or 0 for all")
        if self.num_layers > MAX_LAYERS:
            raise ConfigError(f"num_layers={self.num_layers} is too large: use {MAX_LAYERS} or less")
        if self.seed > MAX_SEED:
            raise ConfigError(f"seed={self.seed} is too large: use {MAX_SEED} or less")
        if self.batch_tokens < self.max_sequence_len:
            raise ConfigError(
                f"batch_tokens={self.batch_tokens} has no room for a sequence of "
                f"max_sequence_len={self.max_sequence_len}"
            )
        for name in ("training_s", "learning_rate"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ConfigError(f"{name}={value} must be positive and finite")

    def described(self) -> dict[str, object]:
        """Everything that unfinished work hangs on: work begun under other settings is not gone on with."""
        fields = asdict(self)
        # What is begun may be given more text and more time, and learn at another rate.
        for name in ("output", "num_corpus_tokens", "training_s", "learning_rate"):
            del fields[name]
        return {
            **fields,
            "target": str(self.target.resolve()),
            "text": [str(path.resolve()) for path in self.text],
        }


@dataclass(frozen=True, slots=True)
class DraftReport:
    """What a finished draft model is worth on text that it has not learnt from.

    Args:
        num_parameters: of the draft model, embedding and head included.
        accepted_by_place: greedy, batch 1: how often a draft is kept by its place among those of a step,
            given that it was proposed; one behind a refused draft counts as refused.
        mean_accepted_length: tokens per step of the target, the one behind the drafts included.
        plain_tokens_per_s: without the draft model.
        drafted_tokens_per_s: with it, and as many drafts as pay.
        draft_weight_dtype: how the draft model kept its weights meanwhile: "int8" where the machine has
            kernels for that, else "same".
        vocabulary_share: share of that text's tokens that it can propose at all.
    """

    num_parameters: int
    accepted_by_place: tuple[float, ...]
    mean_accepted_length: float
    plain_tokens_per_s: float
    drafted_tokens_per_s: float
    draft_weight_dtype: str = "same"
    vocabulary_share: float = 1.0

    @property
    def speed_up(self) -> float:
        """How many times as fast answers come."""
        return self.drafted_tokens_per_s / self.plain_tokens_per_s


class DistillationProgress(Protocol):
    """Told how it goes."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` units of `stage` are through."""
        ...

    def note(self, text: str) -> None:
        """A line for the reader."""
        ...
