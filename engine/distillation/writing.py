"""The target writes: text that a draft model learns from, because it is what the draft model is to foresee.

A chat model makes up the users' messages as well as its answers: it is shown the beginning of a conversation
as its own template writes it, and goes on (Magpie, arXiv 2406.08464). Any other model starts from nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from headrace.engine.config import EngineConfig
from headrace.engine.core import EngineCore
from headrace.engine.errors import ConfigError, InvalidRequest, NoChatTemplate
from headrace.engine.outputs import FailureEvent, TokenEvent
from headrace.engine.runner.protocol import LoadedModel
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sequence import OutputParams, Request, RequestId, StopConditions
from headrace.engine.tokenizer import Chat, ChatMessage, Tokenizer

_MARK = "headrace-mark"
_ANSWER_TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
"""Answers are drafted at all of them, at the lowest most of all."""
_MAX_MESSAGE_TOKENS = 64
_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the model's template puts around a user's message."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def conversation_of(tokenizer: Tokenizer) -> Conversation | None:
    """How a conversation begins; None for a model without a template, or with one that bends its messages."""
    try:
        rendered = tokenizer.render_chat(Chat((ChatMessage("user", _MARK),)))
    except (NoChatTemplate, InvalidRequest):
        return None
    before, mark, after = rendered.partition(_MARK)
    if not mark:
        return None
    return Conversation(tuple(tokenizer.encode_chat(before)), tuple(tokenizer.encode_chat(after)))


class Writer:
    """Runs a model at full batches and gives what it wrote.

    Args:
        model: ready to run; it stays the caller's.
        config: what it was loaded with.
        seed: of every draw.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig, seed: int) -> None:
        self._model = model
        self._core = EngineCore(
            model.info,
            model.layout,
            model.tokenizer,
            config,
            time.monotonic,
            draft_max_len=model.draft_max_len,
        )
        self._numbers = count(seed * 1_000_000)

    @property
    def core(self) -> EngineCore:
        """What it runs: its totals tell what came of speculation."""
        return self._core

    def texts(self, max_len: int) -> Iterator[tuple[int, ...]]:
        """Sequences that the model made up from nothing, without end.

        Args:
            max_len: longest one, tokens.

        Raises:
            ConfigError: the model's template leaves no room for a text, or the model has nothing to say.
        """
        max_len = min(max_len, self._model.info.max_model_len)
        conversation = conversation_of(self._model.tokenizer)
        while True:
            if conversation is None:
                yield from self._run([self._from_nothing(max_len) for _ in range(_AT_ONCE)])
                continue
            room = max_len - len(conversation.before) - len(conversation.after) - 1
            if room < 1:
                raise ConfigError(
                    f"the target's chat template leaves no room for a message in {max_len} tokens: "
                    "give it longer sequences, or text to learn from"
                )
            messages = self._run([self._message(conversation, room) for _ in range(_AT_ONCE)])
            prompts = [self._prompt(conversation, message) for message in messages]
            said = [prompt for prompt in prompts if prompt is not None]
            if not said:
                raise ConfigError(
                    "the target makes up no messages for its chat template: give it text to learn from"
                )
            yield from self._run([self._answer(prompt, max_len, place) for place, prompt in enumerate(said)])

    def greedy_answers(self, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> list[tuple[int, ...]]:
        """What the model says to each prompt, prompt included, none ended before its time.

        Args:
            max_tokens: of each answer; fewer where the model's context ends.
        """
        max_len = self._model.info.max_model_len
        stops = [
            StopConditions(max_tokens=min(max_tokens, max_len - len(prompt)), ignore_eos=True)
            for prompt in prompts
        ]
        return self._run(
            [self._request(prompt, 0.0, stop) for prompt, stop in zip(prompts, stops, strict=True)]
        )

    def _from_nothing(self, max_len: int) -> Request:
        info = self._model.info
        start = info.bos_token_id if info.bos_token_id is not None else min(info.eos_token_ids, default=0)
        return self._request((start,), 1.0, StopConditions(max_tokens=max_len - 1))

    def _message(self, conversation: Conversation, room: int) -> Request:
        stop = StopConditions(max_tokens=min(_MAX_MESSAGE_TOKENS, room))
        return self._request(conversation.before, 1.0, stop)

    def _prompt(self, conversation: Conversation, message: tuple[int, ...]) -> tuple[int, ...] | None:
        said = message[:-1] if message[-1] in self._model.info.eos_token_ids else message
        return None if len(said) <= len(conversation.before) else said + conversation.after

    def _answer(self, prompt: tuple[int, ...], max_len: int, place: int) -> Request:
        temperature = _ANSWER_TEMPERATURES[place % len(_ANSWER_TEMPERATURES)]
        return self._request(prompt, temperature, StopConditions(max_tokens=max_len - len(prompt)))

    def _request(self, prompt: tuple[int, ...], temperature: float, stop: StopConditions) -> Request:
        number = next(self._numbers)
        return Request(
            request_id=RequestId(f"text {number}"),
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=temperature, seed=number),
            stop=stop,
            output=OutputParams(wants_text=False),
        )

    def _run(self, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        """What comes of each request, prompt included, in their order."""
        written = {request.request_id: list(request.prompt_token_ids) for request in requests}
        for request in requests:
            self._core.add(request)
        while self._core.has_work:
            plan = self._core.begin_step()
            assert plan is not None, "nobody else keeps blocks, and no request waits for a reader"
            events, _ = self._core.finish_step(self._model.runner.execute(plan))
            for request_id, event in events:
                if isinstance(event, TokenEvent):
                    written[request_id] += event.token_ids
                elif isinstance(event, FailureEvent):
                    raise event.error
        return [tuple(token_ids) for token_ids in written.values()]
