"""A conversation in the terminal: `headrace chat`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

from rich.console import Console

from headrace.clients.client import InferenceClient
from headrace.clients.connection import ConnectionOptions
from headrace.clients.errors import HeadraceError, InvalidArgument, NotFound
from headrace.clients.events import Delta, Finished, FinishReason, Model
from headrace.clients.interrupts import Interrupted, interruptible
from headrace.clients.prompts import ChatMessage, RequestOptions

HELP = """\
/clear          forget the conversation, keep the system message
/system TEXT    set the system message and begin anew; without TEXT there is none
/history        show the conversation so far
/help           this
/quit           end, as Ctrl-D does
Ctrl-C cancels an answer; what it had said stays in the conversation."""


class Conversation:
    """What has been said so far."""

    def __init__(self, system: str | None) -> None:
        self.system = system
        self.turns: list[ChatMessage] = []

    def prompt(self, question: str) -> list[ChatMessage]:
        """The messages to send for a new question."""
        system = [ChatMessage("system", self.system)] if self.system else []
        return [*system, *self.turns, ChatMessage("user", question)]

    def add(self, question: str, answer: str) -> None:
        """Remember a question and its answer; without an answer, neither."""
        if answer.strip():
            self.turns += [ChatMessage("user", question), ChatMessage("assistant", answer)]


class ChatProgram:
    """Reads a line, streams the answer, and so on until the input ends.

    An error of a request is shown and the conversation goes on; only a server that can't be reached at the
    start, or that serves no model for chats, ends it.

    Args:
        target: where the server listens.
        options: what every request is asked with.
        system: system message of the conversation.
        connection: how the server is reached.
        read_line: asks for the next line; raises EOFError at the end of input, KeyboardInterrupt on Ctrl-C.
        console: where everything is shown.
    """

    def __init__(
        self,
        target: str,
        options: RequestOptions,
        *,
        system: str | None = None,
        connection: ConnectionOptions | None = None,
        read_line: Callable[[], str] | None = None,
        console: Console | None = None,
    ) -> None:
        self._target = target
        self._connection = connection
        self._options = options
        self._conversation = Conversation(system)
        self._console = console or Console(highlight=False)
        self._read_line = read_line or self._ask

    def run(self) -> None:
        """Talk until the input ends.

        Raises:
            HeadraceError: nobody answers at the start, or no model there can chat.
            Interrupted: Ctrl-C before the server has answered.
        """
        # One loop for all answers, run only while there is one: while a line is being typed the terminal
        # has the main thread, so that Ctrl-C at the prompt and Ctrl-C in an answer are two different things.
        with asyncio.Runner() as runner:
            resources = AsyncExitStack()
            try:
                client = runner.run(interruptible(self._open(resources)))
                while (line := self._next_line()) is not None:
                    if line.startswith("/"):
                        if not self._command(line):
                            break
                    elif line:
                        self._turn(runner, client, line)
            finally:
                runner.run(resources.aclose())

    async def _open(self, resources: AsyncExitStack) -> InferenceClient:
        client = await resources.enter_async_context(
            InferenceClient(self._target, connection=self._connection)
        )
        model = self._choose(await client.models())
        self._note(f"{model.name} at {self._target}. /help lists commands, Ctrl-D quits.")
        return client

    def _choose(self, models: tuple[Model, ...]) -> Model:
        wanted = self._options.get("model")
        for model in models:
            if wanted is None or model.name == wanted:
                if not model.has_chat_template:
                    raise InvalidArgument(
                        f"{model.name} has no chat template, so it can't chat: use `headrace generate --raw`"
                    )
                return model
        names = ", ".join(model.name for model in models)
        raise NotFound(f"no model is served under the name {wanted!r}; there is: {names}")

    def _next_line(self) -> str | None:
        while True:
            try:
                return self._read_line().strip()
            except EOFError:
                self._console.print()
                return None
            except KeyboardInterrupt:
                # The line being typed is given up, no more.
                self._console.print()
                self._note("Ctrl-D quits.")

    def _ask(self) -> str:
        if not sys.stdin.isatty():
            return input()
        # Gives input() editing and history; a global switch, so only where there is a terminal.
        import readline  # noqa: F401, PLC0415

        bold, plain = ("\x01\x1b[1m\x02", "\x01\x1b[0m\x02") if self._console.is_terminal else ("", "")
        return input(f"{bold}you>{plain} ")

    def _command(self, line: str) -> bool:
        """Obey a line that begins with a slash; whether to go on."""
        name, _, argument = line[1:].partition(" ")
        match name:
            case "quit" | "exit" | "q":
                return False
            case "clear":
                self._conversation = Conversation(self._conversation.system)
                self._note("The conversation is forgotten.")
            case "system":
                self._conversation = Conversation(argument.strip() or None)
                self._note(f"A new conversation, {'with' if argument else 'without'} a system message.")
            case "history":
                for message in self._conversation.turns:
                    self._console.print(f"{message.role}> {message.content}", markup=False)
            case "help":
                self._note(HELP)
            case _:
                self._note(f"There is no command /{name}. /help lists them.")
        return True

    def _turn(self, runner: asyncio.Runner, client: InferenceClient, question: str) -> None:
        said: list[str] = []
        try:
            # One more while the answer is being given up is no reason to give up the conversation.
            runner.run(interruptible(self._answer(client, question, said), ends_at_second=False))
        except Interrupted:
            self._console.print()
            self._note("Cancelled.")
        except HeadraceError as error:
            if said:
                self._console.print()
            self._show(error)
        self._conversation.add(question, "".join(said))

    async def _answer(self, client: InferenceClient, question: str, said: list[str]) -> None:
        """Stream an answer; `said` grows with it, so that a cancelled one is not lost."""
        started_s = time.monotonic()
        async with client.generate(self._conversation.prompt(question), **self._options) as generation:
            async for event in generation:
                match event:
                    case Delta(text=text):
                        said.append(text)
                        self._console.out(text, end="", highlight=False)
                        self._console.file.flush()
                    case Finished():
                        self._console.print()
                        self._note(_summary(event, time.monotonic() - started_s))

    def _show(self, error: HeadraceError) -> None:
        self._console.print(f"error: {error.message}", style="red", markup=False)
        if isinstance(error, InvalidArgument) and self._conversation.turns:
            self._note("If the conversation has become too long: /clear forgets it.")

    def _note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)


def _summary(finished: Finished, elapsed_s: float) -> str:
    usage = finished.usage
    rate = usage.num_completion_tokens / elapsed_s if elapsed_s > 0 else 0.0
    text = f"[{usage.num_prompt_tokens} + {usage.num_completion_tokens} tokens, {rate:.1f} tokens/s]"
    if finished.reason is FinishReason.LENGTH:
        text += " cut off: --max-tokens or the model's context is used up"
    elif finished.reason is FinishReason.TIME_LIMIT:
        text += " cut off by the time limit"
    return text
