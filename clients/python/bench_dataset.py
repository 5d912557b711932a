"""Workloads from files.

- ``.json``: ``{"name": ..., "requests": [{"prompt_token_ids": [...], "output_len": 70}, ...]}``. A request
  has exactly one of ``prompt_token_ids``, ``prompt`` (a text) and ``turns`` (a conversation: a list of such
  requests, each with an ``output_len``). All requests have ``arrival_s``, or none.
- ``.jsonl``: such requests, one object a line.
- anything else is text: every line that is not blank is a prompt.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from headrace.clients.bench_workload import (
    Conversation,
    Lengths,
    TextOrIds,
    Turn,
    Workload,
    WorkloadError,
)

_MAX_TOKEN_ID = (1 << 32) - 1


def read_workload(path: Path, output_len: Lengths | None = None, seed: int = 0) -> Workload:
    """The workload that a file holds.

    Args:
        output_len: lengths of the answers; needed where the file does not give them, and then it is used
            instead of what the file gives, too.
        seed: for drawing them.

    Raises:
        WorkloadError: the file can't be read, or says something that is no workload.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise WorkloadError(f"{path}: can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path}: can't be read as text: {error}") from None
    lengths = _OutputLengths(output_len, seed)
    if path.suffix == ".json":
        name, conversations = _from_json(path, text, lengths)
    elif path.suffix == ".jsonl":
        name, conversations = path.name, _from_lines_of_json(path, text, lengths)
    else:
        name, conversations = path.name, _from_text(path, text, lengths)
    return _checked(path, name, conversations)


class _OutputLengths:
    """Output lengths of a file's requests: its own, or drawn ones where a distribution is given."""

    def __init__(self, drawn: Lengths | None, seed: int) -> None:
        self._drawn = drawn
        self._rng = random.Random(f"{seed} output lengths")

    def of(self, where: str, own: object) -> int:
        """One length; `own` is what the file says, None where it says nothing."""
        if self._drawn is not None:
            return self._drawn.draw(self._rng)
        if own is None:
            raise WorkloadError(f"{where}: output_len is missing: give it there, or with --output-len")
        if not isinstance(own, int) or isinstance(own, bool) or own < 1:
            raise WorkloadError(f"{where}: output_len is {own!r}: use a number of tokens, 1 or more")
        return own


def _from_json(path: Path, text: str, lengths: _OutputLengths) -> tuple[str, list[Conversation]]:
    document = _parsed(f"{path}", text)
    if not isinstance(document, dict) or not isinstance(document.get("requests"), list):
        raise WorkloadError(f'{path}: is no object with a list "requests"')
    name = document.get("name", path.name)
    requests = cast("list[object]", document["requests"])
    return str(name), [
        _conversation(f"{path}: requests[{number}]", request, lengths)
        for number, request in enumerate(requests)
    ]


def _from_lines_of_json(path: Path, text: str, lengths: _OutputLengths) -> list[Conversation]:
    return [
        _conversation(f"{path}:{number}", _parsed(f"{path}:{number}", line), lengths)
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip()
    ]


def _from_text(path: Path, text: str, lengths: _OutputLengths) -> list[Conversation]:
    return [
        Conversation((Turn(line.strip(), lengths.of(f"{path}:{number}", None)),))
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip()
    ]


def _parsed(where: str, text: str) -> object:
    try:
        return cast("object", json.loads(text))
    except (ValueError, RecursionError) as error:
        raise WorkloadError(f"{where}: is no JSON: {error}") from None


def _conversation(where: str, request: object, lengths: _OutputLengths) -> Conversation:
    if not isinstance(request, dict):
        raise WorkloadError(
            f"{where}: is {request!r:.60}: use an object with prompt_token_ids and output_len"
        )
    arrival_s = request.get("arrival_s")
    if arrival_s is not None and not (_is_number(arrival_s) and 0 <= arrival_s < math.inf):
        raise WorkloadError(f"{where}: arrival_s is {arrival_s!r}: use seconds, 0 or more")
    turns = request.get("turns", [request])
    if not isinstance(turns, list) or not turns:
        raise WorkloadError(f"{where}: turns is {turns!r:.60}: use a list of at least one request")
    return Conversation(
        tuple(
            _turn(where if len(turns) == 1 else f"{where}.turns[{place}]", turn, lengths)
            for place, turn in enumerate(turns)
        ),
        arrival_s,
    )


def _turn(where: str, turn: object, lengths: _OutputLengths) -> Turn:
    if not isinstance(turn, dict):
        raise WorkloadError(f"{where}: is {turn!r:.60}: use an object with prompt_token_ids and output_len")
    given = [name for name in ("prompt_token_ids", "prompt") if name in turn]
    if len(given) != 1:
        there_is = " and ".join(given) or "neither"
        raise WorkloadError(f"{where}: needs either prompt_token_ids or prompt, and has {there_is}")
    return Turn(
        _prompt(f"{where}.{given[0]}", given[0], turn[given[0]]), lengths.of(where, turn.get("output_len"))
    )


def _prompt(where: str, kind: str, prompt: object) -> TextOrIds:
    if kind == "prompt":
        if not isinstance(prompt, str) or not prompt:
            raise WorkloadError(f"{where}: is {prompt!r:.60}: use a text that is not empty")
        return prompt
    if not isinstance(prompt, list) or not prompt or not all(map(_is_token_id, prompt)):
        raise WorkloadError(f"{where}: is {prompt!r:.60}: use a list of token ids that is not empty")
    return tuple(cast("list[int]", prompt))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_TOKEN_ID


def _checked(path: Path, name: str, conversations: Sequence[Conversation]) -> Workload:
    """The workload of these, which must be alike."""
    if not conversations:
        raise WorkloadError(f"{path}: holds no prompt")
    kinds = {isinstance(turn.prompt, str) for conversation in conversations for turn in conversation.turns}
    if len(kinds) > 1:
        raise WorkloadError(f"{path}: has texts and token ids: use one of both for all prompts")
    with_arrival = sum(conversation.arrival_s is not None for conversation in conversations)
    if 0 < with_arrival < len(conversations):
        raise WorkloadError(
            f"{path}: {with_arrival} of {len(conversations)} requests have arrival_s: give it to all, or none"
        )
    return Workload(name, len(conversations), conversations.__getitem__, has_arrivals=with_arrival > 0)
