"""The options that several commands share: declared once, taken by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

SAMPLING = "Sampling"
STOPPING = "Stopping"
OUTPUT = "Output"
FORM = "Form of the answer"
PACE = "Order and speed"

Target = Annotated[
    str,
    typer.Option(
        "--target",
        "-t",
        metavar="HOST:PORT",
        envvar="HEADRACE_TARGET",
        help="Where the server listens; unix:/path too.",
    ),
]
OperatorTarget = Annotated[
    str,
    typer.Option(
        "--target",
        "-t",
        metavar="HOST:PORT",
        envvar="HEADRACE_CONTROL_TARGET",
        help="The operator's port of the server.",
    ),
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
TypicalP = Annotated[
    float | None,
    typer.Option(
        "--typical-p",
        help="Keep the tokens whose surprise is nearest to the expected one, up to this probability, "
        "above 0 to 1.",
        rich_help_panel=SAMPLING,
    ),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(
        "--frequency-penalty",
        help="Make a token less likely each time that it was said, -2 to 2.",
        rich_help_panel=SAMPLING,
    ),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option(
        "--presence-penalty", help="Make what was said less likely, -2 to 2.", rich_help_panel=SAMPLING
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty",
        help="Make what was read or said less likely, above 0 to 10; 1 is off.",
        rich_help_panel=SAMPLING,
    ),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        "--logit-bias",
        metavar="ID=BIAS",
        help="Add to the logit of a token id, -100 to 100; may be repeated.",
        rich_help_panel=SAMPLING,
    ),
]
AllowedTokenIds = Annotated[
    list[int] | None,
    typer.Option(
        "--allow-token-id",
        help="Token id that may be drawn, and no other; may be repeated.",
        rich_help_panel=SAMPLING,
    ),
]
BannedTokenIds = Annotated[
    list[int] | None,
    typer.Option(
        "--ban-token-id",
        help="Token id that is never drawn; may be repeated.",
        rich_help_panel=SAMPLING,
    ),
]
BadWords = Annotated[
    list[str] | None,
    typer.Option(
        "--bad-word",
        metavar="TEXT",
        help="Text that is never produced; may be repeated.",
        rich_help_panel=SAMPLING,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed", help="Same seed, same tokens. Drawn by the server otherwise.", rich_help_panel=SAMPLING
    ),
]
NumSequences = Annotated[
    int | None,
    typer.Option("--n", help="Make this many answers, one printed after the other.", rich_help_panel=OUTPUT),
]
BestOf = Annotated[
    int | None,
    typer.Option("--best-of", help="Make this many answers and print the likeliest.", rich_help_panel=OUTPUT),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        "--logprobs",
        metavar="K",
        help="Print how likely each token was, and the K likeliest in its place, 0 to 64.",
        rich_help_panel=OUTPUT,
    ),
]
PromptLogprobs = Annotated[
    int | None,
    typer.Option(
        "--prompt-logprobs",
        metavar="K",
        help="The same for each token of the prompt but the first.",
        rich_help_panel=OUTPUT,
    ),
]
Echo = Annotated[
    bool, typer.Option("--echo", help="Begin each answer with the prompt.", rich_help_panel=OUTPUT)
]
SpecialTokens = Annotated[
    bool,
    typer.Option("--special-tokens", help="Leave special tokens in the text.", rich_help_panel=OUTPUT),
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print everything as one JSON object when it is finished.",
        rich_help_panel=OUTPUT,
    ),
]
Stats = Annotated[
    bool,
    typer.Option(
        "--stats", help="Tell token counts and times on standard error at the end.", rich_help_panel=OUTPUT
    ),
]
DEFAULT_MAX_TOKENS = 512
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        "-n",
        help=f"Most tokens to make; unset: {DEFAULT_MAX_TOKENS}, or --min-tokens if that is more.",
        rich_help_panel=STOPPING,
    ),
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
    typer.Option("--include-stop", help="Leave the matched stop in the answer.", rich_help_panel=STOPPING),
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

JsonSchema = Annotated[
    str | None,
    typer.Option(
        "--json-schema",
        metavar="JSON|@FILE",
        help="The answer is JSON of this schema, given here or in a file.",
        rich_help_panel=FORM,
    ),
]
JsonAny = Annotated[
    bool, typer.Option("--json-object", help="The answer is some JSON object.", rich_help_panel=FORM)
]
Regex = Annotated[str | None, typer.Option("--regex", help="The whole answer matches.", rich_help_panel=FORM)]
Grammar = Annotated[
    str | None,
    typer.Option(
        "--grammar",
        metavar="EBNF|@FILE",
        help="The answer follows this grammar, given here or in a file.",
        rich_help_panel=FORM,
    ),
]
Choices = Annotated[
    list[str] | None,
    typer.Option(
        "--choice", metavar="TEXT", help="The answer is one of these; repeat it.", rich_help_panel=FORM
    ),
]

Priority = Annotated[
    int | None,
    typer.Option(
        "--priority",
        help="Higher goes first, -100 to 100; 0 is usual.",
        rich_help_panel=PACE,
    ),
]
Speculation = Annotated[
    bool | None,
    typer.Option(
        "--speculation/--no-speculation",
        help="Let tokens be proposed, several per step, or not. On where the server offers it.",
        show_default=False,
        rich_help_panel=PACE,
    ),
]
NumSpeculativeTokens = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens",
        help="How many are proposed per step; 0 for none. As many as pay otherwise.",
        rich_help_panel=PACE,
    ),
]

_FLAGS = {
    "sampling.allowed_token_ids": "--allow-token-id",
    "sampling.banned_token_ids": "--ban-token-id",
    "sampling.bad_words": "--bad-word",
    "stop.strings": "--stop",
    "stop.token_ids": "--stop-token-id",
    "output.skip_special_tokens": "--special-tokens",
    "constraint.choice.options": "--choice",
    "constraint.choice": "--choice",
    "speculation.enabled": "--speculation",
}
"""Flags that are not called like the protocol's field; `--top-p` is, of ``sampling.top_p``."""
_ARGUMENT_FIELDS = frozenset({"text", "token_ids", "prompt", "chat.messages", "chat"})
"""Fields that hold what a command's argument says."""
_ALIKE = (
    "sampling.(temperature|top_k|top_p|min_p|typical_p|seed|logit_bias|best_of)",
    "sampling.(frequency_penalty|presence_penalty|repetition_penalty)",
    "stop.(max_tokens|min_tokens|ignore_eos|include_stop)",
    "output.(logprobs|prompt_logprobs|echo)",
    "constraint.(json_schema|json_object|regex|grammar)",
    "speculation.num_speculative_tokens",
    "(n|model|time_limit|priority)",
)
_FIELD = re.compile(
    # A field stands before a colon that begins what is said of it; one with a dot may stand anywhere.
    r"(?<![\w.-])(?:(?P<path>[a-z_]+(?:\.[a-z_]+)+)(?:\[\d+\])?|(?:(?<=^)|(?<=; ))(?P<name>[a-z_]+)(?=: ))"
)
_ALIKE_FIELD = re.compile("|".join(pattern.replace(".", r"\.") for pattern in _ALIKE))


def default_max_tokens(min_tokens: int | None) -> int:
    """Most tokens of an answer for which nobody said how many."""
    return max(DEFAULT_MAX_TOKENS, min_tokens or 0)


def with_flags(message: str, argument: str = "PROMPT") -> str:
    """What a server says of a request's fields, in the words of the command line.

    Args:
        argument: what the command calls its argument.
    """

    def flag(found: re.Match[str]) -> str:
        field = (found["path"] or found["name"]).removesuffix(".ids")
        if field in _ARGUMENT_FIELDS:
            return argument
        if field in _FLAGS:
            return _FLAGS[field]
        if _ALIKE_FIELD.fullmatch(field):
            return "--" + field.rpartition(".")[2].replace("_", "-")
        return found[0]

    return _FIELD.sub(flag, message)


def text_or_file(given: str | None, option: str) -> str | None:
    """What was given, or what stands in the file that was named by ``@FILE``.

    Raises:
        typer.BadParameter: the file can't be read.
    """
    if given is None or not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{given[1:]!r} can't be read: {error}", param_hint=option) from None


def biases(given: list[str] | None) -> dict[int, float]:
    """The values of `LogitBias`.

    Raises:
        typer.BadParameter: one of them is not of the form ID=BIAS.
    """
    biased: dict[int, float] = {}
    for text in given or ():
        token_id, equals, bias = text.partition("=")
        try:
            if not equals:
                raise ValueError
            biased[int(token_id)] = float(bias)
        except ValueError:
            message = f"{text!r} is not of the form ID=BIAS, such as 42=-1.5"
            raise typer.BadParameter(message, param_hint="--logit-bias") from None
    return biased
