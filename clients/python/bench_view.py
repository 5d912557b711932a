"""A load test while it runs: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from headrace.clients.bench_load import LoadOptions, LoadRun

_REFRESH_S = 0.25
_LINE_EVERY_S = 5.0


@asynccontextmanager
async def watched(console: Console, title: str, load: LoadRun, options: LoadOptions) -> AsyncIterator[None]:
    """Show a run for as long as the block lasts."""
    show = _bar if console.is_terminal else _lines
    watching = asyncio.create_task(show(console, title, load, options))
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _bar(console: Console, title: str, load: LoadRun, options: LoadOptions) -> None:
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}", markup=False),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
    )
    with progress:
        task = progress.add_task(title, total=options.num_conversations, state="")

        def draw() -> None:
            done = load.counts.num_conversations_over
            progress.update(task, completed=done, state=state_line(load), refresh=True)

        try:
            while True:
                await asyncio.sleep(_REFRESH_S)
                draw()
        finally:
            draw()


async def _lines(console: Console, title: str, load: LoadRun, options: LoadOptions) -> None:
    console.print(title, markup=False, highlight=False, soft_wrap=True)
    total = "" if options.num_conversations is None else f" of {options.num_conversations}"
    while True:
        await asyncio.sleep(_LINE_EVERY_S)
        line = f"{load.now_s:6.1f} s  {load.counts.num_conversations_over}{total} done, {state_line(load)}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def state_line(load: LoadRun) -> str:
    """How a run stands, in one line."""
    counts = load.counts
    rate = counts.num_tokens / load.now_s if load.now_s > 0 else 0.0
    failed = f", {counts.num_failed} failed" if counts.num_failed else ""
    held = f", {counts.num_held} held back" if counts.num_held else ""
    running = counts.num_begun - counts.num_over - counts.num_held
    return f"{running} running{held}{failed}, {counts.num_tokens} tokens, {rate:.0f} tokens/s"
