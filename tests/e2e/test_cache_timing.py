"""What the time of a first token tells about the texts of others: nothing.

Time is virtual: a step takes what it computes, so whatever a cache saves shows to the last digit.
"""

from __future__ import annotations

from headrace.engine.config import CacheLayout, ModelInfo
from headrace.engine.core import EngineCore
from headrace.engine.outputs import TokenEvent
from headrace.engine.scheduling.cost_model import StepPrices
from tests.support.fake_runner import FakeTokenizer
from tests.support.requests import make_config, make_request
from tests.support.virtual_time import VOCAB_SIZE, Machine

PRICES = StepPrices(6.7e-3, 2.8e-4, 2.6e-4, 4e-7, 4e-8)
BLOCK_SIZE = 4
LENGTH = 20 * BLOCK_SIZE + 1
SECRET = tuple(range(1000, 1000 + LENGTH))


class Server:
    """An engine in virtual time that serves one request after another."""

    def __init__(self) -> None:
        info = ModelInfo("virtual", "none", 1 << 10, VOCAB_SIZE, frozenset(), None, "none", 0)
        self._machine = Machine(PRICES)
        layout = CacheLayout(4096, BLOCK_SIZE)
        self._core = EngineCore(info, layout, FakeTokenizer(), make_config(), self._machine.clock)

    def ask(self, identity: str, prompt: tuple[int, ...]) -> tuple[float, int]:
        """(seconds to the first token, prompt tokens computed)."""
        self._machine.now_s = 0.0
        self._core.add(make_request(prompt=prompt, max_tokens=2, isolation_key=identity))
        num_computed, first_s = 0, None
        while self._core.has_work:
            plan = self._core.begin_step()
            assert plan is not None
            events, stats = self._core.finish_step(self._machine.execute(plan))
            num_computed += stats.num_prefill_tokens
            if first_s is None and any(isinstance(event, TokenEvent) for _, event in events):
                first_s = self._machine.now_s
        assert first_s is not None
        return first_s, num_computed


def fresh(number: int) -> tuple[int, ...]:
    """A prompt that nobody has sent."""
    return tuple(range(2000 + 100 * number, 2000 + 100 * number + LENGTH))


def test_a_stranger_computes_all_of_a_text_that_somebody_else_has_sent() -> None:
    server = Server()
    cold = server.ask("x", SECRET)
    assert cold[1] == LENGTH
    known = [server.ask(f"stranger {number}", SECRET) for number in range(10)]
    unknown = [server.ask(f"other stranger {number}", fresh(number)) for number in range(10)]
    assert known == unknown == [cold] * 10
    # That caching is on at all.
    again_s, num_computed = server.ask("x", SECRET)
    assert num_computed == 1
    assert again_s < cold[0]


def test_what_a_stranger_sends_again_tells_it_of_its_own_cache_alone() -> None:
    server = Server()
    server.ask("x", SECRET)
    known = [server.ask("y", SECRET) for _ in range(10)]
    unknown = [server.ask("z", fresh(0)) for _ in range(10)]
    assert known == unknown
    assert [num_computed for _, num_computed in known] == [LENGTH, *[1] * 9]
