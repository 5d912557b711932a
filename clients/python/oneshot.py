"""One prompt, one answer on standard output: `headrace generate`."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass

from headrace.clients.client import InferenceClient
from headrace.clients.errors import NotFound
from headrace.clients.events import Accepted, Answer, Delta, Finished
from headrace.clients.prompts import ChatMessage, Prompt, RequestOptions


@dataclass(frozen=True, slots=True)
class Question:
    """What to ask.

    Args:
        is_chat: whether `text` is a user's message; None: where the model has a chat template.
    """

    text: str
    is_chat: bool | None
    system: str | None
    options: RequestOptions
    timeout_s: float | None


async def ask(target: str, question: Question, *, as_json: bool, with_stats: bool) -> None:
    """Print the answer as it is made, or whole as JSON.

    Raises:
        HeadraceError: the request failed.
    """
    async with InferenceClient(target) as client:
        prompt = await _prompt(client, question)
        if as_json:
            answer = await client.generate_once(prompt, timeout_s=question.timeout_s, **question.options)
            print(json.dumps(answer_as_json(answer), ensure_ascii=False))
        else:
            await _stream(client, prompt, question, with_stats)


def answer_as_json(answer: Answer) -> dict[str, object]:
    """The object that `--json` prints."""
    finished = answer.finished
    return {
        "request_id": answer.request_id,
        "model": answer.accepted.model,
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": finished.reason.value,
        "matched_stop": finished.matched_stop,
        "max_tokens": answer.accepted.max_tokens,
        "sampling": asdict(answer.accepted.sampling),
        "usage": asdict(finished.usage),
        "timings": asdict(finished.timings),
        "num_preemptions": finished.num_preemptions,
    }


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


async def _stream(client: InferenceClient, prompt: Prompt, question: Question, with_stats: bool) -> None:
    started_s = time.monotonic()
    accepted: Accepted | None = None
    last = ""
    async for event in client.generate(prompt, timeout_s=question.timeout_s, **question.options):
        match event:
            case Accepted():
                accepted = event
            case Delta(text=text):
                last = text or last
                print(text, end="", flush=True)
            case Finished():
                if not last.endswith("\n"):
                    print(flush=True)
                if with_stats:
                    print(_stats(accepted, event, time.monotonic() - started_s), file=sys.stderr)


def _stats(accepted: Accepted | None, finished: Finished, elapsed_s: float) -> str:
    usage = finished.usage
    parts = [
        f"{usage.num_prompt_tokens} prompt tokens",
        f"{usage.num_completion_tokens} tokens in {elapsed_s:.2f} s",
    ]
    if finished.timings.time_to_first_token_s is not None:
        parts.append(f"first after {finished.timings.time_to_first_token_s:.2f} s")
    parts.append(f"ended by {finished.reason.value}")
    if accepted is not None and accepted.sampling.seed is not None:
        parts.append(f"seed {accepted.sampling.seed}")
    return ", ".join(parts)
