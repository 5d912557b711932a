"""A short run of the scheduler's state machine; `tests.support.scheduler_machine` says how to run more."""

from hypothesis import seed, settings

from tests.support.fake_runner import next_token
from tests.support.scheduler_machine import SchedulerMachine

TestSchedulerStates = seed(20_261_129)(SchedulerMachine).TestCase
TestSchedulerStates.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, database=None
)


def test_the_fake_model_never_draws_an_end_id():
    assert all(97 <= next_token(range(n)) < 123 for n in range(1, 50))
