"""A model that computes nothing: each token says when its step was over; a step takes as long as told."""

from __future__ import annotations

import time
from collections.abc import Sequence

from headrace.engine import LoadedModel
from headrace.engine.config import CacheLayout, ModelInfo
from headrace.engine.scheduling.plan import RowResult, StepPlan, StepResult
from tests.support.blocking import Blocking
from tests.support.fake_runner import FakeTokenizer

_TICK_S = 1e-4
_WRAP = 2**17
"""Token ids are ticks modulo this, thirteen seconds: a vocabulary as large models have it."""


def stamp() -> int:
    """This moment as a token id; the same clock in every process of a machine."""
    return int(time.monotonic() / _TICK_S) % _WRAP


def seconds_since(token_id: int) -> float:
    """How long ago the token's step was over, seconds."""
    return (stamp() - token_id) % _WRAP * _TICK_S


class ClockRunner(Blocking):
    """Obeys `headrace.engine.runner.protocol.Runner`.

    Args:
        step_s: how long each step takes, seconds.
    """

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._due_s = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        # By a schedule, so that what the engine does between two steps does not make it slower.
        self._due_s = max(time.monotonic(), self._due_s + self._step_s)
        time.sleep(max(0.0, self._due_s - time.monotonic()))
        drawn = RowResult((stamp(),))
        return StepResult(tuple(drawn if row.is_sampled else RowResult() for row in plan.rows))

    def close(self) -> None:
        """Nothing is held."""


class NumberTokenizer(FakeTokenizer):
    """Every token is a word of its own: its number."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(f" {token_id}" for token_id in token_ids)

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes | None:
        return b" %d" % token_id


def make_clock_model(step_s: float, num_seqs: int, max_model_len: int = 4096) -> LoadedModel:
    """A served model over a `ClockRunner`, with KV blocks for `num_seqs` sequences of any length."""
    block_size = 16
    layout = CacheLayout(num_seqs * (max_model_len // block_size) + 1, block_size)
    info = ModelInfo(
        name="clock",
        family="clock",
        max_model_len=max_model_len,
        vocab_size=_WRAP,
        eos_token_ids=frozenset(),
        bos_token_id=0,
        dtype="none",
        num_parameters=0,
    )
    return LoadedModel(info, layout, ClockRunner(step_s), NumberTokenizer(), None)
