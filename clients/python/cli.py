"""The `headrace` command. What a command needs is imported when it runs: `--help` must be quick."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from headrace.clients import bench_command, budget_command, cli_text, cli_watch, tune_command
from headrace.clients import cli_access as access
from headrace.clients import cli_options as opt
from headrace.clients.cli_help import PlainTyper
from headrace.clients.cli_outcome import (
    FAILED,
    USAGE,
    end_interrupted,
    fail,
    fail_with,
    hand_over,
    require_options,
    require_server,
    run,
)
from headrace.clients.targets import DEFAULT_TARGET

if TYPE_CHECKING:
    from headrace.clients.prompts import RequestOptions

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

app = PlainTyper(
    name="headrace",
    help="A large language model served over gRPC: start a server, or talk to one.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib import metadata  # noqa: PLC0415  a third of what `--help` takes

        typer.echo(f"headrace {metadata.version('headrace')}")
        raise typer.Exit


@app.callback()
def root(
    *,
    tls: access.UsesTls = False,
    tls_ca: access.TlsCaOrVariable = None,
    tls_cert: access.TlsCert = None,
    tls_key: access.TlsKey = None,
    tls_server_name: access.TlsServerName = None,
    token_file: access.TokenFile = None,
    token: access.Token = None,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """A large language model served over gRPC: start a server, or talk to one."""
    access.remember(access.Access(tls, tls_ca, tls_cert, tls_key, tls_server_name, token_file, token))


@app.command(context_settings=PASS_THROUGH, rich_help_panel="Serving")
def serve(context: typer.Context) -> None:
    """Serve a model. `headrace serve --help` lists every option. Needs the server extra."""
    require_server("serve")
    hand_over("serve", context.args)


@app.command(context_settings=PASS_THROUGH, rich_help_panel="Serving")
def pull(context: typer.Context) -> None:
    """Fetch a model into the cache folder: `headrace pull NAME`. Needs the server extra."""
    require_server("pull")
    hand_over("pull", context.args)


@app.command(context_settings=PASS_THROUGH, rich_help_panel="Serving")
def models(context: typer.Context) -> None:
    """List known models and those in the cache folder, with their sizes. Needs the server extra."""
    require_server("models")
    hand_over("models", context.args)


@app.command(context_settings=PASS_THROUGH, rich_help_panel="Serving")
def draft(context: typer.Context) -> None:
    """Make a draft model for a model: `headrace draft MODEL --out DIR`. Needs the server extra."""
    require_server("draft")
    hand_over("draft", context.args)


@app.command(context_settings=PASS_THROUGH, rich_help_panel="Serving")
def token(context: typer.Context) -> None:
    """Draw a bearer token for a client: `headrace token NAME --file FILE`."""
    hand_over("token", context.args)


@app.command(rich_help_panel="Talking to a server")
@access.reaching
def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The prompt; - takes standard input.")],
    *,
    target: opt.Target = DEFAULT_TARGET,
    model: opt.ModelName = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Send the prompt as a user's chat message, or as raw text to continue. "
            "Chat is the default where the model has a chat template.",
            show_default=False,
        ),
    ] = None,
    system: opt.System = None,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    min_p: opt.MinP = None,
    typical_p: opt.TypicalP = None,
    frequency_penalty: opt.FrequencyPenalty = None,
    presence_penalty: opt.PresencePenalty = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    logit_bias: opt.LogitBias = None,
    allow_token_id: opt.AllowedTokenIds = None,
    ban_token_id: opt.BannedTokenIds = None,
    bad_word: opt.BadWords = None,
    seed: opt.Seed = None,
    max_tokens: opt.MaxTokens = None,
    min_tokens: opt.MinTokens = None,
    stop: opt.Stop = None,
    include_stop: opt.IncludeStop = False,
    stop_token_id: opt.StopTokenIds = None,
    ignore_eos: opt.IgnoreEos = False,
    time_limit: opt.TimeLimit = None,
    priority: opt.Priority = None,
    speculation: opt.Speculation = None,
    num_speculative_tokens: opt.NumSpeculativeTokens = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="SECONDS", help="Fail when the answer is not complete by then."),
    ] = None,
    json_schema: opt.JsonSchema = None,
    json_object: opt.JsonAny = False,
    regex: opt.Regex = None,
    grammar: opt.Grammar = None,
    choice: opt.Choices = None,
    n: opt.NumSequences = None,
    best_of: opt.BestOf = None,
    logprobs: opt.Logprobs = None,
    prompt_logprobs: opt.PromptLogprobs = None,
    echo: opt.Echo = False,
    special_tokens: opt.SpecialTokens = False,
    as_json: opt.AsJson = False,
    stats: opt.Stats = False,
) -> None:
    """Send one prompt and print the answer as it is made."""
    options = _given(
        model=model,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=opt.biases(logit_bias),
        allowed_token_ids=allow_token_id,
        banned_token_ids=ban_token_id,
        bad_words=bad_word,
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=stop,
        include_stop=include_stop or None,
        stop_token_ids=stop_token_id,
        ignore_eos=ignore_eos or None,
        time_limit_s=time_limit,
        priority=priority,
        speculation=speculation,
        num_speculative_tokens=num_speculative_tokens,
        json_schema=opt.text_or_file(json_schema, "--json-schema"),
        json_object=json_object or None,
        regex=regex,
        grammar=opt.text_or_file(grammar, "--grammar"),
        choice=choice,
        n=n,
        best_of=best_of,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=echo or None,
        skip_special_tokens=False if special_tokens else None,
    )
    if chat is False and system is not None:
        fail("--system needs a chat: leave out --raw", USAGE)

    require_options(options)
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        fail("the prompt is empty: give a text, or - for the one that stands on standard input", USAGE)

    from headrace.clients import oneshot  # noqa: PLC0415

    question = oneshot.Question(
        text=text,
        is_chat=True if system is not None else chat,
        system=system,
        options=options,
        timeout_s=timeout,
    )
    run(oneshot.ask(target, question, access.connection(), as_json=as_json, with_stats=stats))


@app.command(rich_help_panel="Talking to a server")
@access.reaching
def chat(
    *,
    target: opt.Target = DEFAULT_TARGET,
    model: opt.ModelName = None,
    system: opt.System = None,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    min_p: opt.MinP = None,
    frequency_penalty: opt.FrequencyPenalty = None,
    presence_penalty: opt.PresencePenalty = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    seed: opt.Seed = None,
    max_tokens: opt.MaxTokens = None,
    min_tokens: opt.MinTokens = None,
    stop: opt.Stop = None,
    include_stop: opt.IncludeStop = False,
    stop_token_id: opt.StopTokenIds = None,
    ignore_eos: opt.IgnoreEos = False,
    time_limit: opt.TimeLimit = None,
    priority: opt.Priority = None,
    speculation: opt.Speculation = None,
    num_speculative_tokens: opt.NumSpeculativeTokens = None,
) -> None:
    """Talk to a model, turn by turn. Ctrl-C cancels an answer, Ctrl-D quits, /help lists commands."""
    options = _given(
        model=model,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        repetition_penalty=repetition_penalty,
        seed=seed,
        max_tokens=opt.default_max_tokens(min_tokens) if max_tokens is None else max_tokens,
        min_tokens=min_tokens,
        stop=stop,
        include_stop=include_stop or None,
        stop_token_ids=stop_token_id,
        ignore_eos=ignore_eos or None,
        time_limit_s=time_limit,
        priority=priority,
        speculation=speculation,
        num_speculative_tokens=num_speculative_tokens,
    )
    require_options(options)
    from headrace.clients.chat import ChatProgram  # noqa: PLC0415
    from headrace.clients.errors import HeadraceError  # noqa: PLC0415
    from headrace.clients.interrupts import Interrupted  # noqa: PLC0415

    try:
        ChatProgram(target, options, system=system, connection=access.connection()).run()
    except HeadraceError as error:
        fail_with(error)
    except Interrupted:
        end_interrupted()


@app.command(rich_help_panel="Talking to a server")
@access.reaching
def health(
    target: opt.Target = DEFAULT_TARGET,
    service: Annotated[
        str, typer.Option("--service", help="Full name of one gRPC service; the server as a whole otherwise.")
    ] = "",
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="Longest wait for an answer.")
    ] = 5.0,
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=0, help="Ask again for so long until it does.")
    ] = 0.0,
) -> None:
    """Print whether a server takes requests. Exit status: 0 if it does, 1 if not."""
    from headrace.clients.client import InferenceClient  # noqa: PLC0415
    from headrace.clients.events import ServingStatus  # noqa: PLC0415

    async def check() -> ServingStatus:
        async with InferenceClient(target, connection=access.connection()) as client:
            if wait:
                return await client.wait_until_serving(service, timeout_s=wait)
            return await client.health(service, timeout_s=timeout)

    status = run(check())
    typer.echo(status.value)
    if status is not ServingStatus.SERVING:
        raise typer.Exit(FAILED)


@app.command(rich_help_panel="Serving")
def demo(
    *,
    model: Annotated[
        str, typer.Option("--model", "-m", help="What to serve, as for `headrace serve --model`.")
    ] = "smollm2-135m-instruct",
    slots: Annotated[int, typer.Option("--slots", min=1, help="Most requests in one step.")] = 8,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Compute type, as for `headrace serve --dtype`.")
    ] = "auto",
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to this file as well.")
    ] = None,
) -> None:
    """Serve a model, send it twenty requests at once, and compare. Needs the server extra.

    The server batches anew at every step; then the same twenty run again in fixed batches.
    """
    require_server("demo")
    from headrace.clients.demo import DemoFailedError, run_demo  # noqa: PLC0415

    try:
        run(run_demo(model=model, num_slots=slots, dtype=dtype, json_path=json_path))
    except DemoFailedError as error:
        typer.echo(f"headrace: {error}", err=True)  # with the server's last lines, as they were
        raise typer.Exit(FAILED) from None


app.command(rich_help_panel="Talking to a server")(access.reaching(cli_text.tokenize))
app.command(rich_help_panel="Talking to a server")(access.reaching(cli_text.detokenize))
app.command(rich_help_panel="Watching a server")(access.reaching(cli_watch.top))
app.command(rich_help_panel="Watching a server")(access.reaching(cli_watch.timeline))
app.command(rich_help_panel="Watching a server")(access.reaching(budget_command.budget))
app.command(rich_help_panel="Measuring")(access.reaching(bench_command.bench))
app.command(rich_help_panel="Measuring")(access.reaching(tune_command.tune))


def main() -> None:
    """Entry point of the `headrace` command; typer turns Ctrl-C into status 130 and bears a closed pipe."""
    # Read by gRPC's core when it is loaded: what its own lines tell of, a command tells in one of ours.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    app()


def _given(**options: object) -> RequestOptions:
    """What was given, by the names of `RequestOptions`; the rest is the server's to decide."""
    return cast(
        "RequestOptions", {name: value for name, value in options.items() if value not in (None, [], {})}
    )


if __name__ == "__main__":
    main()
