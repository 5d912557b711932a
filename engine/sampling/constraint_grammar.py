"""From a constraint to a grammar of the library that enforces it, and the library's bounds.

The library is llguidance. It and xgrammar covered ten varied JSON schemas, an expression and a grammar, with
valid texts only, and compiled each in milliseconds; xgrammar's masks are faster (33 against 85 microseconds
on average over a vocabulary of 49,152). But 20,000 properties or 100,000 enumerated texts kept it busy for
more than 25 seconds with no way to stop it, where llguidance counts its work and gave up after 22 and 241
milliseconds; it refuses the keywords of JSON Schema that it does not enforce; and it is one wheel of 3 MB
that needs nothing, where xgrammar brings triton and a foreign-function library along.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from random import Random

from llguidance import (
    LLMatcher,
    LLParserLimits,
    LLTokenizer,
    TokenizerWrapper,
    grammar_from,
    regex_to_lark,
)

from headrace.engine.sampling.constraint import Constraint, ConstraintKind

MAX_JSON_DEPTH = 100
"""Brackets of a schema within brackets; the library reads 127 of them."""

_MAX_MESSAGE_LEN = 300
_ASCII_CLASSES = "dws"
_NUM_TRIAL_TOKENS = 16

_QUOTED = re.compile(r"\s*(\d+ \||\^)")
_PLACE = re.compile(r"(at )?\d+\(\d+\): (failed to compile JSON schema: )?")
_IN_REGEX = "(in regex): "

# What one matcher may spend. The worst masks of hostile grammars then took 4 ms, against a second and more at
# the library's own bounds; twenty ordinary schemas and grammars needed no more than a fifth of the items of a
# step and less than half of its fuel.
_COMPILE_FUEL = 1_000_000
# What compiling leaves of its fuel is there for the first text that is followed without masks. Thus a whole
# one may take as much again, and more: tens of milliseconds at worst. What new states a text needs is what
# costs, not its length: ordinary ones of 4,000 tokens took far less than half of it.
_REPLAY_FUEL = 2 * _COMPILE_FUEL
_STEP_FUEL = 50_000


def _limits(initial_fuel: int, step_fuel: int) -> LLParserLimits:
    return LLParserLimits(
        max_items_in_row=1_000,
        initial_lexer_fuel=initial_fuel,
        step_lexer_fuel=step_fuel,
        step_max_items=5_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        # Its long form quotes what its users wrote, which has no place in a log.
        verbose_errors=False,
    )


_LIMITS = _limits(_COMPILE_FUEL, _STEP_FUEL)
_REPLAY_LIMITS = _limits(_REPLAY_FUEL, _STEP_FUEL)

# A mask is then every token that keeps the text within the language, not only the one that the tokenizer
# itself would have chosen.
_PREAMBLE = '%llguidance {"no_forcing": true}\n'

# As json.dumps writes, so that no model can go on with white space for ever.
_JSON_OPTIONS: Mapping[str, object] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
}


class GrammarRefusedError(Exception):
    """The constraint can't be followed; the message is made for whoever sent it."""


class TokenTable:
    """A vocabulary as the library wants it: bytes per id, and one id past the last for the end of a text.

    Args:
        tokens: bytes of every id; none for an id that never stands in a constrained text.
    """

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = [*tokens, b""]
        self.eos_token_id = len(tokens)
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        """Encode a text that the grammar forces, which `_PREAMBLE` forbids it to do."""
        raise NotImplementedError("no text is forced, so none is encoded")


def make_vocabulary(tokens: Sequence[bytes]) -> LLTokenizer:
    """The library's own form of a vocabulary. Takes tenths of a second.

    Args:
        tokens: see `TokenTable`.
    """
    return LLTokenizer(TokenizerWrapper(TokenTable(tokens)), n_vocab=len(tokens) + 1)


def grammar_of(constraint: Constraint) -> str:
    """Write a constraint in the library's language.

    Raises:
        GrammarRefusedError: it is no JSON, too deep, or no grammar.
    """
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return _json_grammar(_schema(constraint.text))
        case ConstraintKind.JSON_OBJECT:
            return _json_grammar({"type": "object"})
        case ConstraintKind.REGEX:
            return f"{_PREAMBLE}start: /{regex_to_lark(constraint.text, _ASCII_CLASSES)}/\n"
        case ConstraintKind.CHOICE:
            options = " | ".join(json.dumps(option, ensure_ascii=False) for option in constraint.choices)
            return f"{_PREAMBLE}start: {options}\n"
        case ConstraintKind.GRAMMAR:
            try:
                return _PREAMBLE + grammar_from("ebnf", constraint.text)
            except ValueError as error:
                if isinstance(error.__context__, RecursionError):
                    raise GrammarRefusedError("is nested too deeply") from error
                raise GrammarRefusedError(told(str(error).rpartition("to Lark: ")[2])) from error


def new_matcher(vocabulary: LLTokenizer, grammar: str, *, for_replay: bool = False) -> LLMatcher:
    """Compile a grammar. The work is counted, and given up when it is too much.

    Args:
        for_replay: it is known to compile, and a text that is written already is to be followed at once.

    Raises:
        GrammarRefusedError: it is faulty, too large, or admits no text.
    """
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=_REPLAY_LIMITS if for_replay else _LIMITS)
    if matcher.is_error():
        raise GrammarRefusedError(told(matcher.get_error()))
    return matcher


def try_out(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile a grammar and follow it for some tokens: it must admit a text, and masks within the bounds.

    What has been tried is also what the first requests would have waited for, so it is of use to them.

    Raises:
        GrammarRefusedError: see `new_matcher`.
    """
    compiled = new_matcher(vocabulary, grammar)
    walker, random = compiled.deep_copy(), Random(0)
    for step in range(_NUM_TRIAL_TOKENS):
        allowed = int.from_bytes(walker.compute_bitmask(), "little")
        if walker.is_error() and step == 0 and "NoExtension" in walker.get_error():
            raise GrammarRefusedError("admits no text at all")
        if walker.is_error():
            raise GrammarRefusedError(f"is too complex to be followed: {told(walker.get_error())}")
        allowed &= ~(1 << vocabulary.eos_token)
        if not allowed:
            break
        walker.consume_token(_any_bit(allowed, random))
    return compiled


def _any_bit(bits: int, random: Random) -> int:
    """Position of a bit that is set: the first from some place on, around the corner if need be."""
    place = random.randrange(bits.bit_length())
    rest = (bits >> place) << place or bits
    return (rest & -rest).bit_length() - 1


def _json_grammar(schema: Mapping[str, object]) -> str:
    with_options = {**schema, "x-guidance": _JSON_OPTIONS}
    return f"{_PREAMBLE}start: %json {json.dumps(with_options, ensure_ascii=False)}\n"


def _schema(text: str) -> Mapping[str, object]:
    if _depth(text) > MAX_JSON_DEPTH:
        raise GrammarRefusedError(f"is nested too deeply: use at most {MAX_JSON_DEPTH} levels of brackets")
    try:
        schema = json.loads(text, parse_constant=_refuse_number)
    except ValueError as error:
        raise GrammarRefusedError(f"must be JSON: {told(str(error))}") from error
    if not isinstance(schema, dict):
        raise GrammarRefusedError('must be a JSON object, such as {"type": "object"}')
    return schema


def _refuse_number(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")


def _depth(text: str) -> int:
    """Most brackets that are open at once, those within JSON strings not counted."""
    depth = deepest = 0
    is_quoted = is_escaped = False
    for character in text:
        if is_quoted:
            is_quoted = is_escaped or character != '"'
            is_escaped = character == "\\" and not is_escaped
        elif character == '"':
            is_quoted = True
        elif character in "{[":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "}]":
            depth -= 1
    return deepest


def told(message: str) -> str:
    """The library's message, as short as a status should be."""
    if message.startswith("panic"):
        return "the grammar compiler can't make sense of it"
    # It quotes the grammar, numbered, with more in it than its author has written.
    lines = [line for line in message.splitlines() if not _QUOTED.match(line)]
    line = " ".join(" ".join(lines).replace("<non-verbose/>", "").split())
    line = _PLACE.sub("", line.rpartition(_IN_REGEX)[2]).rpartition("error: ")[2]
    return line if len(line) <= _MAX_MESSAGE_LEN else f"{line[:_MAX_MESSAGE_LEN]}…"
