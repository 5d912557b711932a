"""The command as its users run it: a program with arguments, output and an exit status."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import grpc
import pytest

from headrace.v1 import generation_pb2
from tests.support.fake_scripts import bad_request, echo_once, fails, says, says_and_hangs
from tests.support.fake_server import running_fake_server
from tests.support.programs import HEADRACE, headrace_on_pipes, headrace_on_terminal, run_headrace
from tests.support.service import running_service

COMMANDS = ("generate", "chat", "health", "demo", "bench", "tune")
NOBODY = "127.0.0.1:1"

HELP_AND_LIST_MODULES = """
import sys, headrace.clients.cli as cli
try:
    cli.app(["--help"])
except SystemExit:
    print([name for name in ("grpc", "google.protobuf", "torch") if name in sys.modules])
"""


def is_one_clear_line(text: str) -> bool:
    """An error as a person wants it."""
    return text.startswith("headrace: ") and text.count("\n") == 1 and "Traceback" not in text


async def test_help_lists_every_command_and_needs_no_grpc() -> None:
    outcome = await run_headrace("--help")
    assert outcome.status == 0
    for command in ("serve", "pull", *COMMANDS):
        assert f" {command} " in outcome.out
    loaded = await run_headrace(
        program=(
            sys.executable,
            "-c",
            HELP_AND_LIST_MODULES,
        )
    )
    assert loaded.out.endswith("[]\n")


@pytest.mark.parametrize("command", COMMANDS)
async def test_each_command_explains_every_option(command: str) -> None:
    outcome = await run_headrace(command, "--help")
    assert outcome.status == 0
    options = [line for line in outcome.out.splitlines() if line.startswith("│ -")]
    assert options
    for line in options:
        assert line.rstrip("│ ").rpartition("  ")[2].strip(), f"no explanation: {line}"


async def test_version_is_printed() -> None:
    outcome = await run_headrace("--version")
    assert outcome.out.startswith("headrace 0.")


async def test_health_is_an_exit_status() -> None:
    async with running_fake_server() as server:
        good = await run_headrace("health", "--target", server.target)
        await server.set_serving(False)
        bad = await run_headrace("health", "--target", server.target)
        unknown = await run_headrace("health", "--target", server.target, "--service", "no.such")
        still_bad = await run_headrace("health", "--target", server.target, "--wait", "0.3")
        await server.set_serving(True)
        good_now = await run_headrace("health", "--target", server.target, "--wait", "60")
    assert (still_bad.status, still_bad.out) == (1, "NOT_SERVING\n")
    assert (good_now.status, good_now.out) == (0, "SERVING\n")
    nobody = await run_headrace("health", "--target", NOBODY)
    assert (good.status, good.out) == (0, "SERVING\n")
    assert (bad.status, bad.out) == (1, "NOT_SERVING\n")
    assert unknown.status == 1
    assert nobody.status == 1
    assert is_one_clear_line(nobody.err)
    assert "headrace serve" in nobody.err


async def test_generate_prints_the_answer_and_nothing_else() -> None:
    async with running_fake_server() as server:
        outcome = await run_headrace("generate", "to be or", "-t", server.target, "--max-tokens", "4")
    assert (outcome.status, outcome.out, outcome.err) == (0, "to be or to \n", "")


async def test_an_answer_that_comes_to_no_end_is_cut_off_and_said_to_be() -> None:
    async with running_fake_server() as server:
        at = ("-t", server.target, "--raw")
        endless = await run_headrace("generate", "to be or", *at)
        few_at_least = await run_headrace("generate", "to be or", *at, "--min-tokens", "600")
        too_few = await run_headrace("generate", "to be or", *at, "--max-tokens", "512")
    assert len(endless.out.split()) == 512
    assert endless.err == "cut off after 512 tokens: --max-tokens lets it make more\n"
    assert len(few_at_least.out.split()) == 600
    assert few_at_least.err == "cut off after 600 tokens: --max-tokens lets it make more\n"
    assert (len(too_few.out.split()), too_few.err) == (512, "")


async def test_an_answer_ends_with_the_context_where_the_usual_most_tokens_do_not_fit() -> None:
    async with running_service() as service:
        at = ("-t", service.address, "--raw")
        whole = await run_headrace("generate", "hello", *at, "--ignore-eos", "--json")
        asked = await run_headrace("generate", "hello", *at, "--max-tokens", "512")
    usage = json.loads(whole.out)["usage"]
    assert usage["num_prompt_tokens"] + usage["num_completion_tokens"] == 128
    assert (asked.status, "--max-tokens: 6 prompt tokens and 512 to make" in asked.err) == (2, True)


async def test_generate_chats_where_the_model_can_and_otherwise_continues_text() -> None:
    async with running_fake_server() as server:
        await run_headrace("generate", "hi", "-t", server.target)
        await run_headrace("generate", "hi", "-t", server.target, "--raw")
        await run_headrace("generate", "hi", "-t", server.target, "--system", "Be brief.")
    async with running_fake_server(has_chat_template=False) as base:
        await run_headrace("generate", "hi", "-t", base.target)
    kinds = [start.WhichOneof("prompt") for start in server.record.starts + base.record.starts]
    assert kinds == ["chat", "text", "chat", "text"]
    assert [message.role for message in server.record.starts[2].chat.messages] == ["system", "user"]


async def test_generate_sends_what_was_given_and_no_more() -> None:
    async with running_fake_server() as server:
        await run_headrace("generate", "hi", "-t", server.target, "--raw")
        everything = (
            "--max-tokens 5 --temperature 0.5 --top-k 3 --top-p 0.75 --min-p 0.25 --seed 18446744073709551615"
            " --frequency-penalty 0.5 --presence-penalty -0.5 --repetition-penalty 1.5 --min-tokens 1"
            " --typical-p 0.5 --logit-bias 5=-1.5 --logit-bias 7=2 --allow-token-id 5 --allow-token-id 7"
            " --ban-token-id 9 --bad-word foo --bad-word bar --n 2 --best-of 3 --logprobs 0"
            " --prompt-logprobs 2 --echo"
            " --stop END --stop FIN --include-stop --stop-token-id 4 --stop-token-id 5 --ignore-eos"
            " --time-limit 2.5 --special-tokens --model fake --priority -3 --no-speculation"
            " --num-speculative-tokens 0"
        )
        await run_headrace("generate", "hi", "-t", server.target, "--raw", *everything.split())
    nothing, all_given = server.record.starts
    nothing.ClearField("request_id")
    all_given.ClearField("request_id")
    # An answer without an end would have as many as the context holds.
    few = generation_pb2.StopOptions(max_tokens=512)
    assert nothing == generation_pb2.StartGeneration(text="hi", stop=few)
    expected = generation_pb2.StartGeneration(
        text="hi",
        model="fake",
        sampling=generation_pb2.SamplingOptions(
            temperature=0.5,
            top_k=3,
            top_p=0.75,
            min_p=0.25,
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            repetition_penalty=1.5,
            seed=2**64 - 1,
            typical_p=0.5,
            logit_bias={5: -1.5, 7: 2.0},
            allowed_token_ids=generation_pb2.TokenIds(ids=[5, 7]),
            banned_token_ids=generation_pb2.TokenIds(ids=[9]),
            bad_words=["foo", "bar"],
            best_of=3,
        ),
        stop=generation_pb2.StopOptions(
            max_tokens=5,
            min_tokens=1,
            strings=["END", "FIN"],
            include_stop=True,
            token_ids=[4, 5],
            ignore_eos=True,
        ),
        output=generation_pb2.OutputOptions(
            skip_special_tokens=False, logprobs=0, prompt_logprobs=2, echo=True
        ),
        n=2,
        priority=-3,
        speculation=generation_pb2.SpeculationOptions(enabled=False, num_speculative_tokens=0),
    )
    expected.time_limit.FromMilliseconds(2500)
    assert all_given == expected


async def test_generate_asks_for_the_form_that_is_given_here_or_in_a_file(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    forms = (
        ("--json-schema", f"@{schema}"),
        ("--json-schema", '{"type": "array"}'),
        ("--json-object",),
        ("--regex", "[0-9]+"),
        ("--grammar", 'root ::= "a"'),
        ("--choice", "yes", "--choice", "no"),
    )
    async with running_fake_server() as server:
        for form in forms:
            await run_headrace("generate", "hi", "-t", server.target, "--raw", *form)
        missing = await run_headrace("generate", "hi", "-t", server.target, "--grammar", "@no-such-file")
        both = await run_headrace("generate", "hi", "-t", server.target, "--regex", "a", "--choice", "a")
    assert [start.constraint for start in server.record.starts] == [
        generation_pb2.Constraint(json_schema='{"type": "object"}'),
        generation_pb2.Constraint(json_schema='{"type": "array"}'),
        generation_pb2.Constraint(json_object=True),
        generation_pb2.Constraint(regex="[0-9]+"),
        generation_pb2.Constraint(grammar='root ::= "a"'),
        generation_pb2.Constraint(choice=generation_pb2.Choice(options=["yes", "no"])),
    ]
    assert (missing.status, both.status) == (2, 2)
    assert "no-such-file" in missing.err
    assert "one thing only" in both.err


async def test_generate_reads_a_prompt_from_standard_input() -> None:
    async with running_fake_server(default=echo_once) as server:
        outcome = await run_headrace("generate", "-", "-t", server.target, "--raw", stdin="from a pipe\n")
    assert outcome.out == "from a pipe \n"


async def test_generate_as_json_is_one_object() -> None:
    async with running_fake_server(default=echo_once) as server:
        outcome = await run_headrace("generate", "to be", "-t", server.target, "--json", "--seed", "7")
    answer = json.loads(outcome.out)
    assert (answer["text"], answer["token_ids"], answer["finish_reason"]) == ("to be ", [0, 1], "stop")
    assert answer["sampling"]["seed"] == 7
    assert answer["usage"]["num_completion_tokens"] == 2


async def test_several_answers_are_printed_one_after_the_other() -> None:
    async with running_fake_server(default=echo_once) as server:
        outcome = await run_headrace("generate", "to be or", "-t", server.target, "--n", "3", "--stats")
    assert outcome.out == (
        "--- 1 of 3 ---\nto be or \n--- 2 of 3 ---\nbe or to \n--- 3 of 3 ---\nor to be \n"
    )
    assert outcome.err.count("3 prompt tokens, 3 tokens in") == 3


async def test_several_answers_are_one_json_object() -> None:
    async with running_fake_server(default=echo_once) as server:
        outcome = await run_headrace(
            "generate", "to be", "-t", server.target, "--json", "--n", "2", "--logprobs", "1"
        )
    answer = json.loads(outcome.out)
    assert answer["text"] == "to be "
    assert [completion["text"] for completion in answer["completions"]] == ["to be ", "be to "]
    assert [completion["index"] for completion in answer["completions"]] == [0, 1]
    first, second = answer["completions"][1]["logprobs"]
    assert (first["token_id"], first["logprob"], second["rank"]) == (0, 0.0, 2)
    assert [top["text"] for top in second["top"]] == ["#0"]


async def test_logprobs_are_a_table_below_the_answer() -> None:
    async with running_fake_server(default=echo_once) as server:
        outcome = await run_headrace(
            "generate", "to be", "-t", server.target, "--logprobs", "1", "--prompt-logprobs", "0"
        )
    lines = [line.split() for line in outcome.out.splitlines()]
    assert lines == [
        ["to", "be"],
        ["prompt", "logprob", "rank"],
        ['"#1"', "-0.250", "2"],
        ["answer", "logprob", "rank", "likeliest"],
        ['"#0"', "0.000", "1", '"#0"', "0.000"],
        ['"#1"', "-0.250", "2", '"#0"', "0.000"],
    ]


async def test_generate_tells_figures_on_standard_error_when_asked() -> None:
    async with running_fake_server(default=echo_once) as server:
        outcome = await run_headrace("generate", "to be", "-t", server.target, "--stats", "--seed", "7")
    assert outcome.out == "to be \n"
    assert "2 prompt tokens, 2 tokens in" in outcome.err
    assert "ended by stop, temperature 0, seed 7" in outcome.err
    assert "drafts" not in outcome.err


async def test_the_address_may_stand_in_a_variable_and_a_flag_wins() -> None:
    async with running_fake_server(default=echo_once) as server:
        there, nowhere = {"HEADRACE_TARGET": server.target}, {"HEADRACE_TARGET": NOBODY}
        by_variable = await run_headrace("generate", "hi", environment=there)
        by_flag = await run_headrace("health", "-t", server.target, environment=nowhere)
        lost = await run_headrace("health", environment=nowhere)
    lost_operator = await run_headrace("budget", environment={"HEADRACE_CONTROL_TARGET": NOBODY})
    assert (by_variable.status, by_variable.out) == (0, "hi \n")
    assert (by_flag.status, by_flag.out) == (0, "SERVING\n")
    assert (lost.status, lost_operator.status) == (1, 1)
    assert NOBODY in lost.err
    assert NOBODY in lost_operator.err


async def test_a_refusal_is_one_line_that_names_the_fault() -> None:
    refusal = fails(
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.top_p: must be above 0,\ngot 0",
        bad_request(sampling__top_p="x"),
    )
    async with running_fake_server(default=refusal) as server:
        outcome = await run_headrace("generate", "hi", "-t", server.target, "--top-p", "0.5")
    assert outcome.status == 2
    assert outcome.err == "headrace: --top-p: must be above 0, got 0\n"


async def test_a_servers_fault_is_one_line_and_another_status() -> None:
    async with running_fake_server(default=fails(grpc.StatusCode.INTERNAL, "the model failed")) as server:
        outcome = await run_headrace("generate", "hi", "-t", server.target)
    assert (outcome.status, outcome.err) == (1, "headrace: the model failed\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("generate", "hi", "--raw", "--seed", "-1"), "--seed: "),
        (("generate", "hi", "--raw", "--system", "x"), "--system needs a chat"),
        (("generate", "hi", "--max-tokens", "many"), "valid integer"),
        (("generate", "hi", "--logit-bias", "5"), "'5' is not of the form ID=BIAS"),
        (("generate", "hi", "--logit-bias", "x=1"), "--logit-bias"),
        (("generate", "hi", "--raw", "--logit-bias", "-5=1"), "--logit-bias: "),
        (("generate", ""), "the prompt is empty"),
        (("generate", "hi", "-t", "127.0.0.1"), "'127.0.0.1' is no host with a port: write 127.0.0.1:50051"),
        (("top", "-t", "::1"), "write [::1]:50051"),
        (("generate",), "Missing argument"),
        (("generate", "hi", "--modle", "x"), "--modle"),
        (("nonsense",), "nonsense"),
    ],
    ids=str,
)
async def test_a_wrong_command_line_is_said_without_a_traceback(
    arguments: tuple[str, ...], said: str
) -> None:
    outcome = await run_headrace(*arguments)
    assert outcome.status == 2
    assert said in outcome.err
    assert "Traceback" not in outcome.err


async def test_a_model_that_is_not_served_is_named_beside_those_that_are() -> None:
    async with running_fake_server() as server:
        outcome = await run_headrace("generate", "hi", "-t", server.target, "--model", "other")
    assert outcome.status == 1
    assert "'other'; there is: fake" in outcome.err


@pytest.mark.parametrize("command", [("generate", "hi"), ("chat",)], ids=str)
async def test_nobody_there_is_one_line(command: tuple[str, ...]) -> None:
    outcome = await run_headrace(*command, "-t", NOBODY)
    assert outcome.status == 1
    assert is_one_clear_line(outcome.err)


async def test_ctrl_c_ends_generate_and_cancels_the_request() -> None:
    async with running_fake_server(says_and_hangs) as server:
        async with headrace_on_pipes("generate", "hi", "-t", server.target) as process:
            assert process.stdout is not None
            assert await process.stdout.readexactly(3) == b"one"
            process.send_signal(signal.SIGINT)
            _, err = await process.communicate()
        await server.record.until(lambda record: len(record.cancelled) == 1)
    assert process.returncode == 130
    assert b"Traceback" not in err


async def test_an_impatient_ctrl_c_ends_generate_without_a_word_below_the_answer() -> None:
    async with (
        running_fake_server(says_and_hangs) as server,
        headrace_on_terminal("generate", "hi", "-t", server.target) as terminal,
    ):
        await terminal.until("one")
        terminal.type("\x03\x03\x03")
        assert await asyncio.wait_for(terminal.process.wait(), 60) == 130
        await terminal.until("^C")
    assert "Traceback" not in terminal.seen
    assert "Error" not in terminal.seen


async def test_after_ctrl_c_the_shells_prompt_stands_in_a_line_of_its_own() -> None:
    async with (
        running_fake_server(says_and_hangs) as server,
        headrace_on_terminal("generate", "hi", "-t", server.target) as terminal,
    ):
        await terminal.until("one")
        terminal.type("\x03")
        await terminal.until("^C\r\n")
        assert await asyncio.wait_for(terminal.process.wait(), 60) == 130


async def test_a_reader_that_goes_away_ends_generate_quietly() -> None:
    async with running_fake_server(default=says(*["word "] * 20_000)) as server:
        line = f"{' '.join(HEADRACE)} generate hi -t {server.target} | head -c 5"
        outcome = await run_headrace(program=("/bin/bash", "-c", line))
    assert (outcome.out, outcome.err) == ("word ", "")
