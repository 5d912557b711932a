"""One prompt, its answer on standard output: `headrace generate`."""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from headrace.clients.cli_options import default_max_tokens
from headrace.clients.client import InferenceClient
from headrace.clients.connection import ConnectionOptions
from headrace.clients.errors import InvalidArgument, NotFound
from headrace.clients.events import (
    Accepted,
    Answer,
    Completion,
    Delta,
    Finished,
    FinishReason,
    Sampling,
    TokenLogprob,
    TokenLogprobs,
)
from headrace.clients.prompts import ChatMessage, Prompt, RequestOptions


@dataclass(frozen=True, slots=True)
class Question:
    """What to ask.

    Args:
        is_chat: whether `text` is a user's message; None: where the model has a chat template.
        cap: most tokens, where nobody said how many.
    """

    text: str
    is_chat: bool | None
    system: str | None
    options: RequestOptions
    timeout_s: float | None
    cap: int | None = None


async def ask(
    target: str,
    question: Question,
    connection: ConnectionOptions | None = None,
    *,
    as_json: bool,
    with_stats: bool,
) -> None:
    """Print the answer as it is made, or whole as JSON.

    Raises:
        HeadraceError: the request failed.
    """
    async with InferenceClient(target, connection=connection) as client:
        prompt = await _prompt(client, question)
        answer = _as_json if as_json else partial(_stream, with_stats=with_stats)
        if "max_tokens" in question.options:
            await answer(client, prompt, question)
            return
        try:
            await answer(client, prompt, _capped(question))
        except InvalidArgument as refusal:
            if [violation.field for violation in refusal.violations] != ["stop.max_tokens"]:
                raise
            # So many more don't fit: the context's end comes before.
            await answer(client, prompt, question)


def _capped(question: Question) -> Question:
    cap = default_max_tokens(question.options.get("min_tokens"))
    return replace(question, options={**question.options, "max_tokens": cap}, cap=cap)


def answer_as_json(answer: Answer) -> dict[str, object]:
    """The object that `--json` prints: its first sequence, and all of them where there are several."""
    told: dict[str, object] = {
        "request_id": answer.request_id,
        "model": answer.accepted.model,
        **_completion_as_json(answer.completions[0]),
        "max_tokens": answer.accepted.max_tokens,
        "sampling": asdict(answer.accepted.sampling),
    }
    if len(answer.completions) > 1:
        told["completions"] = [
            {"index": completion.index, **_completion_as_json(completion)}
            for completion in answer.completions
        ]
    return told


def _completion_as_json(completion: Completion) -> dict[str, object]:
    finished = completion.finished
    told: dict[str, object] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": finished.reason.value,
        "matched_stop": finished.matched_stop,
        "usage": asdict(finished.usage),
        "timings": asdict(finished.timings),
        "num_preemptions": finished.num_preemptions,
    }
    for name, entries in (
        ("logprobs", completion.logprobs),
        ("prompt_logprobs", completion.prompt_logprobs),
    ):
        if entries:
            told[name] = [{**asdict(entry.chosen), "top": [*map(asdict, entry.top)]} for entry in entries]
    return told


async def _prompt(client: InferenceClient, question: Question) -> Prompt:
    is_chat = question.is_chat
    if is_chat is None:
        is_chat = await _has_chat_template(client, question.options.get("model"))
    if not is_chat:
        return question.text
    system = [ChatMessage("system", question.system)] if question.system is not None else []
    return [*system, ChatMessage("user", question.text)]


async def _has_chat_template(client: InferenceClient, name: str | None) -> bool:
    models = await client.models()
    for model in models:
        if name is None or model.name == name:
            return model.has_chat_template
    names = ", ".join(model.name for model in models)
    raise NotFound(f"no model is served under the name {name!r}; there is: {names}")


async def _as_json(client: InferenceClient, prompt: Prompt, question: Question) -> None:
    answer = await client.generate_once(prompt, timeout_s=question.timeout_s, **question.options)
    print(json.dumps(answer_as_json(answer), ensure_ascii=False))


async def _stream(client: InferenceClient, prompt: Prompt, question: Question, *, with_stats: bool) -> None:
    started_s = time.monotonic()
    accepted: Accepted | None = None

    def tell_end(finished: Finished) -> None:
        num_made = finished.usage.num_completion_tokens
        if finished.reason is FinishReason.LENGTH and num_made == question.cap:
            print(f"cut off after {num_made} tokens: --max-tokens lets it make more", file=sys.stderr)
        if with_stats:
            print(_stats(accepted, finished, time.monotonic() - started_s), file=sys.stderr)

    page = Page(question.options.get("n", 1), tell_end)
    async for event in client.generate(prompt, timeout_s=question.timeout_s, **question.options):
        if isinstance(event, Accepted):
            accepted = event
        else:
            page.add(event)


class Page:
    """Prints sequences one after the other: one is printed as it is made, those behind it wait in memory.

    Args:
        num_sequences: how many there are; each of several has a heading.
        on_end: called when a sequence has been printed.
    """

    def __init__(self, num_sequences: int, on_end: Callable[[Finished], None]) -> None:
        self._on_end = on_end
        self._num_sequences = num_sequences
        self._waiting: defaultdict[int, deque[Delta | Finished]] = defaultdict(deque)
        self._num_printed = 0
        self._is_begun = False
        self._last = ""
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []

    def add(self, event: Delta | Finished) -> None:
        """Print what can be printed now."""
        self._waiting[event.index].append(event)
        while ready := self._waiting[self._num_printed]:
            self._print(ready.popleft())

    def _print(self, event: Delta | Finished) -> None:
        if not self._is_begun:
            self._is_begun = True
            if self._num_sequences > 1:
                print(f"--- {self._num_printed + 1} of {self._num_sequences} ---", flush=True)
        if isinstance(event, Delta):
            print(event.text, end="", flush=True)
            self._last = event.text or self._last
            self._logprobs += event.logprobs
            self._prompt_logprobs += event.prompt_logprobs
            return
        if not self._last.endswith("\n"):
            print(flush=True)
        for name, entries in (("prompt", self._prompt_logprobs), ("answer", self._logprobs)):
            if entries:
                print("\n".join(_table(name, entries)), flush=True)
        self._on_end(event)
        self._num_printed += 1
        self._is_begun, self._last, self._logprobs, self._prompt_logprobs = False, "", [], []


def _table(name: str, entries: Sequence[TokenLogprobs]) -> list[str]:
    """Lines that say how likely the tokens of prompt or answer were."""
    tokens = [_quoted(entry.chosen) for entry in entries]
    width = max(map(len, [name, *tokens]))
    lines = [f"{name:{width}}  {'logprob':>8}  {'rank':>6}" + ("  likeliest" if entries[0].top else "")]
    for token, entry in zip(tokens, entries, strict=True):
        line = f"{token:{width}}  {entry.chosen.logprob:8.3f}  {entry.chosen.rank:6}"
        top = ", ".join(f"{_quoted(likely)} {likely.logprob:.3f}" for likely in entry.top)
        lines.append(f"{line}  {top}" if top else line)
    return lines


def _quoted(entry: TokenLogprob) -> str:
    return json.dumps(entry.text, ensure_ascii=False)


def _stats(accepted: Accepted | None, finished: Finished, elapsed_s: float) -> str:
    usage = finished.usage
    parts = [
        f"{usage.num_prompt_tokens} prompt tokens",
        f"{usage.num_completion_tokens} tokens in {elapsed_s:.2f} s",
    ]
    if finished.timings.time_to_first_token_s is not None:
        parts.append(f"first after {finished.timings.time_to_first_token_s:.2f} s")
    if usage.num_draft_tokens_proposed:
        num_kept, num_made = usage.num_draft_tokens_accepted, usage.num_completion_tokens
        # A step makes one token, and those of its drafts that are kept.
        parts.append(
            f"{num_kept} of {usage.num_draft_tokens_proposed} drafts kept, "
            f"{num_made / max(1, num_made - num_kept):.2f} tokens per step"
        )
    parts.append(f"ended by {finished.reason.value}")
    if accepted is not None:
        parts += _drawn_by(accepted.sampling)
    return ", ".join(parts)


def _drawn_by(sampling: Sampling) -> Iterator[str]:
    """How tokens were drawn, whoever said so; what changes nothing is left out."""
    yield f"temperature {sampling.temperature:g}"
    if sampling.top_k:
        yield f"top-k {sampling.top_k}"
    for name, value, neutral in (
        ("top-p", sampling.top_p, 1.0),
        ("min-p", sampling.min_p, 0.0),
        ("repetition penalty", sampling.repetition_penalty, 1.0),
    ):
        if value != neutral:
            yield f"{name} {value:g}"
    if sampling.seed is not None:
        yield f"seed {sampling.seed}"
