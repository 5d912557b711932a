from __future__ import annotations

from headrace.engine.scheduling.allowance import StepAllowance
from headrace.engine.scheduling.cost_model import StepCostModel, StepPrices
from headrace.engine.scheduling.plan import StepLimits
from headrace.engine.scheduling.planning import PlanInProgress
from headrace.engine.speculative.proposer import Drafts
from tests.support.sequences import make_sequence


def test_what_drafts_cost_prompts_do_not_get() -> None:
    costs = StepCostModel(StepPrices(0.010, 0.001, 0.002, 0.0, 0.0))
    plan = PlanInProgress(StepLimits(512, 16), StepAllowance(costs, left_s=0.1005))
    prompt = make_sequence(prompt_len=400)
    assert plan.chunk_len(prompt) == 100
    plan.add_drafts(make_sequence(), Drafts(token_ids=(1, 2, 3, 4, 5)))
    assert plan.chunk_len(prompt) == 90
    plan.take(prompt, 60)
    assert plan.chunk_len(make_sequence(prompt_len=400)) == 30
