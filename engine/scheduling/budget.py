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

A TPOT that not even a lone row keeps is a wish that nobody can grant. To serve a row or two at a time for its
sake would only break the promise of TTFT, too: what is planned for then is `UNREACHED_FACTOR` times the step
of a lone row, which on the machines that were measured serves as many as no target at all.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Collection, Iterable
from statistics import median

from headrace.engine.config import MAX_LATENCY_CLASSES, LatencyConfig, LatencyTargets
from headrace.engine.errors import ConfigError, Overloaded
from headrace.engine.outputs import LatencyStatus
from headrace.engine.scheduling.admission import LEAST_RETRY_S
from headrace.engine.scheduling.allowance import StepAllowance
from headrace.engine.scheduling.cost_model import StepCostModel, StepShape, attended_pairs
from headrace.engine.scheduling.plan import StepPlan
from headrace.engine.scheduling.promises import MOST_AIM, ClassRecord, TpotAim
from headrace.engine.scheduling.queue import WaitingQueue
from headrace.engine.sequence import Request, Sequence

logger = logging.getLogger(__name__)

AIM = MOST_AIM
"""Of a TTFT target, in what is planned; of a TPOT target it is at most as much, see `TpotAim`."""
LEAST_TPOT_FACTOR = 1.25
"""A TPOT below so many times a step with a single row can't be kept."""
UNREACHED_FACTOR = 3.0
"""The engine then aims at so many times such a step."""
_REACH_AGAIN = 1.1
"""One that was out of reach is within it again when there is so much room: no target comes and goes."""
_LEAST_PACE = 0.8
"""A sequence that is behind still bears steps of so much of its target: it catches up by the rest."""
_MAX_DRY_STEPS = 16
"""After so many steps without a token for the prompts that are under way, the next step has some."""
_PATIENCE_S = 10.0
"""After so long without anybody who joins, while somebody could, one joins."""
_GAP_GAIN = 0.05
"""Weight of the newest of the gaps between two that join."""
_NUM_LONE_STEPS = 33
"""The last so many steps with a row or two say what such a step takes."""
_CHECK_STEPS = 64
"""Every so many steps it is looked whether targets are within reach."""
_LATE_EVERY = 8
"""Every so many places the first of those that are late already has its turn."""
_SHARE_GAIN = 0.1
"""Weight of the newest step, or prompt, in what prompts get of steps and of the prefix cache."""
_LEAST_SHARE = 0.02
"""Prompts are taken to get no less of a step than this, so that no forecast grows without bound."""


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
        self._refuses_late = config.refuses_late
        self._allowance = StepAllowance(self.costs)
        self._num_dry_steps = 0
        self._last_join_s = 0.0
        self._num_joined_in_time = 0
        # How fast prompts go: the part of each step that they get while they want more than that, and the
        # part of them that isn't found in the prefix cache.
        self._prefill_share = 1.0
        self._uncached_share = 1.0
        # How fast the queue goes: seconds between two that join while others wait.
        self._join_gap_s = 0.0
        self._lone_steps_s: deque[float] = deque(maxlen=_NUM_LONE_STEPS)
        self._num_steps_over = 0
        self._records: dict[int | None, ClassRecord] = {}
        self._told_attainable: dict[int | None, bool] = {}
        self._aims: dict[int | None, TpotAim] = {}
        self._unreached_s: set[float] = set()

    @property
    def targets(self) -> tuple[tuple[int | None, LatencyTargets], ...]:
        """With the priority class of each; None stands for all classes that are not listed."""
        return ((None, self._default), *self._of_class.items())

    def set_targets(self, targets: LatencyTargets, priority: int | None) -> None:
        """Change what is promised, from the next step on.

        Args:
            priority: the class that it is for; None is for all, those with targets of their own included.

        Raises:
            ConfigError: too many classes have targets of their own.
        """
        if priority is None:
            self._default = targets
            for listed in self._of_class:
                self._records.pop(listed, None)
                self._told_attainable.pop(listed, None)
            self._aims.clear()
            self._of_class.clear()
        elif priority in self._of_class or len(self._of_class) < MAX_LATENCY_CLASSES:
            self._of_class[priority] = targets
            self._aims.pop(priority, None)
        else:
            raise ConfigError(
                f"{MAX_LATENCY_CLASSES} priority classes have latency targets of their own already: set them "
                "for all classes, which forgets those of single ones"
            )
        if priority in self._records:
            self._records[priority].forget_times()
        self._look_what_is_in_reach()

    def targets_of(self, sequence: Sequence) -> LatencyTargets:
        """What is promised to a sequence."""
        return self._of_class.get(sequence.request.priority, self._default)

    @property
    def lone_row_s(self) -> float:
        """What a step takes that decodes one or two rows and nothing else: the median of the last ones.

        Measured, not predicted: where many rows run all the time, nobody knows what one alone would take. 0
        before there was such a step.
        """
        return median(self._lone_steps_s) if self._lone_steps_s else 0.0

    def begin_step(
        self,
        running: Collection[Sequence],
        num_waiting: int,
        now_s: float,
        behind: StepPlan | None = None,
    ) -> StepAllowance:
        """What the step that is about to be planned may take on.

        Args:
            running: the sequences that run, decoding or not.
            num_waiting: how many wait.
            now_s: monotonic seconds.
            behind: a step that begins now, with a row of each that runs, and that this one is planned behind:
                its time counts as passed and its tokens as drawn, so that no lead is lent twice.
        """
        last, self._allowance = self._allowance, StepAllowance(self.costs)
        if not num_waiting or not running:
            self._last_join_s = now_s
        if not any(targets.has_any for _, targets in self.targets):
            # Nothing is promised to anybody: nothing here changes what is scheduled.
            return self._allowance
        aims: dict[int, float] = {}
        num_decodes = num_context = num_rows = num_known = 0
        limit_s = tightest_s = math.inf
        starts_s, num_coming = now_s, 0
        if behind is not None:
            starts_s, num_coming = now_s + self.costs.predict(StepShape.of(behind)), 1
        for sequence in running:
            num_rows += 1
            num_known += len(sequence.token_ids)
            priority = sequence.request.priority
            aim_s = aims.get(priority)
            if aim_s is None:
                aim_s = aims[priority] = self._aim_of(sequence)
            tightest_s = min(tightest_s, aim_s)
            if sequence.is_decoding:
                num_decodes += 1
                num_context += len(sequence.token_ids)
                if sequence.first_token_s is not None:
                    num_tokens = sequence.num_output_tokens + num_coming
                    due_s = sequence.first_token_s + sequence.paused_s + num_tokens * aim_s
                    limit_s = min(limit_s, max(due_s - starts_s, _LEAST_PACE * aim_s))
        is_dry = num_rows > num_decodes and not last.has_prefill
        self._num_dry_steps = self._num_dry_steps + 1 if is_dry else 0
        self._allowance = StepAllowance(
            self.costs,
            limit_s=limit_s,
            left_s=limit_s - self.costs.predict(StepShape(0, num_decodes, num_context, 0)),
            rows=StepShape(0, num_rows, num_known, 0),
            tightest_s=tightest_s,
            must_prefill=self._num_dry_steps >= _MAX_DRY_STEPS,
            must_join=now_s - self._last_join_s >= _PATIENCE_S,
        )
        return self._allowance

    @property
    def allowance(self) -> StepAllowance:
        """What the step may take on that was planned last."""
        return self._allowance

    def observe(self, plan: StepPlan, seconds: float, allowance: StepAllowance) -> None:
        """Learn from a step that has run.

        Args:
            seconds: from its beginning to that of the next one, which followed at once.
            allowance: what it could take on.
        """
        shape = StepShape.of(plan)
        self.costs.observe(shape, seconds)
        if len(plan.rows) <= 2 and shape.num_decode_tokens > 0 and shape.num_prefill_tokens == 0:
            self._lone_steps_s.append(seconds)
            self._look_what_is_in_reach()
        self._num_steps_over += seconds > allowance.limit_s
        if plan.step % _CHECK_STEPS == 0:
            self._tell_attainable()
        share = 1.0
        if allowance.was_tight:
            decode = StepShape(0, shape.num_decode_tokens, shape.num_context_tokens, 0)
            share = 1.0 - self.costs.predict(decode) / self.costs.predict(shape)
        self._prefill_share += _SHARE_GAIN * (share - self._prefill_share)

    def may_join(self, sequence: Sequence) -> bool:
        """Whether decodes stay quick enough with one more sequence."""
        return self._allowance.may_join(len(sequence.token_ids), self._aim_of(sequence))

    def join(self, sequence: Sequence, now_s: float) -> None:
        """Take notice of a sequence that has joined; what the prefix cache has of it counts as computed."""
        self._join_gap_s += _GAP_GAIN * (now_s - self._last_join_s - self._join_gap_s)
        self._last_join_s = now_s
        self._allowance.join(len(sequence.token_ids), self._aim_of(sequence))
        uncached = sequence.num_new_tokens / len(sequence.token_ids)
        self._uncached_share += _SHARE_GAIN * (uncached - self._uncached_share)
        self._num_joined_in_time = 0 if sequence.is_late else self._num_joined_in_time + 1
        # Should it wait again it goes by its arrival: it may have had its first token, and have readers.
        sequence.is_late = False

    @property
    def is_turn_of_late(self) -> bool:
        """Whether the next place is for one that is late already, if there is one."""
        return self._num_joined_in_time >= _LATE_EVERY - 1

    def is_late(self, sequence: Sequence, now_s: float) -> bool:
        """Whether a sequence is going to miss its TTFT even if it is served before everybody else."""
        target_s = self.targets_of(sequence).ttft_s
        if target_s is None or sequence.first_token_s is not None:
            return False
        arrival_s = sequence.arrival_s + sequence.early_paused_s
        return now_s + self._prefill_s(len(sequence.token_ids)) > arrival_s + AIM * target_s

    def note_end(self, sequence: Sequence) -> None:
        """Take in the figures of a sequence that has ended."""
        name, targets = self._class_of(sequence), self.targets_of(sequence)
        is_missed = self._records.setdefault(name, ClassRecord()).note(sequence, targets)
        if is_missed is not None and targets.tpot_s not in self._unreached_s:
            self._aims.setdefault(name, TpotAim()).note(is_missed=is_missed)

    def status(self, running: Iterable[Sequence], waiting: WaitingQueue) -> LatencyStatus:
        """What is promised, and how it is kept."""
        decode = StepShape()
        for sequence in running:
            decode = decode.with_decode(len(sequence.token_ids))
        no_record = ClassRecord()
        return LatencyStatus(
            classes=tuple(
                self._records.get(priority, no_record).told(
                    priority, targets, is_attainable=self._is_attainable(targets)
                )
                for priority, targets in self.targets
            ),
            predicted_step_s=self.costs.predict(decode) if decode.num_decode_tokens else 0.0,
            predicted_ttft_s=self._predicted_ttft_s(1, waiting.num_in_time),
            num_steps_over=self._num_steps_over,
            num_late=len(waiting) - waiting.num_in_time,
        )

    def check(self, request: Request, num_in_time: int) -> None:
        """Let a request wait, or not, if late ones are to be refused.

        Args:
            num_in_time: how many wait before it.

        Raises:
            Overloaded: its first token can't come in time.
        """
        target_s = self._of_class.get(request.priority, self._default).ttft_s
        if not self._refuses_late or target_s is None:
            return
        predicted_s = self._predicted_ttft_s(len(request.prompt_token_ids), num_in_time)
        if predicted_s > AIM * target_s:
            raise Overloaded(
                f"the first token would come after {predicted_s:.3g} s, and {target_s:.3g} s are promised",
                retry_after_s=max(LEAST_RETRY_S, predicted_s - AIM * target_s),
            )

    def _predicted_ttft_s(self, num_prompt_tokens: int, num_before: int) -> float:
        """How long one that comes now waits for its first token if the queue goes on as it went, seconds."""
        decode_s = self.costs.seconds_of_decodes(1, 1)
        return decode_s + self._prefill_s(num_prompt_tokens) + num_before * self._join_gap_s

    def _is_attainable(self, targets: LatencyTargets) -> bool:
        """Whether targets can be kept with a single sequence running, as far as is known."""
        lone_s = self.lone_row_s
        return targets.tpot_s not in self._unreached_s and (
            targets.ttft_s is None or targets.ttft_s >= lone_s
        )

    def _look_what_is_in_reach(self) -> None:
        """See which TPOT targets not even a lone row keeps."""
        least_s = LEAST_TPOT_FACTOR * self.lone_row_s
        self._unreached_s = {
            targets.tpot_s
            for _, targets in self.targets
            if targets.tpot_s is not None
            and targets.tpot_s < least_s * (_REACH_AGAIN if targets.tpot_s in self._unreached_s else 1.0)
        }

    def _tell_attainable(self) -> None:
        """Log it once when a class's targets get out of reach, and once when they are within it again."""
        for priority, targets in self.targets:
            is_attainable = self._is_attainable(targets)
            if is_attainable == self._told_attainable.get(priority, True):
                continue
            self._told_attainable[priority] = is_attainable
            logger.log(
                logging.INFO if is_attainable else logging.WARNING,
                "latency targets of %s (TPOT %s, TTFT %s) are %s: a step with a single row takes %.2f ms",
                "all other requests" if priority is None else f"priority {priority}",
                _spelt(targets.tpot_s),
                _spelt(targets.ttft_s),
                "within reach again" if is_attainable else "out of reach, whatever the load",
                1e3 * self.lone_row_s,
            )

    def _class_of(self, sequence: Sequence) -> int | None:
        priority = sequence.request.priority
        return priority if priority in self._of_class else None

    def _aim_of(self, sequence: Sequence) -> float:
        """The TPOT that is planned for: the target less a margin, but none at which prompts would get no part
        of a step; where it is out of reach, one that costs no throughput."""
        target_s = self.targets_of(sequence).tpot_s
        if target_s is None:
            return math.inf
        if target_s in self._unreached_s:
            return UNREACHED_FACTOR * self.lone_row_s
        aim = self._aims.get(self._class_of(sequence))
        share = MOST_AIM if aim is None else aim.share
        return max(share * target_s, LEAST_TPOT_FACTOR * self.lone_row_s)

    def _prefill_s(self, num_prompt_tokens: int) -> float:
        """How long a prompt takes if it gets all that prompts get, seconds, the prefix cache allowed for."""
        prices, num_tokens = self.costs.prices, round(num_prompt_tokens * self._uncached_share)
        first_position = num_prompt_tokens - num_tokens
        alone_s = prices.prefill_token * num_tokens
        alone_s += prices.attended_pair * attended_pairs(first_position, num_tokens)
        return alone_s / max(self._prefill_share, _LEAST_SHARE)


class LatencyDesk:
    """Changes what is promised.

    Args:
        budget: where it is kept.
        waiting: who may have been put off for it.
    """

    def __init__(self, budget: LatencyBudget, waiting: WaitingQueue) -> None:
        self._budget = budget
        self._waiting = waiting

    def set_targets(self, targets: LatencyTargets, priority: int | None = None) -> None:
        """Change which latencies are promised, from the next step on.

        Args:
            priority: the class that it is for; None is for all, those with targets of their own included.

        Raises:
            ConfigError: too many classes have targets of their own.
        """
        self._budget.set_targets(targets, priority)
        # Who is late by the old targets need not be by the new ones.
        self._waiting.take_back()


def _spelt(seconds: float | None) -> str:
    return "none" if seconds is None else f"{1e3 * seconds:g} ms"
