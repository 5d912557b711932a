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
from headrace.engine.outputs import FailureEvent, FinishEvent, TokenEvent
from headrace.engine.runner.protocol import LoadedModel
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sequence import OutputParams, Request, RequestId, StopConditions
from headrace.engine.tokenizer import Chat, ChatMessage, Tokenizer

_MARK = "headrace-mark"
_ANSWER_TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
"""Answers are drafted at all of them, at the lowest most of all."""
_MAX_MESSAGE_TOKENS = 64
_UNSAID_AT_MOST = 256
"""After so many messages in a row that say nothing there will be none."""


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
        self._num_rows = config.scheduler.max_num_seqs
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
        if conversation is None:
            yield from self._texts_from_nothing(max_len)
        else:
            yield from self._conversations(conversation, max_len)

    def _texts_from_nothing(self, max_len: int) -> Iterator[tuple[int, ...]]:
        open_texts: dict[RequestId, list[int]] = {}
        while True:
            while len(open_texts) < self._num_rows:
                self._begin(self._from_nothing(max_len), open_texts)
            yield from (text for _, text in self._step(open_texts))

    def _conversations(self, conversation: Conversation, max_len: int) -> Iterator[tuple[int, ...]]:
        room = max_len - len(conversation.before) - len(conversation.after) - 1
        if room < 1:
            raise ConfigError(
                f"the target's chat template leaves no room for a message in {max_len} tokens: "
                "give it longer sequences, or text to learn from"
            )
        open_texts: dict[RequestId, list[int]] = {}
        answers: set[RequestId] = set()
        num_answers = num_unsaid = 0
        while True:
            # Whoever has finished makes room for the next one at once, so that every step is full.
            while len(open_texts) < self._num_rows:
                self._begin(self._message(conversation, room), open_texts)
            for request_id, text in self._step(open_texts):
                if request_id in answers:
                    answers.remove(request_id)
                    yield text
                    continue
                prompt = self._prompt(conversation, text)
                num_unsaid = num_unsaid + 1 if prompt is None else 0
                if prompt is not None:
                    answer = self._answer(prompt, max_len, num_answers)
                    answers.add(answer.request_id)
                    num_answers += 1
                    self._begin(answer, open_texts)
                elif num_unsaid == _UNSAID_AT_MOST:
                    raise ConfigError(
                        "the target makes up no messages for its chat template: give it text to learn from"
                    )

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
        open_texts: dict[RequestId, list[int]] = {}
        for request in requests:
            self._begin(request, open_texts)
        written: dict[RequestId, tuple[int, ...]] = {}
        while open_texts:
            written.update(self._step(open_texts))
        return [written[request.request_id] for request in requests]

    def _begin(self, request: Request, open_texts: dict[RequestId, list[int]]) -> None:
        self._core.add(request)
        open_texts[request.request_id] = list(request.prompt_token_ids)

    def _step(self, open_texts: dict[RequestId, list[int]]) -> list[tuple[RequestId, tuple[int, ...]]]:
        """Go on with every text by a step; takes out and gives those that have ended."""
        plan = self._core.begin_step()
        assert plan is not None, "nobody else keeps blocks, and no request waits for a reader"
        events, _ = self._core.finish_step(self._model.runner.execute(plan))
        ended = []
        for request_id, event in events:
            if isinstance(event, TokenEvent):
                open_texts[request_id] += event.token_ids
            elif isinstance(event, FailureEvent):
                raise event.error
            elif isinstance(event, FinishEvent):
                ended.append((request_id, tuple(open_texts.pop(request_id))))
        return ended
