"""Steps of a server as a watcher receives them, written as a table."""

from __future__ import annotations

from headrace.clients.events import KvBlocks, StepReport, StepRow

STEP_S = 0.01


def make_row(cell: str, slot: int) -> StepRow:
    """A row: "a12" prefills 12 tokens of request a, "a" decodes one, "a!" does and ends it, "a/1" is its
    sequence 1.
    """
    body = cell.rstrip("!")
    name, _, index = body.partition("/")
    label = name.rstrip("0123456789")
    num_prefill = int(name.removeprefix(label) or 0)
    return StepRow(
        request=f"{ord(label)}:{label}",
        index=int(index or 0),
        slot=slot,
        num_prefill_tokens=num_prefill,
        num_decode_tokens=0 if num_prefill else 1,
        is_finished=cell.endswith("!"),
        num_output_tokens=0 if num_prefill else 1,
    )


def make_report(step: int, cells: str, *, num_waiting: int = 0, num_preemptions: int = 0) -> StepReport:
    """A step of a hundredth of a second: a cell for each slot, "." for an idle one."""
    rows = tuple(make_row(cell, slot) for slot, cell in enumerate(cells.split()) if cell != ".")
    return StepReport(
        step=step,
        num_running=len(rows),
        num_waiting=num_waiting,
        num_prefill_tokens=sum(row.num_prefill_tokens for row in rows),
        num_decode_tokens=sum(row.num_decode_tokens for row in rows),
        num_preemptions=num_preemptions,
        blocks=KvBlocks(total=100, free=100 - 10 * len(rows), cached=0, live=10 * len(rows)),
        schedule_s=0.001,
        execute_s=STEP_S - 0.002,
        update_s=0.001,
        rows=rows,
        start_s=STEP_S * step,
    )


def make_reports(first_step: int, *steps: str) -> tuple[StepReport, ...]:
    """Steps in a row; "-" is one that was not seen."""
    return tuple(
        make_report(first_step + number, cells) for number, cells in enumerate(steps) if cells != "-"
    )
