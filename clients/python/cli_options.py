"""The options that `headrace generate` and `headrace chat` share: declared once, taken by name."""

from __future__ import annotations

from typing import Annotated

import typer

SAMPLING = "Sampling"
STOPPING = "Stopping"

Target = Annotated[
    str, typer.Option("--target", "-t", metavar="HOST:PORT", help="Where the server listens; unix:/path too.")
]
ModelName = Annotated[
    str | None, typer.Option("--model", "-m", help="Name of a served model; the server's default otherwise.")
]
System = Annotated[str | None, typer.Option("--system", "-s", help="System message of the conversation.")]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        help="0 is greedy; up to 100. Server's default otherwise.",
        rich_help_panel=SAMPLING,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option("--top-k", help="Keep the k likeliest tokens; 0 is off.", rich_help_panel=SAMPLING),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        help="Keep the smallest set of likeliest tokens whose probability reaches this, above 0 to 1.",
        rich_help_panel=SAMPLING,
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        "--min-p",
        help="Drop tokens less likely than this times the likeliest, 0 to 1.",
        rich_help_panel=SAMPLING,
    ),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(
        "--frequency-penalty",
        help="Make a token less likely, the more often it was said.",
        rich_help_panel=SAMPLING,
    ),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option("--presence-penalty", help="Make what was said less likely.", rich_help_panel=SAMPLING),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty",
        help="Divide the logits of what was read or said by this; 1 is off.",
        rich_help_panel=SAMPLING,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed", help="Same seed, same tokens. Drawn by the server otherwise.", rich_help_panel=SAMPLING
    ),
]
MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", "-n", help="Most tokens to make.", rich_help_panel=STOPPING)
]
StopTokenIds = Annotated[
    list[int] | None,
    typer.Option(
        "--stop-token-id",
        help="Token id that ends the answer, beside the model's own; may be repeated.",
        rich_help_panel=STOPPING,
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop", metavar="TEXT", help="Text that ends the answer; may be repeated.", rich_help_panel=STOPPING
    ),
]
IncludeStop = Annotated[
    bool,
    typer.Option("--include-stop", help="Leave the stop text in the answer.", rich_help_panel=STOPPING),
]
MinTokens = Annotated[
    int | None,
    typer.Option("--min-tokens", help="No end before this many tokens.", rich_help_panel=STOPPING),
]
IgnoreEos = Annotated[
    bool,
    typer.Option("--ignore-eos", help="Do not stop at the model's end tokens.", rich_help_panel=STOPPING),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        metavar="SECONDS",
        help="Longest time, queueing included; then the answer ends as it is.",
        rich_help_panel=STOPPING,
    ),
]
