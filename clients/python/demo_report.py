"""What the demo measured, and how it says so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from headrace.clients.events import StepTotals


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run of the same requests.

    Args:
        batching: "continuous" or "static".
        num_tokens: tokens that the clients received.
        wall_s: first request sent to last answer complete.
        latencies_s: per request, from when all were sent to when it was complete.
        first_token_s: per request, to its first token.
        totals: what the server counted during the run.
    """

    batching: str
    num_slots: int
    num_tokens: int
    wall_s: float
    latencies_s: tuple[float, ...]
    first_token_s: tuple[float, ...]
    totals: StepTotals

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the clients received, per second of the run."""
        return self.num_tokens / self.wall_s

    @property
    def ms_per_step(self) -> float:
        """Mean time of a step. It grows with the rows; a jump says that something else used the machine."""
        return self.totals.step_s * 1e3 / self.totals.num_steps

    @property
    def occupancy(self) -> float:
        """Share of slots that held a request, averaged over steps."""
        return self.totals.num_rows / (self.totals.num_steps * self.num_slots)

    @property
    def kv_waste(self) -> float:
        """KV slots allocated but not used, per used one, over all steps."""
        used = self.totals.num_kv_slots_used
        return (self.totals.num_kv_slots_allocated - used) / used

    @property
    def mean_latency_s(self) -> float:
        """Mean time until a request was complete."""
        return sum(self.latencies_s) / len(self.latencies_s)

    @property
    def p99_latency_s(self) -> float:
        """Time within which 99 % of the requests were complete."""
        return percentile(self.latencies_s, 0.99)

    @property
    def mean_first_token_s(self) -> float:
        """Mean time until a request's first token."""
        return sum(self.first_token_s) / len(self.first_token_s)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that at least `share` of them do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def figures_as_json(runs: Sequence[RunFigures], num_equal_answers: int, model: str) -> dict[str, object]:
    """The object that `headrace demo --json` writes."""
    first, second = runs
    return {
        "model": model,
        "num_requests": len(first.latencies_s),
        "num_slots": first.num_slots,
        "num_equal_answers": num_equal_answers,
        "runs": [
            {
                "batching": run.batching,
                "num_tokens": run.num_tokens,
                "wall_s": run.wall_s,
                "tokens_per_s": run.tokens_per_s,
                "slot_occupancy": run.occupancy,
                "kv_waste": run.kv_waste,
                "mean_latency_s": run.mean_latency_s,
                "p99_latency_s": run.p99_latency_s,
                "mean_first_token_s": run.mean_first_token_s,
                "totals": asdict(run.totals),
            }
            for run in runs
        ],
        "steps_ratio": second.totals.num_steps / first.totals.num_steps,
        "tokens_per_s_ratio": first.tokens_per_s / second.tokens_per_s,
    }


def print_report(console: Console, runs: Sequence[RunFigures], num_equal_answers: int) -> None:
    """Both runs side by side, and what they mean."""
    first, second = runs
    table = Table()
    table.add_column("")
    table.add_column(first.batching, justify="right")
    table.add_column(second.batching, justify="right")
    table.add_column(f"{first.batching} is", justify="right")
    for row in _rows(first, second):
        table.add_row(*row)
    console.print()
    console.print(table)
    console.print()
    console.print(explanation(first, second, num_equal_answers), markup=False, highlight=False)


def _rows(first: RunFigures, second: RunFigures) -> list[tuple[str, str, str, str]]:
    def ratio(mine: float, other: float) -> str:
        return f"{mine / other:.2f} ×" if other else ""

    return [
        (
            "steps",
            f"{first.totals.num_steps}",
            f"{second.totals.num_steps}",
            ratio(first.totals.num_steps, second.totals.num_steps),
        ),
        (
            "ms per step",
            f"{first.ms_per_step:.1f}",
            f"{second.ms_per_step:.1f}",
            ratio(first.ms_per_step, second.ms_per_step),
        ),
        ("wall time", f"{first.wall_s:.2f} s", f"{second.wall_s:.2f} s", ratio(first.wall_s, second.wall_s)),
        (
            "tokens/s",
            f"{first.tokens_per_s:.1f}",
            f"{second.tokens_per_s:.1f}",
            ratio(first.tokens_per_s, second.tokens_per_s),
        ),
        (
            "slot occupancy",
            f"{first.occupancy:.1%}",
            f"{second.occupancy:.1%}",
            ratio(first.occupancy, second.occupancy),
        ),
        (
            "mean latency",
            f"{first.mean_latency_s:.2f} s",
            f"{second.mean_latency_s:.2f} s",
            ratio(first.mean_latency_s, second.mean_latency_s),
        ),
        (
            "p99 latency",
            f"{first.p99_latency_s:.2f} s",
            f"{second.p99_latency_s:.2f} s",
            ratio(first.p99_latency_s, second.p99_latency_s),
        ),
        (
            "mean time to first token",
            f"{first.mean_first_token_s:.2f} s",
            f"{second.mean_first_token_s:.2f} s",
            ratio(first.mean_first_token_s, second.mean_first_token_s),
        ),
        ("KV waste", f"{first.kv_waste:.1%}", f"{second.kv_waste:.1%}", ""),
    ]


def explanation(first: RunFigures, second: RunFigures, num_equal_answers: int) -> str:
    """What was just seen, in words that follow from the figures."""
    num_requests = len(first.latencies_s)
    steps, other_steps = first.totals.num_steps, second.totals.num_steps
    if steps < other_steps:
        outcome = f"so the same tokens took {steps} steps instead of {other_steps}"
    else:
        outcome = f"which saved no steps this time: {steps} against {other_steps}"
    return (
        f"{num_requests} requests shared {first.num_slots} slots over one gRPC stream. With {first.batching} "
        f"batching a slot goes to the next waiting request at the very step after its request ends; with "
        f"{second.batching} batching it stays empty until the longest request of its batch has ended. "
        f"{first.occupancy:.0%} of the slots worked in the first run and {second.occupancy:.0%} in the "
        f"second, {outcome}. KV memory is paged in small blocks, so only the last block of a request is "
        f"partly empty: {first.kv_waste:.1%} of what was used. {num_equal_answers} of {num_requests} answers "
        f"were the same token for token in both runs."
    )
