"""A conversation: it grows, survives errors, and Ctrl-C ends an answer and not the program."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from headrace.v1 import generation_pb2
from tests.support.fake_scripts import Accept, Say, Step, fails, says
from tests.support.fake_server import FakeServer, running_fake_server
from tests.support.programs import headrace_on_terminal, run_headrace


async def says_and_hangs(start: generation_pb2.StartGeneration) -> AsyncIterator[Step]:
    yield Accept()
    yield Say("half an answer")
    await asyncio.Event().wait()


def conversations(server: FakeServer) -> list[list[tuple[str, str]]]:
    """What the server was sent, message by message."""
    return [
        [(message.role, message.content) for message in start.chat.messages] for start in server.record.starts
    ]


async def test_the_conversation_grows() -> None:
    async with running_fake_server(says("Hello ", "you"), says("Fine")) as server:
        outcome = await run_headrace(
            "chat", "-t", server.target, "--system", "Be kind.", stdin="hi\nhow are you?\n"
        )
    assert outcome.status == 0
    assert "Hello you\n" in outcome.out
    assert conversations(server) == [
        [("system", "Be kind."), ("user", "hi")],
        [("system", "Be kind."), ("user", "hi"), ("assistant", "Hello you"), ("user", "how are you?")],
    ]


async def test_options_go_with_every_request() -> None:
    async with running_fake_server() as server:
        options = ("--temperature", "0", "-n", "3", "--priority", "7", "--speculation")
        number = ("--num-speculative-tokens", "4")
        await run_headrace("chat", "-t", server.target, *options, *number, stdin="a\nb\n")
    assert [(start.stop.max_tokens, start.sampling.temperature) for start in server.record.starts] == [
        (3, 0),
        (3, 0),
    ]
    assert all(start.sampling.HasField("temperature") for start in server.record.starts)
    wanted = generation_pb2.SpeculationOptions(enabled=True, num_speculative_tokens=4)
    assert [(start.priority, start.speculation) for start in server.record.starts] == [(7, wanted)] * 2


async def test_an_error_is_shown_and_the_conversation_goes_on_without_the_failed_turn() -> None:
    scripts = (says("one"), fails(grpc.StatusCode.INVALID_ARGUMENT, "prompt: too long"), says("three"))
    async with running_fake_server(*scripts) as server:
        outcome = await run_headrace("chat", "-t", server.target, stdin="a\nb\nc\n")
    assert outcome.status == 0
    assert "error: prompt: too long" in outcome.out
    assert "/clear" in outcome.out
    assert conversations(server)[2] == [("user", "a"), ("assistant", "one"), ("user", "c")]


async def test_commands() -> None:
    lines = "a\n/clear\nb\n/system Be brief.\nc\n/system\nd\n/history\n/help\n/nonsense\n\n/quit\nnever\n"
    async with running_fake_server(default=says("x")) as server:
        outcome = await run_headrace("chat", "-t", server.target, "--system", "Be kind.", stdin=lines)
    assert conversations(server) == [
        [("system", "Be kind."), ("user", "a")],
        [("system", "Be kind."), ("user", "b")],
        [("system", "Be brief."), ("user", "c")],
        [("user", "d")],
    ]
    assert "user> d\nassistant> x\n" in outcome.out
    assert "There is no command /nonsense" in outcome.out
    assert "/clear          forget the conversation" in outcome.out


async def test_an_answer_that_was_cut_off_says_why() -> None:
    async with running_fake_server() as server:
        outcome = await run_headrace("chat", "-t", server.target, "-n", "2", stdin="a b c d\n")
    assert "a b \n" in outcome.out
    assert "cut off: --max-tokens" in outcome.out


async def test_a_model_that_can_not_chat_is_refused_at_the_start() -> None:
    async with running_fake_server(has_chat_template=False) as server:
        outcome = await run_headrace("chat", "-t", server.target, stdin="hi\n")
    assert outcome.status == 2
    assert (
        outcome.err
        == "headrace: fake has no chat template, so it can't chat: use `headrace generate --raw`\n"
    )


async def test_ctrl_c_cancels_the_answer_and_ctrl_d_quits() -> None:
    async with (
        running_fake_server(says_and_hangs, says("whole")) as server,
        headrace_on_terminal("chat", "-t", server.target) as terminal,
    ):
        await terminal.until("you>")
        terminal.type("hi\n")
        await terminal.until("half an answer")
        terminal.type("\x03")
        await terminal.until("Cancelled.")
        await server.record.until(lambda record: len(record.cancelled) == 1)
        # At the prompt it gives up the line that is being typed, no more.
        await terminal.until("you>")
        terminal.type("never sent")
        await terminal.until("never sent")
        await terminal.press_until("\x03", "Ctrl-D quits.")
        await terminal.until("you>")
        terminal.type("again\n")
        await terminal.until("whole")
        await terminal.until("you>")
        terminal.type("\x04")
        assert await terminal.process.wait() == 0
    assert conversations(server)[1] == [("user", "hi"), ("assistant", "half an answer"), ("user", "again")]
