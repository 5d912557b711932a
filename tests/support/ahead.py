"""An engine core over the fake model, driven one step ahead."""

from __future__ import annotations

from collections import deque
from typing import Any

from headrace.engine import FailureEvent, FinishEvent, Request, StepStats, TokenEvent
from headrace.engine.core import EngineCore, RequestEvent
from headrace.engine.runner.protocol import LaunchedStep
from headrace.engine.scheduling.plan import RowResult, StepPlan, StepResult
from tests.support.fake_runner import FakeRunner, make_fake_model
from tests.support.requests import make_config, make_request

SPOIL = RowResult(failure="not finite")


class Ahead:
    """An engine core whose steps are launched one ahead, as far as they are planned."""

    def __init__(self, *, config: dict[str, Any] | None = None, **model_options: Any) -> None:
        self.now_s = 0.0
        self.model = make_fake_model(**model_options)
        model = self.model
        assert isinstance(model.runner, FakeRunner)
        self.plans = model.runner.plans
        self.core = EngineCore(
            model.info, model.layout, model.tokenizer, make_config(**(config or {})), lambda: self.now_s
        )
        self.under_way: deque[tuple[StepPlan, LaunchedStep]] = deque()
        self.events: list[RequestEvent] = []
        self.stats: list[StepStats] = []

    def add(self, **options: Any) -> Request:
        request = make_request(**options)
        self.core.add(request)
        return request

    def launch(self, plan: StepPlan | None) -> StepPlan | None:
        if plan is not None:
            self.under_way.append((plan, self.model.runner.launch(plan)))
        return plan

    def begin(self) -> StepPlan:
        plan = self.launch(self.core.begin_step())
        assert plan is not None
        return plan

    def ahead(self) -> StepPlan | None:
        return self.launch(self.core.begin_step(ahead=True))

    def fetch(self, spoilt: int | None = None) -> list[RequestEvent]:
        """Finish the oldest step; the row of this place has failed."""
        _, launched = self.under_way.popleft()
        rows = list(launched.fetch().rows)
        if spoilt is not None:
            rows[spoilt] = SPOIL
        events, stats = self.core.finish_step(StepResult(tuple(rows)))
        self.events += events
        self.stats.append(stats)
        return events

    def step(self) -> StepPlan:
        """A step that is waited for."""
        plan = self.begin()
        self.fetch()
        return plan

    def run_to_end(self) -> None:
        while self.core.has_work or self.under_way:
            if not self.under_way:
                self.begin()
            self.ahead()
            self.fetch()
        self.core.check_integrity()

    def tokens(self, request: Request) -> list[int]:
        events = [event for request_id, event in self.events if request_id == request.request_id]
        return [i for event in events if isinstance(event, TokenEvent) for i in event.token_ids]

    def ends(self, request: Request) -> list[FinishEvent | FailureEvent]:
        return [
            event
            for request_id, event in self.events
            if request_id == request.request_id and isinstance(event, FinishEvent | FailureEvent)
        ]
