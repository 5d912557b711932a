"""Keeps promised latencies: how much prefill a step may hold, who may join, and whose turn it is.

A target of TPOT, time per output token, is a promise about a mean: a sequence whose first token came at t has
token n in time at t + n · target. How far it is ahead of that is its slack. A step may take as long as the
least slack of those that decode in it, so running streams are protected from prefill bursts (stall-free
batching, Sarathi-Serve, OSDI '24), while those that are ahead lend their lead to prompts. What the step may
take, less what its decodes cost by the learned model, is filled with prompt tokens: with the longest steps
that are allowed throughput is highest.

A target of TTFT, time to first token, decides whose prompt is next. When not everybody can be in time, it is
better that some are than nobody: who is sure to be late gives way to who isn't, but for every eighth place.

Where the two are in conflict TPOT goes first: one step that is too long breaks the promise to all that run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from headrace.engine.config import LatencyConfig, LatencyTargets
from headrace.engine.scheduling.cost_model import StepCostModel, StepShape, attended_pairs
from headrace.engine.scheduling.plan import StepPlan
from headrace.engine.sequence import Sequence

AIM = 0.95
"""Of a target, in what is planned: the rest is for noise, and for the way to the client."""
LEAST_TPOT_FACTOR = 1.25
"""A TPOT below so many times a step with a single row can't be kept: the engine then aims at that."""
_LEAST_PACE = 0.8
"""A sequence that is behind still bears steps of so much of its target: it catches up by the rest."""
_DECODE_SHARE = 0.9
"""Nobody joins when decodes alone would take more of the tightest target than this."""
_LEAST_CHUNK = 16
"""Tokens: prompts are not cut finer, but for their ends."""
_MAX_DRY_STEPS = 16
"""After so many steps without a token for the prompts that are under way, the next step has some."""
_PATIENCE_S = 10.0
"""After so long without anybody who joins, while somebody could, one joins."""
_LATE_EVERY = 8
"""Every so many places the first of those that are late already has its turn."""
_SHARE_GAIN = 0.1
_LEAST_SHARE = 0.02
_MANY = 2**30


class LatencyBudget:
    """What is promised, and what follows from it for each step.

    Args:
        config: the targets to begin with; None promises nothing.
        costs: what steps cost; None begins with the prior.
    """

    def __init__(self, config: LatencyConfig | None = None, costs: StepCostModel | None = None) -> None:
        config = config or LatencyConfig()
        self.costs = costs or StepCostModel()
        self._default = config.default
        self._of_class = dict(config.by_priority)
        self._allowance = StepAllowance(self.costs)
        self._num_dry_steps = 0
        self._last_join_s = -math.inf
        self._num_joined_in_time = 0
        # How fast prompts go: the part of each step that they get while they want more than that, and the
        # part of them that isn't found in the prefix cache.
        self._prefill_share = 1.0
        self._uncached_share = 1.0

    @property
    def has_targets(self) -> bool:
        """Whether anything is promised to anybody. If not, nothing here changes what is scheduled."""
        return any(targets.has_any for targets in (self._default, *self._of_class.values()))

    @property
    def targets(self) -> dict[int | None, LatencyTargets]:
        """By priority class; None stands for all classes that are not listed."""
        return {None: self._default, **self._of_class}

    def set_targets(self, targets: LatencyTargets, priority: int | None) -> None:
        """Change what is promised, from the next step on.

        Args:
            priority: the class that it is for; None is for all, those with targets of their own included.
        """
        if priority is None:
            self._default = targets
            self._of_class.clear()
        else:
            self._of_class[priority] = targets

    def targets_of(self, sequence: Sequence) -> LatencyTargets:
        """What is promised to a sequence."""
        return self._of_class.get(sequence.request.priority, self._default)

    @property
    def single_row_s(self) -> float:
        """What a step that only decodes one short row is expected to take, seconds."""
        return self.costs.predict(StepShape(0, 1, 1, 0))

    def aim_tpot_s(self, target_s: float) -> float:
        """The TPOT that is planned for: the target less a margin, or, where that is out of reach, the least
        one at which prompts still get their part of each step."""
        return max(AIM * target_s, LEAST_TPOT_FACTOR * self.single_row_s)

    def begin_step(self, running: Iterable[Sequence], num_waiting: int, now_s: float) -> StepAllowance:
        """What the step that is about to be planned may take on.

        Args:
            running: the sequences that run, decoding or not.
            num_waiting: how many wait.
            now_s: monotonic seconds.
        """
        last, self._allowance = self._allowance, StepAllowance(self.costs)
        if not self.has_targets:
            return self._allowance
        num_decodes = num_context = num_rows = num_known = 0
        limit_s = tightest_s = math.inf
        for sequence in running:
            num_rows += 1
            num_known += len(sequence.token_ids)
            aim_s = self._aim_of(sequence)
            tightest_s = min(tightest_s, aim_s)
            if sequence.is_decoding:
                num_decodes += 1
                num_context += len(sequence.token_ids)
                if sequence.first_token_s is not None:
                    due_s = sequence.first_token_s + sequence.num_output_tokens * aim_s
                    limit_s = min(limit_s, max(due_s - now_s, _LEAST_PACE * aim_s))
        is_dry = num_rows > num_decodes and not last.has_prefill
        self._num_dry_steps = self._num_dry_steps + 1 if is_dry else 0
        if last.num_joined or not num_waiting or not num_rows:
            self._last_join_s = now_s
        self._allowance = StepAllowance(
            self.costs,
            left_s=limit_s - self.costs.predict(StepShape(0, num_decodes, num_context, 0)),
            rows=StepShape(0, num_rows, num_known, 0),
            tightest_s=tightest_s,
            must_prefill=self._num_dry_steps >= _MAX_DRY_STEPS,
            must_join=now_s - self._last_join_s >= _PATIENCE_S,
        )
        return self._allowance

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learn from a step that has run.

        Args:
            seconds: from its beginning to that of the next one, which followed at once.
        """
        shape = StepShape.of(plan)
        self.costs.observe(shape, seconds)
        share = 1.0
        if self._allowance.was_tight:
            decode = StepShape(0, shape.num_decode_tokens, shape.num_context_tokens, 0)
            share = 1.0 - self.costs.predict(decode) / self.costs.predict(shape)
        self._prefill_share += _SHARE_GAIN * (share - self._prefill_share)

    def may_join(self, sequence: Sequence) -> bool:
        """Whether decodes stay quick enough with one more sequence."""
        return self._allowance.may_join(len(sequence.token_ids), self._aim_of(sequence))

    def join(self, sequence: Sequence) -> None:
        """Take notice of a sequence that has joined; what the prefix cache has of it counts as computed."""
        self._allowance.join(len(sequence.token_ids), self._aim_of(sequence))
        uncached = sequence.num_new_tokens / len(sequence.token_ids)
        self._uncached_share += _SHARE_GAIN * (uncached - self._uncached_share)
        self._num_joined_in_time = 0 if sequence.is_late else self._num_joined_in_time + 1

    @property
    def is_turn_of_late(self) -> bool:
        """Whether the next place is for one that is late already, if there is one."""
        return self._num_joined_in_time >= _LATE_EVERY - 1

    def is_late(self, sequence: Sequence, now_s: float) -> bool:
        """Whether a sequence is going to miss its TTFT even if it is served before everybody else."""
        target_s = self.targets_of(sequence).ttft_s
        if target_s is None or sequence.first_token_s is not None:
            return False
        return now_s + self._prefill_s(sequence) > sequence.arrival_s + AIM * target_s

    def _aim_of(self, sequence: Sequence) -> float:
        target_s = self.targets_of(sequence).tpot_s
        return math.inf if target_s is None else self.aim_tpot_s(target_s)

    def _prefill_s(self, sequence: Sequence) -> float:
        """How long what a sequence lacks takes if it gets all that prompts get, seconds."""
        num_tokens = round(sequence.num_new_tokens * self._uncached_share)
        first_position = len(sequence.token_ids) - num_tokens
        prices = self.costs.prices
        alone_s = prices.prefill_token * num_tokens + prices.attended_pair * attended_pairs(
            first_position, num_tokens
        )
        return alone_s / max(self._prefill_share, _LEAST_SHARE)


class StepAllowance:
    """What one step may still take on beside its decodes; made anew for each step. The default allows all.

    Args:
        costs: what steps cost.
        left_s: time that prompts may take.
        rows: all that run, as if each decoded.
        tightest_s: least TPOT that any of them is to have.
        must_prefill: whether a prompt gets on whatever the time.
        must_join: whether somebody joins whatever the time.
    """

    def __init__(
        self,
        costs: StepCostModel,
        left_s: float = math.inf,
        rows: StepShape | None = None,
        tightest_s: float = math.inf,
        *,
        must_prefill: bool = False,
        must_join: bool = False,
    ) -> None:
        self._costs = costs
        self._prices = costs.prices
        self._left_s = left_s
        self._rows = rows or StepShape()
        self._tightest_s = tightest_s
        self._must_prefill = must_prefill
        self._must_join = must_join
        self.num_joined = 0
        self.has_prefill = False
        self.was_tight = False

    def chunk_len(self, first_position: int, most: int, *, is_new: bool = False) -> int:
        """How many of `most` prompt tokens from `first_position` on the step may compute.

        Args:
            is_new: whether they are of a sequence that is about to join.
        """
        if self._left_s == math.inf or most == 0:
            return most
        num_tokens = self._num_tokens_within(self._left_s, first_position)
        if num_tokens >= most:
            return most
        self.was_tight = True
        is_due = self._must_join and self.num_joined == 0 if is_new else self._must_prefill
        if num_tokens < _LEAST_CHUNK:
            return min(most, _LEAST_CHUNK) if is_due and not self.has_prefill else 0
        return num_tokens

    def take(self, first_position: int, num_tokens: int) -> None:
        """Count prompt tokens that the step is going to compute."""
        if num_tokens == 0:
            return
        self.has_prefill = True
        prices = self._prices
        self._left_s -= prices.prefill_token * num_tokens
        self._left_s -= prices.attended_pair * attended_pairs(first_position, num_tokens)

    def may_join(self, num_known_tokens: int, aim_s: float) -> bool:
        """Whether decodes stay quick enough with one more sequence.

        Args:
            aim_s: TPOT that it is to have itself; infinite for any.
        """
        tightest_s = min(self._tightest_s, aim_s)
        if tightest_s == math.inf or self._rows.num_decode_tokens == 0:
            return True
        if self._costs.predict(self._rows.with_decode(num_known_tokens)) <= _DECODE_SHARE * tightest_s:
            return True
        return self._must_join and self.num_joined == 0

    def join(self, num_known_tokens: int, aim_s: float) -> None:
        """Count a sequence that has joined."""
        self.num_joined += 1
        self._rows = self._rows.with_decode(num_known_tokens)
        self._tightest_s = min(self._tightest_s, aim_s)

    def _num_tokens_within(self, seconds: float, first_position: int) -> int:
        """Most tokens from `first_position` on that take no longer: a quadratic equation's solution."""
        per_token = self._prices.prefill_token + self._prices.attended_pair * (first_position + 0.5)
        per_square = self._prices.attended_pair / 2
        if seconds <= 0:
            return 0
        root = math.sqrt(per_token * per_token + 4 * per_square * seconds)
        # The form of the solution that holds for a square term of zero, too.
        divisor = per_token + root
        return _MANY if divisor == 0 else min(_MANY, int(2 * seconds / divisor))
