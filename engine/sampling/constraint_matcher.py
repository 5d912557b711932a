"""Follows constrained texts token by token: masks out of a compiled grammar."""

from __future__ import annotations

from llguidance import LLMatcher, LLTokenizer

from headrace.engine.errors import ConstraintFailed
from headrace.engine.sampling.constraint import AllowedTokens, Constraint
from headrace.engine.sampling.constraint_grammar import GrammarRefusedError, new_matcher, told, try_out


class CompiledGrammar:
    """See `headrace.engine.sampling.constraint.CompiledConstraint`.

    Copies of one of the library's matchers share a table of lexer states, which only grows. Once it is full
    every copy fails, whoever filled it. Each then goes on in a table that holds what its own text leads to,
    and the first of these is the next edition: what new texts share from then on.

    Args:
        source: what is compiled.
        vocabulary: of the model.
        grammar: `source` in the library's language, known to compile within the bounds.

    Raises:
        GrammarRefusedError: it doesn't compile.
    """

    def __init__(self, source: Constraint, vocabulary: LLTokenizer, grammar: str) -> None:
        self.source = source
        self._vocabulary = vocabulary
        self._grammar = grammar
        self._edition = 0
        self._initial = try_out(vocabulary, grammar)

    @property
    def vocab_size(self) -> int:
        """Ids that a text may hold."""
        return int(self._vocabulary.eos_token)

    def start(self) -> GrammarMatcher:
        """See `CompiledConstraint.start`."""
        return GrammarMatcher(self)

    def initial(self) -> tuple[LLMatcher, int]:
        """A matcher of the library before the first token, and which edition it belongs to."""
        return self._initial.deep_copy(), self._edition

    def renewed(self, edition: int | None, token_ids: tuple[int, ...]) -> tuple[LLMatcher, int | None]:
        """A matcher of the library behind these tokens, in a new table, and which edition that is.

        No mask is computed on the way: what a whole text may cost is bounded as what compiling may, and by
        far less than as many masks would take.

        Args:
            edition: where they could not be followed any further; None for a table of one text's own.

        Raises:
            ConstraintFailed: they can't be followed with what that allows, or the grammar compiles no more.
        """
        try:
            fresh = new_matcher(self._vocabulary, self._grammar, for_replay=True)
        except GrammarRefusedError as error:
            raise ConstraintFailed(f"the constraint could not be compiled again: {error}") from error
        matcher = fresh.deep_copy()
        try:
            _consume(matcher, token_ids)
        except _ExhaustedError as error:
            raise ConstraintFailed(f"the constraint can't be followed any further: {error}") from error
        if edition != self._edition:
            return matcher, None
        # Only now, for a text that exhausts a table by itself would have taken the next ones with it.
        self._initial = fresh
        self._edition += 1
        return matcher, self._edition


class GrammarMatcher:
    """See `headrace.engine.sampling.constraint.ConstraintMatcher`.

    Args:
        compiled: the grammar; compiled matchers are copied from it when they are first needed.
    """

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._compiled = compiled
        self._matcher: LLMatcher | None = None
        self._edition: int | None = None
        self._taken: tuple[int, ...] = ()

    def allowed(self, output_token_ids: tuple[int, ...]) -> AllowedTokens:
        """See `ConstraintMatcher.allowed`."""
        try:
            return self._next(self._at(output_token_ids))
        except _ExhaustedError:
            # This may be the doing of others that share the table; what comes of it in a new one is our own.
            self._matcher = None
            self._matcher, self._edition = self._compiled.renewed(self._edition, output_token_ids)
            self._taken = output_token_ids
        try:
            return self._next(self._matcher)
        except _ExhaustedError as error:
            raise ConstraintFailed(f"the constraint can't be followed any further: {error}") from error

    def fork(self) -> GrammarMatcher:
        """See `ConstraintMatcher.fork`."""
        other = GrammarMatcher(self._compiled)
        if self._matcher is not None:
            other._matcher = self._matcher.deep_copy()
            other._edition, other._taken = self._edition, self._taken
        return other

    def _at(self, token_ids: tuple[int, ...]) -> LLMatcher:
        """The library's matcher behind exactly these tokens: what is not among them is taken back."""
        if self._matcher is None:
            self._matcher, self._edition = self._compiled.initial()
            self._taken = ()
        num_common = _num_common(self._taken, token_ids)
        num_surplus = len(self._taken) - num_common
        if num_surplus and not self._matcher.rollback(num_surplus):
            raise _ExhaustedError(told(self._matcher.get_error()))
        self._taken = token_ids[:num_common]
        self._take(self._matcher, token_ids[num_common:])
        return self._matcher

    def _take(self, matcher: LLMatcher, token_ids: tuple[int, ...]) -> None:
        for i, token_id in enumerate(token_ids):
            if i > 0:
                # A step's allowance comes with its mask, and a matcher that has spent it never recovers.
                matcher.compute_bitmask()
            _consume(matcher, (token_id,))
            self._taken += (token_id,)

    def _next(self, matcher: LLMatcher) -> AllowedTokens:
        bits = matcher.compute_bitmask()
        if matcher.is_error():
            raise _ExhaustedError(told(matcher.get_error()))
        vocab_size = self._compiled.vocab_size
        end, end_bit = vocab_size // 8, 1 << vocab_size % 8
        may_end = bool(bits[end] & end_bit)
        # Past the vocabulary the library leaves bits as they come.
        bits = (bits[:end] + bytes((bits[end] & (end_bit - 1),)))[: -(-vocab_size // 8)]
        return AllowedTokens(bits, may_end, is_over=may_end and not bits.strip(b"\0"))


class _ExhaustedError(Exception):
    """The library has given up: one of its bounds was reached."""


def _consume(matcher: LLMatcher, token_ids: tuple[int, ...]) -> None:
    """Follow tokens without asking what else could stand in their places."""
    num_taken = matcher.try_consume_tokens(list(token_ids))
    if num_taken < len(token_ids):
        raise _ExhaustedError(
            told(matcher.get_error()) or f"token {token_ids[num_taken]} does not fit where it stands"
        )


def _num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Length of the longest common beginning; fast where one begins the other, which is nearly always."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(i for i in range(shorter) if one[i] != other[i])
