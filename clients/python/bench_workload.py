"""What is sent: conversations of one turn or of several, read from a file or drawn from distributions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

TextOrIds = str | tuple[int, ...]
"""A prompt, or a part of one."""


class WorkloadError(ValueError):
    """A file or a description of a workload is wrong; the message says where and what would be right."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request.

    Args:
        prompt: what is new in it; a later turn stands behind all that its conversation has said so far.
        output_len: tokens to make.
    """

    prompt: TextOrIds
    output_len: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that follow each other: each is due when the one before it is over.

    Args:
        arrival_s: when the first turn is due, where the workload itself says so.
    """

    turns: tuple[Turn, ...]
    arrival_s: float | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations, by number: the same number is always the same conversation.

    Args:
        name: what it is, for the report.
        size: how many there are; None: any number. Beyond the last one it begins again.
        make: the conversation of a number below `size`.
        has_arrivals: every conversation says when it is due.
    """

    name: str
    size: int | None
    make: Callable[[int], Conversation] = field(repr=False)
    has_arrivals: bool = False

    def conversation(self, number: int) -> Conversation:
        """The conversation of a number, 0 or more."""
        return self.make(number if self.size is None else number % self.size)

    @property
    def has_several_turns(self) -> bool:
        """Whether a turn follows another; all conversations of a workload are alike in this."""
        return len(self.make(0).turns) > 1

    @property
    def is_text(self) -> bool:
        """Whether prompts are texts; otherwise they are token ids."""
        return isinstance(self.make(0).turns[0].prompt, str)


class Lengths:
    """A distribution of lengths, written as one word.

    - ``128``: always 128.
    - ``16-128``: uniform, both ends included.
    - ``geometric:64``: geometric with this mean; ``geometric:64:8-256`` cuts it to 8 to 256.
    - ``normal:128:32``, ``normal:128:32:1-512``: mean and standard deviation.
    - ``lognormal:128:0.5``, ``lognormal:128:0.5:1-512``: median, and standard deviation of the logarithm.

    Every length is at least 1.

    Raises:
        WorkloadError: the word is none of these.
    """

    def __init__(self, word: str) -> None:
        self.word = word
        self._low, self._high = 1, 1 << 24
        kind, *numbers = word.split(":")
        try:
            if kind in ("geometric", "normal", "lognormal"):
                self._draw = self._shaped(kind, numbers)
            else:
                self._low, self._high = _bounds(kind) if "-" in kind else (_whole(kind), _whole(kind))
                self._draw = self._uniform
                if numbers:
                    raise ValueError("too many parts")
            if not 1 <= self._low <= self._high:
                raise ValueError("lengths begin at 1 and the smaller one comes first")
        except ValueError as error:
            raise WorkloadError(
                f"{word!r} is no distribution of lengths ({error}): use 128, 16-128, geometric:64, "
                "normal:128:32 or lognormal:128:0.5; bounds may follow the last three, "
                "as in geometric:64:8-256"
            ) from None

    def draw(self, rng: random.Random) -> int:
        """A length."""
        return min(max(self._draw(rng), self._low), self._high)

    def _uniform(self, rng: random.Random) -> int:
        return rng.randint(self._low, self._high)

    def _shaped(self, kind: str, numbers: list[str]) -> Callable[[random.Random], int]:
        num_parameters = 1 if kind == "geometric" else 2
        if len(numbers) not in (num_parameters, num_parameters + 1):
            raise ValueError(f"{kind} has {num_parameters} parameters")
        if len(numbers) > num_parameters:
            self._low, self._high = _bounds(numbers.pop())
        first, *rest = [_number(number) for number in numbers]
        spread = rest[0] if rest else 0.0
        if not 1 <= first < math.inf or not 0 <= spread < math.inf:
            raise ValueError("its parameters are out of range")
        if kind == "normal":
            return lambda rng: round(rng.gauss(first, spread))
        if kind == "lognormal":
            return lambda rng: round(first * math.exp(rng.gauss(0.0, spread)))
        if first == 1:
            return lambda rng: 1
        # Inverse of the distribution function, for the number of trials up to a success of probability 1 /
        # mean.
        return lambda rng: 1 + math.floor(math.log(1.0 - rng.random()) / math.log1p(-1 / first))


def _bounds(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    return _whole(low), _whole(high)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is no whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number") from None


@dataclass(frozen=True, slots=True)
class SyntheticOptions:
    """Prompts that say nothing, of given lengths.

    Args:
        prompt_len: new tokens of each turn, the shared beginning not counted.
        output_len: tokens made in each turn.
        shared_prefix_len: tokens at the beginning of each conversation that it shares with others.
        num_prefixes: how many different shared beginnings there are, used in turn.
        num_turns: turns per conversation.
        vocabulary_size: token ids are below it; None: prompts are texts of short words, one or two tokens
            each.
    """

    prompt_len: Lengths
    output_len: Lengths
    shared_prefix_len: int = 0
    num_prefixes: int = 1
    num_turns: int = 1
    vocabulary_size: int | None = None
    seed: int = 0


def synthetic(options: SyntheticOptions) -> Workload:
    """The workload of these options; a conversation depends on seed and number alone.

    Raises:
        WorkloadError: an option is out of its range.
    """
    if min(options.num_turns, options.num_prefixes) < 1 or options.shared_prefix_len < 0:
        raise WorkloadError("turns and prefixes begin at 1, the length of a shared prefix at 0")
    if options.vocabulary_size is not None and options.vocabulary_size <= _FIRST_ID:
        raise WorkloadError(
            f"a vocabulary of {options.vocabulary_size} ids is too small to draw prompts from"
        )

    def make(number: int) -> Conversation:
        prefix = _part(options, options.shared_prefix_len, f"prefix {number % options.num_prefixes}")
        rng = random.Random(f"{options.seed} lengths {number}")
        turns = []
        for place in range(options.num_turns):
            new = _part(options, options.prompt_len.draw(rng), f"conversation {number} turn {place}")
            prompt = joined(prefix, new) if place == 0 else new
            turns.append(Turn(prompt, options.output_len.draw(rng)))
        return Conversation(tuple(turns))

    parts = [f"prompts {options.prompt_len.word}", f"outputs {options.output_len.word}"]
    if options.shared_prefix_len:
        parts.append(f"{options.num_prefixes} shared prefixes of {options.shared_prefix_len}")
    if options.num_turns > 1:
        parts.append(f"{options.num_turns} turns")
    return Workload(f"synthetic: {', '.join(parts)}, seed {options.seed}", None, make)


_FIRST_ID = 3
"""Ids below it are special tokens in most vocabularies."""
_WORDS = """river mill wheel stone water grain flour bread house tree field road bridge light wind rain cloud
night day hand door table book letter song garden horse market winter summer city wall window fire paper"""


def _part(options: SyntheticOptions, length: int, label: str) -> TextOrIds:
    rng = random.Random(f"{options.seed} {label}")
    if options.vocabulary_size is None:
        words = _WORDS.split()
        return " ".join(rng.choice(words) for _ in range(length))
    return tuple(rng.randrange(_FIRST_ID, options.vocabulary_size) for _ in range(length))


def joined(first: TextOrIds, second: TextOrIds) -> TextOrIds:
    """Two parts of a prompt, one behind the other; both are texts, or both are token ids."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first} {second}" if first and second else first or second
    if isinstance(first, tuple) and isinstance(second, tuple):
        return first + second
    raise TypeError("a text and token ids don't make one prompt")


def warm_up_turn(workload: Workload, number: int, output_len: int) -> Turn:
    """A prompt like one of the workload's that shares no beginning with it: its words or ids, back to
    front."""
    prompt = workload.conversation(number).turns[0].prompt
    backwards = " ".join(reversed(prompt.split())) if isinstance(prompt, str) else prompt[::-1]
    return Turn(backwards, output_len)
