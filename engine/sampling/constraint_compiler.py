"""Compiled constraints: tried in another process, made in this one, remembered by content."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Set
from typing import BinaryIO, cast

from headrace.engine.errors import RequestFailed
from headrace.engine.sampling import constraint_trial
from headrace.engine.sampling.constraint import Constraint
from headrace.engine.sampling.constraint_grammar import GrammarRefusedError, make_vocabulary
from headrace.engine.sampling.constraint_matcher import CompiledGrammar
from headrace.engine.sampling.constraint_trial import (
    TrialLimits,
    Verdict,
    opening,
    question,
    read_frame,
    write_frame,
)
from headrace.engine.tokenizer import Tokenizer

_MAX_REMEMBERED = 32
_BYTE_SPELLING = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class GrammarCompiler:
    """See `headrace.engine.sampling.constraint.ConstraintCompiler`.

    A constraint is compiled twice: first where it can do no harm, then, once it is known to stay within
    the bounds, here. To make one takes as long as `make_vocabulary`.

    Args:
        tokenizer: of the model.
        vocab_size: ids that the model can draw, tokens.
        end_token_ids: the model's own; none of them stands in a constrained text.
        limits: of a trial.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        end_token_ids: Set[int],
        limits: TrialLimits | None = None,
    ) -> None:
        self._limits = limits or TrialLimits()
        self._compiled: OrderedDict[Constraint, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()
        self._tokens = token_table(tokenizer, vocab_size, end_token_ids)
        self._vocabulary = make_vocabulary(self._tokens)
        self._trial: _Trial | None = None
        self._is_closed = False

    def cached(self, constraint: Constraint) -> CompiledGrammar | None:
        """See `ConstraintCompiler.cached`."""
        with self._lock:
            compiled = self._compiled.get(constraint)
            if compiled is not None:
                self._compiled.move_to_end(constraint)
            return compiled

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """See `ConstraintCompiler.compile`.

        Raises:
            RequestFailed: the process for trials is gone; the next call starts another.
        """
        compiled = self.cached(constraint)
        if compiled is not None:
            return compiled
        verdict = self._tried(constraint)
        if verdict.refusal:
            raise constraint.refused(verdict.refusal)
        try:
            compiled = CompiledGrammar(constraint, self._vocabulary, verdict.grammar)
        except GrammarRefusedError as error:
            raise constraint.refused(str(error)) from error
        with self._lock:
            self._compiled[constraint] = compiled
            if len(self._compiled) > _MAX_REMEMBERED:
                self._compiled.popitem(last=False)
        return compiled

    def close(self) -> None:
        """See `ConstraintCompiler.close`."""
        with self._lock:
            self._is_closed = True
            trial, self._trial = self._trial, None
        if trial is not None:
            trial.close()

    def _tried(self, constraint: Constraint) -> Verdict:
        with self._lock:
            if self._is_closed:
                raise RequestFailed("the engine stops: no constraint is compiled any more")
            trial = self._trial = self._trial or _Trial(self._tokens, self._limits)
        try:
            return trial.ask(constraint)
        except (EOFError, OSError) as error:
            trial.close()
            with self._lock:
                if self._trial is trial:  # another caller may have started the next one already
                    self._trial = None
            raise RequestFailed("the constraint compiler ended unexpectedly: try again") from error


class _Trial:
    """The process for trials, and the way to it."""

    def __init__(self, tokens: list[bytes], limits: TrialLimits) -> None:
        # A session of its own: an interrupt from the terminal is the server's to handle, and its children
        # can be ended together with it. It ends by itself when this process does: its input is closed then.
        self._process = subprocess.Popen(
            [sys.executable, "-m", constraint_trial.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._asking = threading.Lock()
        self._ending = threading.Lock()
        self._opening: object = opening(tokens, limits)

    def ask(self, constraint: Constraint) -> Verdict:
        """Have a constraint tried.

        Raises:
            EOFError, OSError: the process is gone.
        """
        with self._asking:
            sink, source = self._pipes()
            if sink.closed:
                raise EOFError("the process for trials was ended while another caller waited for it")
            if self._opening is not None:
                write_frame(sink, self._opening)
                self._opening = None
            write_frame(sink, question(constraint))
            answer = read_frame(source)
        if not isinstance(answer, dict):
            raise EOFError("the process for trials gave no answer")
        return Verdict(answer["grammar"], answer["refusal"])

    def close(self) -> None:
        """End it, and whatever it tries just now. Two threads may do so at once."""
        # Under a lock, or one would signal the id of a process that the other has just reaped: no group of
        # that id is left, or it is somebody else's.
        with self._ending:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        # Whoever waits for an answer gets the end of the file, and leaves the pipes to be closed.
        with self._asking:
            for pipe in self._pipes():
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _pipes(self) -> tuple[BinaryIO, BinaryIO]:
        sink, source = self._process.stdin, self._process.stdout
        if sink is None or source is None:
            raise AssertionError("the process was started with pipes")
        return cast("BinaryIO", sink), cast("BinaryIO", source)


def token_table(tokenizer: Tokenizer, vocab_size: int, end_token_ids: Set[int]) -> list[bytes]:
    """Bytes that each id adds to a text; none for ids that may not stand in a constrained one.

    Args:
        tokenizer: of any kind. Where its vocabulary isn't byte-level, an id is told by what it adds to a
            letter, for at the beginning of a text some decoders drop a space.
        vocab_size: how many ids, from 0 on.
        end_token_ids: ids that end a text, whatever their spelling.
    """
    spelled = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
    if None in spelled:
        letter = tokenizer.encode("a", add_special_tokens=False)[-1:]
        before = tokenizer.decode(letter)
        spellings = tokenizer.spellings(range(vocab_size))
        spelled = [
            _bytes_behind(before, tokenizer.decode([*letter, token_id]), spelling)
            for token_id, spelling in enumerate(spellings)
        ]
    return [
        b"" if token is None or token_id in end_token_ids else token for token_id, token in enumerate(spelled)
    ]


def _bytes_behind(before: str, both: str, spelling: str) -> bytes:
    byte = _BYTE_SPELLING.fullmatch(spelling)
    if byte is not None:
        return bytes.fromhex(byte.group(1))
    return both[len(before) :].encode() if spelling and both.startswith(before) else b""
