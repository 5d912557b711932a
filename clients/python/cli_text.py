"""The commands that show how a model cuts text: `headrace tokenize` and `headrace detokenize`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.clients import cli_access as access
from headrace.clients import cli_options as opt
from headrace.clients.cli_outcome import USAGE, fail, run
from headrace.clients.targets import DEFAULT_TARGET

if TYPE_CHECKING:
    from headrace.clients.events import Tokenization

AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON object.")]


def tokenize(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The text; - reads it from standard input.")],
    *,
    target: opt.Target = DEFAULT_TARGET,
    model: opt.ModelName = None,
    tokens: Annotated[
        bool,
        typer.Option("--tokens", help="A line for each token: its id and its text."),
    ] = False,
    special_tokens: Annotated[
        bool,
        typer.Option(
            "--special-tokens/--no-special-tokens",
            help="Add the special tokens that the model's tokenizer adds to raw text.",
        ),
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Print the token ids of a text, as a server's model reads it."""
    from headrace.clients.client import InferenceClient  # noqa: PLC0415

    whole = sys.stdin.read() if text == "-" else text

    async def ask() -> Tokenization:
        async with InferenceClient(target, connection=access.connection()) as client:
            return await client.tokenize(
                whole,
                model=model or "",
                add_special_tokens=special_tokens,
                with_tokens=tokens or as_json,
            )

    told = run(ask(), argument="TEXT")
    if as_json:
        whole_answer = {"token_ids": told.token_ids, "tokens": told.tokens, "texts": told.texts}
        typer.echo(json.dumps(whole_answer, ensure_ascii=False))
    elif tokens:
        for token_id, token in zip(told.token_ids, told.texts, strict=True):
            typer.echo(f"{token_id:8}  {json.dumps(token, ensure_ascii=False)}")
    else:
        typer.echo(" ".join(map(str, told.token_ids)))


def detokenize(
    token_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Token ids.")],
    *,
    target: opt.Target = DEFAULT_TARGET,
    model: opt.ModelName = None,
    special_tokens: Annotated[
        bool, typer.Option("--special-tokens", help="Leave special tokens in the text.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the text of token ids: `headrace detokenize 504 2365`."""
    foreign = [word for word in token_ids if not (word.isascii() and word.isdecimal())]
    if foreign:
        fail(f"{foreign[0]!r} is no token id: use numbers such as 504 2365", USAGE)
    ids = [int(word) for word in token_ids]

    from headrace.clients.client import InferenceClient  # noqa: PLC0415

    async def ask() -> str:
        async with InferenceClient(target, connection=access.connection()) as client:
            return await client.detokenize(ids, model=model or "", skip_special_tokens=not special_tokens)

    text = run(ask(), argument="ID")
    typer.echo(json.dumps({"text": text}, ensure_ascii=False) if as_json else text)
