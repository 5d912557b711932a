"""An engine in virtual time: what minutes of load do to latencies takes seconds, and is always the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.engine.config import CacheLayout, EngineConfig, LatencyTargets, ModelInfo
from headrace.engine.core import EngineCore
from headrace.engine.errors import Overloaded
from headrace.engine.outputs import FinishEvent, TokenEvent
from headrace.engine.scheduling.cost_model import StepPrices, StepShape
from headrace.engine.scheduling.plan import RowResult, StepPlan, StepResult
from headrace.engine.sequence import OutputParams, Request, RequestId, StopConditions
from tests.support.blocking import Blocking
from tests.support.fake_runner import FakeTokenizer

VOCAB_SIZE = 50_000


@dataclass(frozen=True)
class Arrival:
    """A request that is going to come."""

    at_s: float
    prompt_len: int
    num_tokens: int
    priority: int = 0


@dataclass
class Served:
    """What became of a request. Times are those of the virtual clock.

    Args:
        token_s: when each of its tokens came.
        retry_after_s: when it was told to come back, if it was refused.
    """

    arrival: Arrival
    token_s: list[float] = field(default_factory=list)
    num_preemptions: int = 0
    is_over: bool = False
    retry_after_s: float | None = None

    @property
    def ttft_s(self) -> float:
        """Time to first token; infinite without one."""
        return self.token_s[0] - self.arrival.at_s if self.token_s else float("inf")

    @property
    def tpot_s(self) -> float:
        """Time per output token; 0 with a single one."""
        return (self.token_s[-1] - self.token_s[0]) / max(1, len(self.token_s) - 1) if self.token_s else 0.0

    def meets(self, targets: LatencyTargets) -> bool:
        """Whether it ended with all that was promised."""
        return (
            self.is_over
            and (targets.ttft_s is None or self.ttft_s <= targets.ttft_s)
            and (targets.tpot_s is None or self.tpot_s <= targets.tpot_s)
        )


def cost(shape: StepShape, prices: StepPrices) -> float:
    """What a step takes on a machine of such prices, seconds."""
    amounts = (
        1,
        shape.num_prefill_tokens,
        shape.num_decode_tokens,
        shape.num_context_tokens,
        shape.num_attended_pairs,
    )
    return sum(price * amount for price, amount in zip(prices.as_tuple(), amounts, strict=True))


@dataclass
class Machine(Blocking):
    """Computes nothing, in exactly the time that its prices say, times `noise`.

    Args:
        noise: a factor for each step.
    """

    prices: StepPrices
    noise: Callable[[], float] = lambda: 1.0
    now_s: float = 0.0
    num_steps: int = 0

    def clock(self) -> float:
        """The virtual time."""
        return self.now_s

    def execute(self, plan: StepPlan) -> StepResult:
        """See `Runner.execute`."""
        self.num_steps += 1
        self.now_s += cost(StepShape.of(plan), self.prices) * self.noise()
        return StepResult(tuple(RowResult((1,) if row.is_sampled else ()) for row in plan.rows))


def simulate(
    config: EngineConfig,
    arrivals: Sequence[Arrival],
    machine: Machine,
    *,
    until_s: float = float("inf"),
    num_blocks: int = 1 << 16,
    on_plan: Callable[[EngineCore, StepPlan], None] = lambda core, plan: None,
) -> list[Served]:
    """Serve requests as they come.

    Args:
        until_s: when to stop, whatever is unfinished.
        on_plan: told each step before it is run.
    """
    info = ModelInfo("virtual", "none", 1 << 15, VOCAB_SIZE, frozenset(), None, "none", 0)
    core = EngineCore(info, CacheLayout(num_blocks, 4), FakeTokenizer(), config, machine.clock)
    prompts = random.Random(0)
    served: dict[RequestId, Served] = {}
    pending = sorted(arrivals, key=lambda arrival: arrival.at_s)[::-1]
    while machine.now_s < until_s and (pending or core.has_work):
        while pending and pending[-1].at_s <= machine.now_s:
            request_id = RequestId(f"r{len(served)}")
            one = served[request_id] = Served(pending.pop())
            try:
                core.add(_request(request_id, one.arrival, prompts))
            except Overloaded as refusal:
                one.retry_after_s = refusal.retry_after_s
        plan = core.begin_step()
        if plan is None:
            moments = [*(arrival.at_s for arrival in pending[-1:]), *filter(None, [core.due_s])]
            if moments:
                machine.now_s = max(machine.now_s, min(moments))
            continue
        on_plan(core, plan)
        events, _ = core.finish_step(machine.execute(plan))
        for request_id, event in events:
            one = served[request_id]
            if isinstance(event, TokenEvent):
                one.token_s += [machine.now_s] * len(event.token_ids)
            elif isinstance(event, FinishEvent):
                one.is_over, one.num_preemptions = True, event.num_preemptions
    return list(served.values())


def poisson(
    rate: float, seconds: float, rng: random.Random, *, prompt_lens: tuple[int, int] = (16, 128)
) -> list[Arrival]:
    """Arrivals of a chat service: prompts of evenly spread lengths, answers of 8 to 256 tokens, about 70.

    Args:
        rate: requests per second.
        prompt_lens: least and greatest, tokens.
    """
    arrivals, at_s = [], rng.expovariate(rate)
    while at_s < seconds:
        num_tokens = min(256, max(8, round(rng.expovariate(1 / 70))))
        arrivals.append(Arrival(at_s, rng.randint(*prompt_lens), num_tokens))
        at_s += rng.expovariate(rate)
    return arrivals


def _request(request_id: RequestId, arrival: Arrival, rng: random.Random) -> Request:
    return Request(
        request_id,
        tuple(rng.randrange(VOCAB_SIZE) for _ in range(arrival.prompt_len)),
        stop=StopConditions(arrival.num_tokens, ignore_eos=True),
        output=OutputParams(wants_text=False),
        priority=arrival.priority,
    )
