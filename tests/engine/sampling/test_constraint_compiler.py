"""Compiling with a process for trials: hostile constraints end, the one who serves goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headrace.engine.errors import InvalidRequest, RequestFailed
from headrace.engine.models.tokenizer import HFTokenizer
from headrace.engine.sampling.constraint import Constraint, ConstraintKind
from headrace.engine.sampling.constraint_compiler import GrammarCompiler, token_table
from headrace.engine.sampling.constraint_trial import TrialLimits
from tests.support.fake_runner import EOS, NUM_BYTES, VOCAB_SIZE, FakeTokenizer
from tests.support.tiny_models import tiny_tokenizer

YES_OR_NO = Constraint(ConstraintKind.CHOICE, choices=("yes", "no"))
# The converter of such grammars goes through all rules for each rule.
SLOW = Constraint(
    ConstraintKind.GRAMMAR,
    "root ::= r0\n" + "".join(f'r{i} ::= "a" r{i + 1}\n' for i in range(9000)) + 'r9000 ::= "b"\n',
)
LARGE = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"enum": [f"text {i}" for i in range(15_000)]}))


def make_compiler(**limits: float) -> GrammarCompiler:
    return GrammarCompiler(FakeTokenizer(), VOCAB_SIZE, frozenset({EOS}), TrialLimits(**limits))  # type: ignore[arg-type]


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    compiler = make_compiler()
    yield compiler
    compiler.close()


def trial_processes() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since it was listed
            if any("constraint_trial" in argument for argument in child.cmdline()):
                found.append(child)
    return found


def test_equal_constraints_are_compiled_once(compiler: GrammarCompiler) -> None:
    assert compiler.cached(YES_OR_NO) is None
    compiled = compiler.compile(YES_OR_NO)
    assert compiled.source == YES_OR_NO
    equal = Constraint(ConstraintKind.CHOICE, choices=("yes", "no"))
    assert compiler.compile(equal) is compiled
    assert compiler.cached(equal) is compiled


def test_what_has_not_been_used_for_longest_is_forgotten(compiler: GrammarCompiler) -> None:
    first = compiler.compile(YES_OR_NO)
    numbered = [Constraint(ConstraintKind.REGEX, f"a{i}") for i in range(70)]
    for constraint in numbered:
        compiler.compile(constraint)
        assert compiler.compile(YES_OR_NO) is first
    assert compiler.cached(numbered[0]) is None
    assert compiler.cached(numbered[-1]) is not None


def test_a_refusal_names_the_field(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        compiler.compile(Constraint(ConstraintKind.REGEX, "(a"))
    [violation] = refusal.value.violations
    assert (violation.field, violation.description) == ("constraint.regex", "unclosed group")


def test_a_constraint_that_takes_too_long_is_refused_and_the_next_is_served() -> None:
    compiler = make_compiler(cpu_s=0.2)
    try:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=r"constraint.grammar: takes more than 0.2 s to compile"):
                compiler.compile(SLOW)
        assert compiler.compile(YES_OR_NO).source == YES_OR_NO
    finally:
        compiler.close()


def test_a_constraint_that_takes_too_much_memory_is_refused_and_the_next_is_served() -> None:
    compiler = make_compiler(memory_bytes=4 * 2**20, cpu_s=60)
    try:
        with pytest.raises(InvalidRequest, match=r"constraint.json_schema: takes more than 4 MiB to compile"):
            compiler.compile(LARGE)
        assert compiler.compile(YES_OR_NO).source == YES_OR_NO
    finally:
        compiler.close()


def test_a_constraint_that_waits_for_ever_is_refused() -> None:
    compiler = make_compiler(wall_s=0.0)
    try:
        with pytest.raises(InvalidRequest, match="to compile"):
            compiler.compile(SLOW)
    finally:
        compiler.close()


def test_the_process_for_trials_is_started_when_it_is_needed_and_ended_with_the_compiler() -> None:
    compiler = make_compiler()
    assert trial_processes() == []
    compiler.compile(YES_OR_NO)
    [process] = trial_processes()
    compiler.close()
    assert not process.is_running()
    with pytest.raises(RequestFailed, match="no constraint is compiled any more"):
        compiler.compile(Constraint(ConstraintKind.REGEX, "a"))


def test_a_process_that_was_killed_fails_one_call_and_is_replaced(compiler: GrammarCompiler) -> None:
    compiler.compile(YES_OR_NO)
    [process] = trial_processes()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(RequestFailed, match="ended unexpectedly: try again"):
        compiler.compile(Constraint(ConstraintKind.REGEX, "a"))
    assert compiler.compile(Constraint(ConstraintKind.REGEX, "a")).source.text == "a"
    assert trial_processes() != [process]


def test_closing_breaks_off_what_is_being_compiled() -> None:
    compiler = make_compiler(cpu_s=3600, wall_s=3600)
    compiler.compile(YES_OR_NO)
    outcomes: list[Exception] = []

    def compile_slowly() -> None:
        try:
            compiler.compile(SLOW)
        except RequestFailed as error:
            outcomes.append(error)

    thread = threading.Thread(target=compile_slowly)
    thread.start()
    while len(trial_processes()) < 2:  # the one that forks, and the one that compiles
        assert thread.is_alive()
    compiler.close()
    thread.join()
    assert "ended unexpectedly" in str(outcomes[0])


def outcome_of_compiling(compiler: GrammarCompiler) -> Exception | None:
    try:
        compiler.compile(YES_OR_NO)
    except Exception as error:
        return error
    return None


def test_callers_and_the_one_who_closes_may_end_the_process_at_once() -> None:
    for _ in range(40):
        compiler = make_compiler()
        with ThreadPoolExecutor(max_workers=3) as callers:
            outcomes = [callers.submit(outcome_of_compiling, compiler) for _ in range(3)]
            compiler.close()
        # One that was compiled before the end came is fine, too; on most machines none is.
        assert all(isinstance(outcome.result(), RequestFailed | None) for outcome in outcomes)
        assert trial_processes() == []


def test_end_ids_and_special_tokens_are_no_text() -> None:
    table = token_table(FakeTokenizer(), VOCAB_SIZE, frozenset({ord("x"), EOS}))
    assert len(table) == VOCAB_SIZE
    assert [i for i, token in enumerate(table) if token == b""] == [ord("x"), NUM_BYTES, EOS]
    assert table[:3] == [b"\x00", b"\x01", b"\x02"]


def test_a_byte_level_vocabulary_gives_bytes_and_nothing_for_ids_past_it() -> None:
    tokenizer = HFTokenizer(tiny_tokenizer())
    table = token_table(tokenizer, 600, frozenset())
    assert len(table) == 600
    assert table[tokenizer.vocab_size :] == [b""] * (600 - tokenizer.vocab_size)
    ids = tokenizer.encode("The mill: Zürich 水車 🌊\n")
    assert b"".join(table[i] for i in ids).decode() == "The mill: Zürich 水車 🌊\n"


def test_a_sentencepiece_vocabulary_gives_spaces_and_byte_tokens() -> None:
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁ab", "é"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(content=" ", left=1, right=0),
    ]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("</s>", special=True)])
    tokenizer = HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))
    table = token_table(tokenizer, len(pieces), frozenset({1}))
    assert table[:2] == [b"", b""]
    assert table[2:258] == [bytes([byte]) for byte in range(256)]
    assert table[258:] == [b" ", b"a", b"b", b" a", b" ab", "é".encode()]
