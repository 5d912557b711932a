"""Masks against the language itself; what a matcher remembers changes nothing."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from headrace.engine.errors import ConstraintFailed
from headrace.engine.sampling import constraint_matcher
from headrace.engine.sampling.constraint import AllowedTokens, Constraint, ConstraintKind, RowConstraint
from headrace.engine.sampling.constraint_grammar import grammar_of, make_vocabulary, new_matcher
from headrace.engine.sampling.constraint_matcher import CompiledGrammar, GrammarMatcher
from tests.support.languages import LANGUAGES, VOCABULARIES, Language

BYTES = [bytes([byte]) for byte in range(256)]


def compiled(kind: ConstraintKind, text: str, tokens: list[bytes] = BYTES) -> CompiledGrammar:
    constraint = Constraint(kind, text)
    return CompiledGrammar(constraint, make_vocabulary(tokens), grammar_of(constraint))


def regex(text: str, tokens: list[bytes] = BYTES) -> CompiledGrammar:
    return compiled(ConstraintKind.REGEX, text, tokens)


def ids_in(allowed: AllowedTokens) -> set[int]:
    return {i for i in range(8 * len(allowed.bits)) if allowed.bits[i // 8] >> i % 8 & 1}


def assert_like(allowed: AllowedTokens, language: Language, tokens: list[bytes], written: bytes) -> None:
    expected = language.allowed(tokens, written)
    assert ids_in(allowed) == expected
    assert allowed.may_end == (written in language.texts)
    assert allowed.is_over == (allowed.may_end and not expected)
    assert len(allowed.bits) == -(-len(tokens) // 8)


@given(LANGUAGES, VOCABULARIES, st.randoms(use_true_random=False))
def test_every_mask_on_the_way_is_the_languages_own(
    language: Language, tokens: list[bytes], chooser: random.Random
) -> None:
    matcher = regex(language.regex, tokens).start()
    output: tuple[int, ...] = ()
    while True:
        written = b"".join(tokens[i] for i in output)
        allowed = matcher.allowed(output)
        assert_like(allowed, language, tokens, written)
        choices = sorted(ids_in(allowed))
        if not choices:
            assert written in language.texts
            return
        output += (chooser.choice(choices),)


@given(LANGUAGES, VOCABULARIES, st.lists(st.randoms(use_true_random=False), min_size=2, max_size=6))
def test_the_order_of_questions_changes_no_answer(
    language: Language, tokens: list[bytes], choosers: list[random.Random]
) -> None:
    grammar = regex(language.regex, tokens)
    matcher = grammar.start()
    for chooser in choosers:
        # Any text that may stand, whatever was asked before: shorter, longer, other.
        output: tuple[int, ...] = ()
        while (choices := sorted(ids_in(grammar.start().allowed(output)))) and chooser.random() < 0.8:
            output += (chooser.choice(choices),)
        expected = grammar.start().allowed(output)
        assert matcher.allowed(output) == expected
        assert matcher.allowed(output) == expected


@given(LANGUAGES, VOCABULARIES, st.lists(st.integers(0, 4), max_size=5))
def test_drafts_are_looked_along_and_leave_no_trace(
    language: Language, tokens: list[bytes], drafts: list[int]
) -> None:
    # One more id, without bytes: it ends the text.
    tokens = [*tokens[:4], b"", *tokens[4:]]
    end_id = 4
    matcher = regex(language.regex, tokens).start()
    constraint = RowConstraint(matcher, (), frozenset({end_id}))
    masks = constraint.masks_along(tuple(drafts))
    assert len(masks) == len(drafts) + 1
    for num_drafts, mask in enumerate(masks):
        kept = drafts[:num_drafts]
        written = b"".join(tokens[i] for i in kept)
        if end_id in kept or not any(text.startswith(written) for text in language.texts):
            assert mask is None
            continue
        expected = language.allowed(tokens, written) | ({end_id} if written in language.texts else set())
        assert mask is not None
        assert {i for i in range(len(tokens)) if mask.permits(i)} == expected
        assert mask.must_end == (expected == {end_id})
    assert_like(matcher.allowed(()), language, tokens, b"")


def test_forks_go_their_own_ways() -> None:
    matcher = regex("a(bc|cb)").start()
    matcher.allowed(tuple(b"a"))
    fork = matcher.fork()
    assert ids_in(matcher.allowed(tuple(b"ab"))) == {ord("c")}
    assert ids_in(fork.allowed(tuple(b"ac"))) == {ord("b")}
    assert ids_in(matcher.allowed(tuple(b"abc"))) == set()
    assert ids_in(fork.allowed(tuple(b"a"))) == {ord("b"), ord("c")}


def test_a_text_that_can_go_on_may_also_end() -> None:
    allowed = regex("ab*").start().allowed(tuple(b"ab"))
    assert (allowed.may_end, allowed.is_over, ids_in(allowed)) == (True, False, {ord("b")})


def test_a_token_that_does_not_fit_fails_the_request_and_no_other() -> None:
    grammar = regex("ab")
    matcher = grammar.start()
    with pytest.raises(ConstraintFailed, match="98 does not fit"):
        matcher.allowed(tuple(b"b"))
    assert ids_in(matcher.allowed(tuple(b"a"))) == {ord("b")}
    assert ids_in(grammar.start().allowed(())) == {ord("a")}


def test_a_grammar_of_nested_brackets_is_followed_to_its_end() -> None:
    matcher = compiled(ConstraintKind.GRAMMAR, 'root ::= "(" root ")" | "x"\n').start()
    assert ids_in(matcher.allowed(tuple(b"((("))) == {ord("("), ord("x")}
    assert ids_in(matcher.allowed(tuple(b"(((x)"))) == {ord(")")}
    assert matcher.allowed(tuple(b"(((x)))")).is_over


def test_json_is_written_with_one_space_behind_comma_and_colon() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"enum": ["ü", "x"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    grammar = compiled(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
    language = Language("", frozenset({b'{"a": 1, "b": "\xc3\xbc"}', b'{"a": 1, "b": "x"}'}))
    for text in language.texts:
        for length in range(len(text) + 1):
            assert_like(grammar.start().allowed(tuple(text[:length])), language, BYTES, text[:length])


@pytest.mark.parametrize("choices", [("yes", "no"), ("yes", "yes please"), ("東京", "🌊"), ('"', "\\", "\n")])
def test_a_choice_is_one_of_its_options_to_the_byte(choices: tuple[str, ...]) -> None:
    constraint = Constraint(ConstraintKind.CHOICE, choices=choices)
    grammar = CompiledGrammar(constraint, make_vocabulary(BYTES), grammar_of(constraint))
    language = Language("", frozenset(option.encode() for option in choices))
    for text in language.texts:
        for length in range(len(text) + 1):
            assert_like(grammar.start().allowed(tuple(text[:length])), language, BYTES, text[:length])


def write_at_random(matcher: GrammarMatcher, chooser: random.Random, num_tokens: int) -> None:
    output: tuple[int, ...] = ()
    for _ in range(num_tokens):
        matcher.allowed(output)
        output += (chooser.randrange(10),)


def test_who_exhausts_the_common_table_fails_alone() -> None:
    chooser = random.Random(1)
    # What may follow depends on the last ninety letters: nearly every token leads to states never seen.
    tokens = [b"a", b"b", *(bytes(chooser.choice(b"ab") for _ in range(60)) for _ in range(8))]
    grammar = regex("[ab]*a[ab]{90}", tokens)
    others = [(grammar.start(), tuple(chooser.randrange(10) for _ in range(20))) for _ in range(3)]
    before = [matcher.allowed(output) for matcher, output in others]
    with pytest.raises(ConstraintFailed, match="can't be followed any further"):
        write_at_random(grammar.start(), chooser, num_tokens=3000)
    assert [matcher.allowed(output) for matcher, output in others] == before
    for matcher, output in others:
        longer = (*output, 3, 4, 5, 6, 7, 8)
        assert matcher.allowed(longer) == regex("[ab]*a[ab]{90}", tokens).start().allowed(longer)
    assert grammar.start().allowed(others[0][1]) == before[0]


@dataclass
class Work:
    """What has been asked of the library since tables began to be renewed."""

    num_tables: int = 0
    num_masks: int = 0
    num_tokens: int = 0


class CountedMatcher:
    """One of the library's, whose work is counted."""

    def __init__(self, matcher: LLMatcher, work: Work) -> None:
        self._matcher = matcher
        self._work = work

    def deep_copy(self) -> CountedMatcher:
        return CountedMatcher(self._matcher.deep_copy(), self._work)

    def rollback(self, num_tokens: int) -> bool:
        return self._matcher.rollback(num_tokens)

    def try_consume_tokens(self, tokens: list[int]) -> int:
        num_taken = self._matcher.try_consume_tokens(tokens)
        self._work.num_tokens += num_taken
        return num_taken

    def compute_bitmask(self) -> bytes:
        self._work.num_masks += 1
        return self._matcher.compute_bitmask()

    def is_error(self) -> bool:
        return self._matcher.is_error()

    def get_error(self) -> str:
        return self._matcher.get_error()


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    counted = Work()

    def counting(vocabulary: LLTokenizer, grammar: str, *, for_replay: bool = False) -> CountedMatcher:
        counted.num_tables += 1
        return CountedMatcher(new_matcher(vocabulary, grammar, for_replay=for_replay), counted)

    monkeypatch.setattr(constraint_matcher, "new_matcher", counting)
    return counted


# An ordinary text, until an x: behind it, what may follow depends on the last ninety letters.
_LONG = "[a-w ,]*(x[yz]*y[yz]{90})?"
_LETTERS = [
    *(b"the ", b"mill, ", b"is ", b"turning ", b"x", b"y", b"z"),
    *(bytes(random.Random(i).choices(b"yz", k=60)) for i in range(5)),
]


def exhaust(grammar: CompiledGrammar, chooser: random.Random) -> int:
    """Write behind an x until that can't be followed any further; how many tokens that took."""
    matcher = grammar.start()
    output: list[int] = [4]

    def write() -> None:
        while len(output) < 30_000:
            matcher.allowed(tuple(output))
            output.append(chooser.randrange(5, 12))

    with pytest.raises(ConstraintFailed, match="can't be followed any further"):
        write()
    return len(output)


def test_a_long_text_goes_on_in_a_new_table_at_the_price_of_one_mask(work: Work) -> None:
    chooser = random.Random(2)
    grammar = regex(_LONG, _LETTERS)
    long = tuple(chooser.randrange(4) for _ in range(3000))
    matcher, other = grammar.start(), grammar.start()
    before, shorter = matcher.allowed(long), matcher.allowed(long[:-2])
    assert other.allowed(long) == before
    assert matcher.allowed(long) == before
    exhaust(grammar, chooser)
    num_tables = work.num_tables
    work.num_masks = work.num_tokens = 0
    assert matcher.allowed(long) == before
    assert (work.num_tables, work.num_masks, work.num_tokens) == (num_tables + 1, 1, len(long))
    assert matcher.allowed(long[:-2]) == shorter
    assert matcher.allowed((*long, 0, 1)) == regex(_LONG, _LETTERS).start().allowed((*long, 0, 1))
    assert other.allowed(long) == before
