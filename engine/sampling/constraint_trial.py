"""A process that tries constraints out, so that none can hurt the one that serves.

`main` holds the vocabulary and does nothing else than fork: every constraint is compiled in a child of its
own, which the system ends when it has used up its computing time or its memory, and which takes a crash of
the compiler with it. Nothing is ever forked from the serving process, whose threads would not survive it.

Both ways over the pipes: four bytes of length, then JSON.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import struct
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from llguidance import LLTokenizer

from headrace.engine.sampling.constraint import Constraint, ConstraintKind
from headrace.engine.sampling.constraint_grammar import (
    GrammarRefusedError,
    grammar_of,
    make_vocabulary,
    try_out,
)

_LENGTH = struct.Struct("<I")
_NICENESS = 5


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """What compiling one constraint may take.

    Args:
        cpu_s: computing time, seconds: how busy the machine is makes no difference.
        wall_s: time on the clock, seconds, for a compiler that waits for something.
        memory_bytes: beyond what the process has before it starts.
    """

    cpu_s: float = 2.0
    wall_s: float = 60.0
    memory_bytes: int = 512 * 2**20


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a trial.

    Args:
        grammar: the constraint in the library's language, if it has stood the trial; else empty.
        refusal: why not; else empty.
    """

    grammar: str = ""
    refusal: str = ""


def write_frame(pipe: BinaryIO, content: object) -> None:
    """Send anything that JSON can hold."""
    frame = json.dumps(content).encode()
    pipe.write(_LENGTH.pack(len(frame)) + frame)
    pipe.flush()


def read_frame(pipe: BinaryIO) -> object:
    """Receive it.

    Raises:
        EOFError: the other side is gone.
    """
    length = pipe.read(_LENGTH.size)
    if len(length) < _LENGTH.size:
        raise EOFError("the pipe was closed")
    (num_bytes,) = _LENGTH.unpack(length)
    frame = pipe.read(num_bytes)
    if len(frame) < num_bytes:
        raise EOFError("the pipe was closed within a message")
    content: object = json.loads(frame)
    return content


def main() -> None:
    """Try what stdin brings, until it is closed."""
    os.nice(_NICENESS)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    tokens, settings = _opening(read_frame(source))
    vocabulary = make_vocabulary(tokens)
    while True:
        try:
            constraint = _constraint(read_frame(source))
        except EOFError:
            return
        write_frame(sink, asdict(_try_in_child(vocabulary, constraint, settings)))


def opening(tokens: list[bytes], limits: TrialLimits) -> object:
    """The first message to `main`."""
    return {"tokens": [token.decode("latin-1") for token in tokens], "limits": asdict(limits)}


def question(constraint: Constraint) -> object:
    """Any further message to it."""
    return {"kind": constraint.kind, "text": constraint.text, "choices": constraint.choices}


def _opening(content: object) -> tuple[list[bytes], TrialLimits]:
    if not isinstance(content, dict):
        raise TypeError("the first message holds vocabulary and limits")
    return [token.encode("latin-1") for token in content["tokens"]], TrialLimits(**content["limits"])


def _constraint(content: object) -> Constraint:
    if not isinstance(content, dict):
        raise TypeError("a message holds a constraint")
    return Constraint(ConstraintKind(content["kind"]), content["text"], tuple(content["choices"]))


def _try_in_child(vocabulary: LLTokenizer, constraint: Constraint, limits: TrialLimits) -> Verdict:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # Whatever happens, this copy of the process may not return from here.
        try:
            os.close(reading)
            _bind(limits)
            with os.fdopen(writing, "wb") as pipe:
                write_frame(pipe, asdict(_try(vocabulary, constraint)))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = _read_until(pipe, time.monotonic() + limits.wall_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if answer is not None:
        content = json.loads(answer)
        return Verdict(content["grammar"], content["refusal"])
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGKILL):
        return Verdict(refusal=f"takes more than {limits.cpu_s:g} s to compile: make it simpler")
    return Verdict(
        refusal=f"takes more than {limits.memory_bytes // 2**20} MiB to compile, or breaks the compiler: "
        "make it simpler"
    )


def _bind(limits: TrialLimits) -> None:
    """Let the system end this process when it takes too much."""
    # Whoever started the server may have had other plans with this signal; by default it ends a process.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
    statm = Path("/proc/self/statm")
    if statm.is_file():
        most = int(statm.read_text().split()[0]) * resource.getpagesize() + limits.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _try(vocabulary: LLTokenizer, constraint: Constraint) -> Verdict:
    try:
        grammar = grammar_of(constraint)
        try_out(vocabulary, grammar)
    except GrammarRefusedError as error:
        return Verdict(refusal=str(error))
    except RecursionError:
        return Verdict(refusal="is nested too deeply")
    return Verdict(grammar)


def _read_until(pipe: BinaryIO, deadline_s: float) -> bytes | None:
    """A whole frame's content; None when the pipe is closed, or the time is over, before."""
    received = b""
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline_s - time.monotonic()))
        chunk = os.read(pipe.fileno(), 2**16) if ready else b""
        if not chunk:
            return None
        received += chunk
        if len(received) >= _LENGTH.size:
            (num_bytes,) = _LENGTH.unpack_from(received)
            if len(received) == _LENGTH.size + num_bytes:
                return received[_LENGTH.size :]


if __name__ == "__main__":
    main()
