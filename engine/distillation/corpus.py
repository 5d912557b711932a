"""The text that a draft model learns from, with what the target made of it, on disk, piece by piece.

A piece is written whole or not at all, so work that was broken off goes on behind the last one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headrace.engine.distillation.whole_files import write_whole
from headrace.engine.errors import ConfigError

_PIECE = "piece-{:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class Piece:
    """Some sequences, one after the other on one axis.

    Args:
        token_ids: (T,), int32.
        hidden: (T, width), what the target's head makes each token's prediction from.
        lengths: of the sequences, tokens; they sum to T.
    """

    token_ids: Tensor
    hidden: Tensor
    lengths: tuple[int, ...]


class Corpus:
    """A folder of pieces."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    @property
    def num_pieces(self) -> int:
        """How many there are: they are numbered from 0 on."""
        return sum(1 for _ in self._paths())

    @property
    def num_tokens(self) -> int:
        """Of all pieces."""
        return sum(sum(self._lengths(path)) for path in self._paths())

    def add(self, piece: Piece) -> None:
        """Write another piece behind the others.

        Raises:
            DraftingFailed: there is no room for it; the others are kept.
        """
        path = self._folder / _PIECE.format(self.num_pieces)
        tensors = {"token_ids": piece.token_ids.contiguous(), "hidden": piece.hidden.contiguous()}
        metadata = {"lengths": json.dumps(piece.lengths)}
        write_whole(path, lambda partial: save_file(tensors, partial, metadata=metadata))

    def read(self) -> Iterator[Piece]:
        """Piece by piece, in order.

        Raises:
            ConfigError: one is damaged.
        """
        for path in self._paths():
            with _opened(path) as file:
                piece = Piece(file.get_tensor("token_ids"), file.get_tensor("hidden"), self._lengths(path))
            yield piece

    def _paths(self) -> Iterator[Path]:
        number = 0
        while (path := self._folder / _PIECE.format(number)).is_file():
            yield path
            number += 1

    def _lengths(self, path: Path) -> tuple[int, ...]:
        with _opened(path) as file:
            lengths: list[int] = json.loads(file.metadata()["lengths"])
        return tuple(lengths)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{path} is damaged ({error}): delete it and the pieces behind it, and they are made anew"
        ) from error


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence to learn.

    Args:
        token_ids: (T,), int64.
        hidden: (T, width).
    """

    token_ids: Tensor
    hidden: Tensor


class Examples:
    """All sequences of a corpus in memory, some of them kept back to judge by.

    A sequence's own tokens decide whether it is: nothing that is kept back is learnt, though it be there
    twice, nor later, when there is more text.

    Args:
        held_back: share that is kept back, about; at least one is.

    Raises:
        ConfigError: too little is there to keep something back.
    """

    def __init__(self, corpus: Corpus, *, held_back: float = 0.05) -> None:
        every: list[Example] = []
        for piece in corpus.read():
            lengths = list(piece.lengths)
            token_ids, hidden = (
                torch.split(piece.token_ids.long(), lengths),
                torch.split(piece.hidden, lengths),
            )
            parts = zip(token_ids, hidden, strict=True)
            every += [Example(ids, states) for ids, states in parts if ids.shape[0] > 1]
        lots = [_lot(example.token_ids) for example in every]
        # The text may be so little that nothing lies below the share.
        bound = max(held_back, min(lots, default=0.0))
        self.held_back = [example for example, lot in zip(every, lots, strict=True) if lot <= bound]
        self.learnt = [example for example, lot in zip(every, lots, strict=True) if lot > bound]
        if not self.learnt:
            raise ConfigError(
                f"the text holds {len(every)} pieces of more than one token, too few different ones to learn "
                "from some and judge by the others: give it more text"
            )

    def most_frequent(self, count: int, always: Collection[int] = ()) -> Tensor:
        """(C,), int64: the ids that are there most often, in ascending order.

        Args:
            count: at most so many, or as many as `always`.
            always: ids that are among them however often they are there.
        """
        counts = torch.bincount(
            torch.cat([example.token_ids for example in self.learnt]), minlength=max(always, default=0) + 1
        )
        counts[list(always)] = torch.iinfo(counts.dtype).max
        num_ids = max(min(count, int((counts > 0).sum())), len(set(always)))
        return counts.topk(num_ids).indices.sort().values

    def share_of(self, vocabulary: Tensor) -> float:
        """Share of the tokens kept back that are in `vocabulary`, ascending ids."""
        token_ids = torch.cat([example.token_ids for example in self.held_back])
        return float(torch.isin(token_ids, vocabulary).float().mean())

    def batches(self, num_tokens: int, epoch_seed: int) -> Iterator[list[Example]]:
        """All learnt sequences once, in groups of about `num_tokens`, those of like length together.

        Args:
            epoch_seed: another order for each.
        """
        generator = torch.Generator().manual_seed(epoch_seed)
        order = torch.randperm(len(self.learnt), generator=generator).tolist()
        groups: list[list[Example]] = []
        # Sorted in runs: like lengths share a group, and yet each epoch groups anew.
        for start in range(0, len(order), 512):
            run = sorted((self.learnt[i] for i in order[start : start + 512]), key=lambda e: len(e.token_ids))
            groups += _grouped(run, num_tokens)
        for place in torch.randperm(len(groups), generator=generator).tolist():
            yield groups[place]


def _lot(token_ids: Tensor) -> float:
    """From 0 to 1, evenly spread over sequences, and always the same one for the same tokens."""
    digest = hashlib.blake2b(token_ids.to(torch.int64).numpy().tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _grouped(examples: Sequence[Example], num_tokens: int) -> list[list[Example]]:
    groups: list[list[Example]] = [[]]
    for example in examples:
        # Ascending lengths: padded, a group is as long as its last one.
        if groups[-1] and (len(groups[-1]) + 1) * len(example.token_ids) > num_tokens:
            groups.append([])
        groups[-1].append(example)
    return [group for group in groups if group]
