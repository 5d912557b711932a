"""Promised latencies in a pool that is too small."""

from headrace.engine.config import LatencyConfig, LatencyTargets
from headrace.engine.scheduling.budget import LatencyBudget
from headrace.engine.scheduling.cost_model import StepCostModel, StepPrices
from headrace.engine.sequence import SequenceStatus
from tests.support.sequences import SchedulerHarness, make_sequence

# A step of 10 ms, 1 ms for a prompt token, 2 ms for a row that decodes.
PLAIN = StepPrices(0.010, 0.001, 0.002, 0.0, 0.0)


def test_a_prompt_that_waited_for_a_decode_goes_on_once_that_has_lost_its_place() -> None:
    budget = LatencyBudget(costs=StepCostModel(PLAIN))
    harness = SchedulerHarness(num_blocks=7, block_size=4, max_prefill_chunk=4, budget=budget)
    reading, decoding = harness.add(prompt_len=20, max_tokens=4), harness.add(prompt_len=3, max_tokens=17)
    for _ in range(4):
        harness.step()
    decoding.first_token_s = 0.0
    # A step with that decode alone takes all the time that there is, so the prompt stands still.
    budget.set_targets(LatencyTargets(tpot_s=0.0128), None)
    for _ in range(6):
        assert harness.step() == {decoding.sequence_id: 1}
    # Now there is no block left for it, and it is the lowest of all.
    assert harness.step() == {reading.sequence_id: 4}
    assert decoding.status is SequenceStatus.WAITING
    harness.run()
    assert (reading.num_output_tokens, decoding.num_output_tokens) == (4, 17)
    assert (reading.num_preemptions, decoding.num_preemptions) == (0, 1)


def test_nobody_is_late_by_the_time_that_his_own_reader_held_him_up() -> None:
    budget = LatencyBudget(LatencyConfig(LatencyTargets(ttft_s=1.0)), StepCostModel(PLAIN))
    sequence = make_sequence(prompt_len=500, arrival_s=7.0)
    sequence.note_pause(20.0)
    # 950 ms of 1000 are planned for; the prompt takes 500.
    assert not budget.is_late(sequence, now_s=27.44)
    assert budget.is_late(sequence, now_s=27.46)
