"""Follows constrained texts token by token: masks out of a compiled grammar."""

from __future__ import annotations

from llguidance import LLMatcher, LLTokenizer

from headrace.engine.errors import ConstraintFailed
from headrace.engine.sampling.constraint import AllowedTokens, Constraint
from headrace.engine.sampling.constraint_grammar import GrammarRefusedError, new_matcher, told, try_out


class CompiledGrammar:
    """See `headrace.engine.sampling.constraint.CompiledConstraint`.

    Copies of one of the library's matchers share a table of lexer states, which only grows. Once it is full
    every copy fails, whoever filled it; so the table is then begun anew, under the next edition.

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

    def renew(self, edition: int) -> None:
        """Begin a new edition, unless somebody has done so since `edition`.

        Raises:
            ConstraintFailed: the grammar compiles no more.
        """
        if edition == self._edition:
            try:
                self._initial = new_matcher(self._vocabulary, self._grammar)
            except GrammarRefusedError as error:
                raise ConstraintFailed(f"the constraint could not be compiled again: {error}") from error
            self._edition += 1


class GrammarMatcher:
    """See `headrace.engine.sampling.constraint.ConstraintMatcher`.

    Args:
        compiled: the grammar; compiled matchers are copied from it when they are first needed.
    """

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._compiled = compiled
        self._matcher: LLMatcher | None = None
        self._edition = 0
        self._taken: tuple[int, ...] = ()

    def allowed(self, output_token_ids: tuple[int, ...]) -> AllowedTokens:
        """See `ConstraintMatcher.allowed`."""
        failure = ""
        # The first failure may be the doing of others that share the table, the second is our own.
        for _ in range(2):
            try:
                return self._next(self._at(output_token_ids))
            except _ExhaustedError as error:
                failure = str(error)
                self._compiled.renew(self._edition)
                self._matcher = None
        raise ConstraintFailed(f"the constraint can't be followed any further: {failure}")

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
            if not matcher.try_consume_tokens([token_id]):
                raise _ExhaustedError(
                    told(matcher.get_error()) or f"token {token_id} does not fit where it stands"
                )
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


def _num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Length of the longest common beginning; fast where one begins the other, which is nearly always."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(i for i in range(shorter) if one[i] != other[i])
