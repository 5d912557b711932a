"""What a request may say about the form of its text, and what the engine asks of whoever watches over it.

Here are words only; the library behind them is met in `constraint_grammar` and `constraint_matcher`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from headrace.engine.errors import ConstraintFailed, InvalidRequest

MAX_CONSTRAINT_BYTES = 256 * 1024
"""Longest schema, grammar or expression, and most of all choices together, bytes of UTF-8."""
MAX_CHOICES = 4096

INSTALL_HINT = "pip install 'headrace[structured]'"


class ConstraintKind(StrEnum):
    """How the form is described."""

    JSON_SCHEMA = "json_schema"
    """A JSON Schema, as JSON text."""
    JSON_OBJECT = "json_object"
    """Any JSON object."""
    REGEX = "regex"
    """A regular expression that the whole text matches. It knows no look-around and no back reference; its
    classes of digits, letters and space are those of ASCII."""
    GRAMMAR = "grammar"
    """A context-free grammar, in GBNF (its rules begin at ``root``) or in Lark (at ``start``)."""
    CHOICE = "choice"
    """One of several texts."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """The form that a request's text must have. It says nothing of the prompt.

    Args:
        text: schema, expression or grammar; empty for the kinds that need none.
        choices: the texts to choose from, for `ConstraintKind.CHOICE` alone.

    Raises:
        InvalidRequest: a part is missing, or too large: checked in O(its size). What its content is worth
            only its compilation shows.
    """

    kind: ConstraintKind
    text: str = ""
    choices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind is ConstraintKind.CHOICE:
            if not 1 <= len(self.choices) <= MAX_CHOICES:
                raise self.refused(f"must hold 1 to {MAX_CHOICES} options, got {len(self.choices)}")
            if not all(self.choices):
                raise self.refused("must not hold an empty option")
        elif self.kind is not ConstraintKind.JSON_OBJECT and not self.text:
            raise self.refused("must not be empty")
        num_bytes = sum(len(text.encode()) for text in (self.text, *self.choices))
        if num_bytes > MAX_CONSTRAINT_BYTES:
            raise self.refused(f"must be at most {MAX_CONSTRAINT_BYTES} bytes of UTF-8, got {num_bytes}")

    @property
    def field(self) -> str:
        """What the caller calls it."""
        return f"constraint.{self.kind}"

    def refused(self, description: str) -> InvalidRequest:
        """The error that says why it can't be taken."""
        return InvalidRequest.of(self.field, description)


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """What may come next in a constrained text.

    Args:
        bits: token id i is bit i % 8, from the lowest, of byte i // 8. End ids never stand here.
        may_end: whether the text is complete as it stands, so that an end id may follow.
        is_over: whether nothing else may follow.
    """

    bits: bytes
    may_end: bool
    is_over: bool


class ConstraintMatcher(Protocol):
    """Watches over the text of one sequence.

    What it answers depends on its arguments alone: that it remembers how far it has come only saves time. So
    a step may be run twice, a preempted sequence goes on as if nothing had been, and drafts that are refused
    leave no trace. Called from the runner's thread.
    """

    def allowed(self, output_token_ids: tuple[int, ...]) -> AllowedTokens:
        """What may follow these tokens, the sequence's whole output.

        Raises:
            ConstraintFailed: the constraint can't be followed any further.
        """
        ...

    def fork(self) -> ConstraintMatcher:
        """Another one for another continuation of the same text; neither knows of the other."""
        ...


@dataclass(frozen=True, slots=True)
class RowMask:
    """What a constraint lets be drawn.

    Args:
        bits: as in `AllowedTokens`, end ids included.
        must_end: whether an end id has to be drawn, whatever else would rather put it off.
        failure: why nothing may be drawn; None when something may.
    """

    bits: bytes
    must_end: bool = False
    failure: str | None = None

    def permits(self, token_id: int) -> bool:
        """Whether it may be drawn."""
        byte = token_id // 8
        return byte < len(self.bits) and bool(self.bits[byte] >> token_id % 8 & 1)


@dataclass(frozen=True, slots=True)
class RowConstraint:
    """A constraint on the next token of one sequence.

    Args:
        output_token_ids: what the sequence has made so far: kept tokens only.
        end_token_ids: what ends it. None of them is drawn while the text is incomplete, not even one that
            could stand in it: so what ends by an id is always complete.
    """

    matcher: ConstraintMatcher
    output_token_ids: tuple[int, ...]
    end_token_ids: frozenset[int]

    def mask(self) -> RowMask:
        """What may be drawn. To be called in the runner's thread; every call gives the same."""
        try:
            allowed = self.matcher.allowed(self.output_token_ids)
        except ConstraintFailed as error:
            return RowMask(b"", failure=str(error))
        bits = bytearray(allowed.bits)
        for token_id in self.end_token_ids:
            bit = 1 << token_id % 8
            bits[token_id // 8] = bits[token_id // 8] & ~bit | bit * allowed.may_end
        return RowMask(bytes(bits), must_end=allowed.is_over)

    def masks_along(self, draft_token_ids: tuple[int, ...]) -> list[RowMask | None]:
        """What may be drawn in place of each draft, and behind the last one. The drafts leave no trace.

        Args:
            draft_token_ids: proposed to follow the output.

        Returns:
            One more than there are drafts; None behind a draft that may not stand where it stands, or that
            ends the text, and from there on.
        """
        masks: list[RowMask | None] = [self.mask()]
        output = self.output_token_ids
        for token_id in draft_token_ids:
            output += (token_id,)
            before = masks[-1]
            is_kept = before is not None and before.permits(token_id) and token_id not in self.end_token_ids
            masks.append(RowConstraint(self.matcher, output, self.end_token_ids).mask() if is_kept else None)
        return masks


class CompiledConstraint(Protocol):
    """A constraint, ready for use with one model's vocabulary. Shared between requests."""

    @property
    def source(self) -> Constraint:
        """What it was made from."""
        ...

    def start(self) -> ConstraintMatcher:
        """A matcher for a new sequence. Takes no time worth speaking of."""
        ...


class ConstraintCompiler(Protocol):
    """Makes compiled constraints, and remembers them."""

    def cached(self, constraint: Constraint) -> CompiledConstraint | None:
        """The compiled form, if it is remembered. Takes no time; to be called from any thread."""
        ...

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        """Compile, in bounded time: call it off the event loop, from one thread at a time.

        Raises:
            InvalidRequest: it is faulty, asks for what is not supported, or takes too much time or memory.
        """
        ...

    def close(self) -> None:
        """Give back what it holds. To be called from any thread, also while `compile` runs."""
        ...
