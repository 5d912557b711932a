"""Requests served by an engine core over a loaded model, whose steps may make several tokens each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.engine import (
    EngineConfig,
    FinishEvent,
    LoadedModel,
    Request,
    TokenEvent,
    TokenLogprobs,
)
from headrace.engine.core import EngineCore


@dataclass
class Answer:
    """What a caller hears of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: FinishEvent | None = None

    @property
    def last(self) -> FinishEvent:
        """Its end."""
        assert self.end is not None
        return self.end


class CoreLoop:
    """Steps a core over a model's own runner, without asyncio."""

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        self.model = model
        self.core = EngineCore(
            model.info,
            model.layout,
            model.tokenizer,
            config,
            lambda: 0.0,
            draft_max_len=model.draft_max_len,
        )

    def answer(self, requests: Sequence[Request]) -> list[dict[int, Answer]]:
        """Serve requests together; per request the answer of each of its sequences."""
        answers: dict[str, dict[int, Answer]] = {request.request_id: {} for request in requests}
        for request in requests:
            self.core.add(request)
        while self.core.has_work:
            plan = self.core.begin_step()
            assert plan is not None
            for request_id, event in self.core.finish_step(self.model.runner.execute(plan))[0]:
                assert isinstance(event, TokenEvent | FinishEvent), event
                answer = answers[request_id].setdefault(event.index, Answer())
                if isinstance(event, FinishEvent):
                    answer.end = event
                    continue
                answer.token_ids += event.token_ids
                answer.text += event.text
                answer.logprobs += event.logprobs
                answer.prompt_logprobs += event.prompt_logprobs
        self.core.check_integrity()
        return list(answers.values())

    def answers(self, requests: Sequence[Request]) -> list[Answer]:
        """The same of the first sequence of each."""
        return [each[0] for each in self.answer(requests)]
