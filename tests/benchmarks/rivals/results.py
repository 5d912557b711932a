"""What was measured, kept in a file from run to run, and the table of it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.benchmarks.rivals.work import Work

SCHEMA = "headrace.rivals/1"


@dataclass
class Side:
    """One contender's figures.

    Args:
        figures: by the name of the work, tokens per second, one for each pass.
        idle_cpu: share of a core that it used while it had nothing to do.
    """

    name: str
    figures: dict[str, list[float]] = field(default_factory=dict)
    start_s: float = 0.0
    rss_mib: float = 0.0
    peak_mib: float = 0.0
    idle_cpu: float = 0.0

    def figure(self, work: str) -> float:
        """The median over passes."""
        return statistics.median(self.figures[work])


@dataclass
class Comparison:
    """A rival and the Headrace beside it, from one run."""

    rival: Side
    headrace: Side
    measured: str = ""
    commit: str = ""

    def has(self, work: str, num_passes: int) -> bool:
        """Whether both sides have done a work so often."""
        return all(len(side.figures.get(work, ())) >= num_passes for side in (self.rival, self.headrace))


def read(path: Path, works: Sequence[Work]) -> dict[str, Comparison]:
    """What a file holds, of this same work; nothing if there is no file.

    Raises:
        ValueError: it holds figures of other work.
    """
    if not path.is_file():
        return {}
    document = json.loads(path.read_text(encoding="utf-8"))
    if document.get("schema") != SCHEMA or document.get("work") != [work.title for work in works]:
        raise ValueError(f"{path} holds figures of other work: name another file with --results")
    return {
        name: Comparison(**{**entry, "rival": Side(**entry["rival"]), "headrace": Side(**entry["headrace"])})
        for name, entry in document["comparisons"].items()
    }


def write(
    path: Path, works: Sequence[Work], machine: dict[str, object], found: dict[str, Comparison]
) -> None:
    """Keep everything."""
    document = {
        "schema": SCHEMA,
        "work": [work.title for work in works],
        "machine": machine,
        "comparisons": {name: asdict(comparison) for name, comparison in found.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    part.rename(path)


def print_table(console: Console, works: Sequence[Work], found: dict[str, Comparison]) -> None:
    """One row for each side, one for the ratio of both."""
    for work in works:
        console.print(work.title, markup=False, highlight=False)
    table = Table()
    table.add_column("")
    for heading in (*(work.name.upper() for work in works), "RSS MiB", "peak MiB", "start s", "idle cores"):
        table.add_column(heading, justify="right")
    for name, comparison in found.items():
        for side in (comparison.rival, comparison.headrace):
            spread = [_with_spread(side.figures.get(work.name, ())) for work in works]
            table.add_row(
                side.name,
                *spread,
                f"{side.rss_mib:.0f}",
                f"{side.peak_mib:.0f}",
                f"{side.start_s:.1f}",
                f"{side.idle_cpu:.2f}",
            )
        mine, other = comparison.headrace, comparison.rival
        ratios = [
            f"{mine.figure(work.name) / other.figure(work.name):.2f} ×"
            if comparison.has(work.name, 1)
            else ""
            for work in works
        ]
        if not mine.rss_mib or not other.rss_mib:
            continue
        table.add_row(
            f"headrace ÷ {name}",
            *ratios,
            f"{mine.rss_mib / other.rss_mib:.2f} ×",
            f"{mine.peak_mib / other.peak_mib:.2f} ×",
            f"{mine.start_s / other.start_s:.2f} ×",
            "",
            style="bold",
            end_section=True,
        )
    console.print(table)


def _with_spread(figures: Sequence[float]) -> str:
    """The median, and what it lies between."""
    if not figures:
        return "not yet"
    median = statistics.median(figures)
    if len(figures) == 1:
        return f"{median:.0f}"
    return f"{median:.0f} ({min(figures):.0f}-{max(figures):.0f})"
