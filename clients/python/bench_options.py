"""The options of `headrace bench`, some of which `headrace tune` has, too: declared once, taken by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.clients.cli_outcome import USAGE, fail
from headrace.clients.cli_times import latency_in

if TYPE_CHECKING:
    from headrace.clients.bench_stats import Targets

SERVER = "Server"
WORKLOAD = "Workload"
LOAD = "Load"
REPORT = "Report"

Dataset = Annotated[
    Path | None,
    typer.Option(
        "--dataset",
        metavar="FILE",
        help="Prompts: .json or .jsonl with prompt_token_ids or prompt, and output_len; or a text, a prompt "
        "a line. Synthetic prompts when not given.",
        rich_help_panel=WORKLOAD,
    ),
]
PromptLen = Annotated[
    str | None,
    typer.Option(
        "--prompt-len",
        metavar="LENGTHS",
        help="Tokens of a synthetic prompt: 128, 16-128, geometric:64:8-256, normal:128:32, "
        "lognormal:128:0.5. 128 when not given.",
        rich_help_panel=WORKLOAD,
    ),
]
OutputLen = Annotated[
    str | None,
    typer.Option(
        "--output-len",
        metavar="LENGTHS",
        help="Tokens of an answer, likewise; over a dataset's own lengths, too. 64 when nothing says it.",
        rich_help_panel=WORKLOAD,
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", help="Same seed, same prompts and arrivals.", rich_help_panel=WORKLOAD)
]
Target = Annotated[
    str,
    typer.Option(
        "--target",
        "-t",
        metavar="HOST:PORT",
        envvar="HEADRACE_TARGET",
        help="Where a Headrace server listens.",
        rich_help_panel=SERVER,
    ),
]
ControlTarget = Annotated[
    str | None,
    typer.Option(
        "--control-target",
        metavar="HOST:PORT",
        help="Its control port: then the report has the server's slots, too.",
        rich_help_panel=SERVER,
    ),
]
Streams = Annotated[
    bool,
    typer.Option(
        "--streams",
        help="A gRPC stream for each request, not one session for all.",
        rich_help_panel=SERVER,
    ),
]
Openai = Annotated[
    str | None,
    typer.Option(
        "--openai",
        metavar="URL",
        help="Measure an OpenAI-compatible server instead, over /v1/completions. Needs the bench extra.",
        rich_help_panel=SERVER,
    ),
]
Chat = Annotated[
    bool,
    typer.Option("--chat", help="With --openai: /v1/chat/completions.", rich_help_panel=SERVER),
]
OpenaiExtra = Annotated[
    str | None,
    typer.Option(
        "--openai-extra",
        metavar="JSON",
        help="With --openai: further fields of each request, as one JSON object.",
        rich_help_panel=SERVER,
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file",
        metavar="FILE",
        help="With --openai: holds the key that is sent as a bearer token.",
        rich_help_panel=SERVER,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="Name of a served model; the first one otherwise.", rich_help_panel=SERVER
    ),
]
BypassCache = Annotated[
    bool,
    typer.Option("--bypass-cache", help="Leave the server's prefix cache out of it.", rich_help_panel=SERVER),
]
SharedPrefixLen = Annotated[
    int,
    typer.Option(
        "--shared-prefix-len",
        min=0,
        help="Tokens that synthetic prompts begin with, beside their own: alike in many.",
        rich_help_panel=WORKLOAD,
    ),
]
NumPrefixes = Annotated[
    int,
    typer.Option(
        "--num-prefixes", min=1, help="How many such beginnings there are.", rich_help_panel=WORKLOAD
    ),
]
Turns = Annotated[
    int,
    typer.Option(
        "--turns",
        min=1,
        help="Requests of a synthetic conversation; each repeats what was said before.",
        rich_help_panel=WORKLOAD,
    ),
]
VocabularySize = Annotated[
    int | None,
    typer.Option(
        "--vocabulary-size",
        help="Synthetic token ids are below it. As the server says; where it doesn't, prompts are texts.",
        rich_help_panel=WORKLOAD,
    ),
]
NaturalLength = Annotated[
    bool,
    typer.Option(
        "--natural-length",
        help="Let the model end answers; otherwise each is exactly as long as asked for.",
        rich_help_panel=WORKLOAD,
    ),
]
Temperature = Annotated[
    float, typer.Option("--temperature", help="0 is greedy; up to 100.", rich_help_panel=WORKLOAD)
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        "--concurrency",
        "-c",
        min=1,
        help="Closed loop: so many requests at a time, 16 if nothing is said. With --rate: at most so many.",
        rich_help_panel=LOAD,
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(
        "--rate",
        metavar="PER_SECOND",
        help="Open loop: mean arrivals per second, whatever the server does; inf sends all at once.",
        rich_help_panel=LOAD,
    ),
]
Arrivals = Annotated[
    str,
    typer.Option(
        "--arrivals",
        help="Of an open loop: poisson, constant, or recorded (arrival_s of the dataset).",
        rich_help_panel=LOAD,
    ),
]
Burstiness = Annotated[
    float,
    typer.Option(
        "--burstiness",
        help="Shape of the gamma distribution of gaps: 1 is Poisson, below it arrivals come in bursts.",
        rich_help_panel=LOAD,
    ),
]
NumRequests = Annotated[
    int | None,
    typer.Option(
        "--num-requests",
        "-n",
        min=1,
        help="Conversations to send; the dataset's when not given, or 64. A dataset begins again.",
        rich_help_panel=LOAD,
    ),
]
Duration = Annotated[
    str | None,
    typer.Option(
        "--duration",
        metavar="TIME",
        help="Send for so long (60s, 5m); what runs is finished.",
        rich_help_panel=LOAD,
    ),
]
RequestTimeout = Annotated[
    str | None,
    typer.Option(
        "--request-timeout",
        metavar="TIME",
        help="Give a request up after this; it failed.",
        rich_help_panel=LOAD,
    ),
]
WarmUp = Annotated[
    int,
    typer.Option("--warm-up", min=0, help="Requests before, which count nowhere.", rich_help_panel=LOAD),
]
Goodput = Annotated[
    str | None,
    typer.Option(
        "--goodput",
        metavar="TARGETS",
        help="What a good request keeps: ttft=500ms,tpot=50ms; also itl (each gap) and e2e.",
        rich_help_panel=REPORT,
    ),
]
JsonPath = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write everything to this file.", rich_help_panel=REPORT),
]
Plot = Annotated[
    list[Path] | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Draw latencies and the run's course, .png or .svg; repeatable. Needs the bench extra.",
        rich_help_panel=REPORT,
    ),
]


def targets_in(text: str | None) -> Targets:
    """The targets in a list such as ttft=500ms,tpot=50ms."""
    from headrace.clients.bench_stats import Targets  # noqa: PLC0415

    found: dict[str, float] = {}
    for part in [] if text is None else text.split(","):
        name, equals, time = part.partition("=")
        if name not in ("ttft", "tpot", "itl", "e2e") or not equals or name in found:
            fail(
                f"--goodput: {part!r} is no target: use ttft, tpot, itl or e2e, once each, as in ttft=500ms",
                USAGE,
            )
        found[name] = latency_in(time, f"--goodput {name}")
    return Targets(found.get("ttft"), found.get("tpot"), found.get("itl"), found.get("e2e"))
