"""The command line of `headrace budget`. What it runs is imported when it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headrace.clients import cli_access as access
from headrace.clients.cli_options import OperatorTarget
from headrace.clients.cli_outcome import USAGE, fail, run
from headrace.clients.cli_times import latency_in
from headrace.clients.targets import DEFAULT_CONTROL_TARGET

if TYPE_CHECKING:
    from headrace.clients.latency import LatencyClass, LatencyStatus

_NO_TARGETS = (
    "no targets: steps are filled for throughput. Promise latencies with --tpot 50ms, --ttft 500ms or both"
)


def budget(
    *,
    target: OperatorTarget = DEFAULT_CONTROL_TARGET,
    tpot: Annotated[
        str | None,
        typer.Option(
            "--tpot", metavar="TIME", help="Time per output token to keep, such as 50ms.", show_default=False
        ),
    ] = None,
    ttft: Annotated[
        str | None,
        typer.Option(
            "--ttft",
            metavar="TIME",
            help="Time from arrival to first token to keep, such as 500ms.",
            show_default=False,
        ),
    ] = None,
    priority: Annotated[
        int | None,
        typer.Option(
            "--priority",
            metavar="P",
            help="Only for requests of this priority. Otherwise for all, those with targets of their own "
            "included.",
            show_default=False,
        ),
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Have no targets any more.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Set the latencies that a running server promises, or show them and how they are kept.

    Of --tpot and --ttft, the one that is not given is no target any more. Without options nothing changes.
    """
    is_set = tpot is not None or ttft is not None
    if clear and is_set:
        fail("--clear leaves no target: leave out --tpot and --ttft, or --clear", USAGE)
    if priority is not None and not (clear or is_set):
        fail("--priority needs --tpot, --ttft or --clear", USAGE)
    tpot_s = None if tpot is None else latency_in(tpot, "--tpot")
    ttft_s = None if ttft is None else latency_in(ttft, "--ttft")

    from headrace.clients.control import ControlClient  # noqa: PLC0415

    async def ask() -> LatencyStatus:
        async with ControlClient(target, connection=access.connection()) as control:
            if clear or is_set:
                return await control.set_latency_budget(tpot_s=tpot_s, ttft_s=ttft_s, priority=priority)
            return (await control.load()).latency

    status = run(ask())
    typer.echo(_json(status) if as_json else "\n".join(_lines(status)))


def _json(status: LatencyStatus) -> str:
    import json  # noqa: PLC0415
    from dataclasses import asdict  # noqa: PLC0415

    return json.dumps(asdict(status))


def _lines(status: LatencyStatus) -> list[str]:
    """A line for each class, and one of the server as a whole."""
    if not status.classes:
        return ["this server does not tell of its latencies"]
    whole = (
        f"next step {_spelt(status.predicted_step_s)}, first token of a new request "
        f"{_spelt(status.predicted_ttft_s)}, waiting too late {status.num_late}, "
        f"steps over {status.num_steps_over}"
    )
    lines = [*(_line(each, is_only=len(status.classes) == 1) for each in status.classes), whole]
    if all(each.tpot_s is None and each.ttft_s is None for each in status.classes):
        lines.insert(0, _NO_TARGETS)
    return lines


def _line(each: LatencyClass, *, is_only: bool) -> str:
    who = f"priority {each.priority}" if each.priority is not None else "all" if is_only else "all others"
    line = (
        f"{who}: TPOT {_spelt(each.tpot_s)}, TTFT {_spelt(each.ttft_s)}; "
        f"p95 TPOT {_spelt(each.attained_tpot_p95_s)}, TTFT {_spelt(each.attained_ttft_p95_s)} "
        f"since it was set; over TPOT {each.num_over_tpot}, TTFT {each.num_over_ttft} of "
        f"{each.num_sequences} since the start"
    )
    return line if each.is_attainable else f"{line}; out of reach, whatever the load"


def _spelt(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
