"""The real program over a real (tiny) model: from a folder to tokens on the wire, or to a clear refusal."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from google.rpc import code_pb2
from grpc_health.v1.health_pb2 import HealthCheckResponse

from headrace.v1.generation_pb2 import (
    FINISH_REASON_STOP,
    ChatMessage,
    ChatPrompt,
    Choice,
    Constraint,
    GenerateOnceRequest,
    SamplingOptions,
    StartGeneration,
    StopOptions,
)
from tests.support.model_files import edited_json
from tests.support.programs import run_headrace
from tests.support.server_process import server_process
from tests.support.service import RawSession, ids_of, make_start, violated_fields
from tests.support.tiny_models import IM_END_ID, tiny_llama, tiny_tokenizer, write_tiny_llama

pytestmark = pytest.mark.slow

PROMPTS = (
    "The mill stands",
    "Water that runs past the wheel",
    "In 1847",
    "水車",
    "A keeper opens the gate. " * 4,
)
NUM_TOKENS = 24
SERVE = (sys.executable, "-m", "headrace.service", "serve")


def transformers_ids(prompt: tuple[int, ...]) -> list[int]:
    """What transformers makes of it, greedily."""
    model = tiny_llama()
    with torch.no_grad():
        made = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
        )
    return [int(token_id) for token_id in made[0, len(prompt) :]]


async def test_tokens_on_the_wire_are_those_of_transformers(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    tokenizer = tiny_tokenizer()
    flags = ("--model", str(folder), "--dtype", "float32", "--num-blocks", "64", "--block-size", "4")
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in PROMPTS]
    async with server_process("serve", tmp_path / "ready", *flags, module="headrace.service") as server:
        await server.until_health(HealthCheckResponse.SERVING)
        session = RawSession(server.generation)
        await session.start(
            *(make_start(f"ids {i}", prompt=p, max_tokens=NUM_TOKENS) for i, p in enumerate(prompts)),
            *(
                StartGeneration(
                    request_id=f"text {i}",
                    text=text,
                    sampling=make_start().sampling,
                    stop=StopOptions(max_tokens=NUM_TOKENS),
                )
                for i, text in enumerate(PROMPTS)
            ),
            make_start("foreign", prompt=(100_000,)),
        )
        await session.half_close()
        chat = await server.generation.GenerateOnce(
            GenerateOnceRequest(
                start=StartGeneration(
                    chat=ChatPrompt(messages=[ChatMessage(role="user", content="hi")]),
                    stop=StopOptions(max_tokens=4),
                )
            )
        )
        server.send(signal.SIGTERM)
        assert await server.exit_code() == 0
    for i, prompt in enumerate(prompts):
        expected = transformers_ids(prompt)
        for label in (f"ids {i}", f"text {i}"):
            events = session.events[label]
            assert ids_of(events) == expected
            text = "".join(event.delta.text for event in events)
            shown = [token_id for token_id in expected if token_id != IM_END_ID]
            assert text == tokenizer.decode(shown, skip_special_tokens=True)
    assert session.events["foreign"][-1].error.code == code_pb2.INVALID_ARGUMENT
    assert chat.accepted.prompt_tokens > 0


def _constrained(label: str, constraint: Constraint) -> StartGeneration:
    start = make_start(label, prompt=(5, 6, 7), max_tokens=48)
    start.sampling.CopyFrom(SamplingOptions(temperature=1.0, seed=len(label)))
    start.constraint.CopyFrom(constraint)
    return start


async def test_constraints_hold_on_the_wire_and_faulty_ones_hurt_only_their_sender(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    flags = ("--model", str(folder), "--dtype", "float32", "--num-blocks", "64", "--block-size", "4")
    faulty = {
        "regex": Constraint(regex="("),
        "json_schema": Constraint(json_schema='{"type": "nothing"}'),
        "grammar": Constraint(grammar="root ::= missing"),
    }
    async with server_process("serve", tmp_path / "ready", *flags, module="headrace.service") as server:
        await server.until_health(HealthCheckResponse.SERVING)
        session = RawSession(server.generation)
        await session.start(
            _constrained("choice", Constraint(choice=Choice(options=["mill", "weir"]))),
            _constrained("pattern", Constraint(regex="[0-9]{2}-[a-f]{3}")),
            _constrained("schema", Constraint(json_schema='{"enum": [17, "river"]}')),
            *(_constrained(f"faulty {kind}", constraint) for kind, constraint in faulty.items()),
            make_start("free", prompt=(5, 6, 7), max_tokens=NUM_TOKENS),
        )
        await session.half_close()
    text = {label: "".join(e.delta.text for e in events) for label, events in session.events.items()}
    assert text["choice"] in ("mill", "weir")
    assert re.fullmatch("[0-9]{2}-[a-f]{3}", text["pattern"])
    assert json.loads(text["schema"]) in (17, "river")
    for label in ("choice", "pattern", "schema"):
        assert session.events[label][-1].finished.reason == FINISH_REASON_STOP
    for kind in faulty:
        error = session.events[f"faulty {kind}"][-1].error
        assert error.code == code_pb2.INVALID_ARGUMENT
        assert violated_fields(error) == [f"constraint.{kind}"]
    assert ids_of(session.events["free"]) == transformers_ids((5, 6, 7))


@pytest.mark.parametrize(("flag", "told"), [("model", (0.5, 7, 0.25)), ("neutral", (1.0, 0, 1.0))])
async def test_what_the_model_suggests_applies_or_not_and_a_request_has_the_last_word(
    tmp_path: Path, flag: str, told: tuple[float, int, float]
) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    with edited_json(folder / "generation_config.json") as suggested:
        suggested.update(do_sample=True, temperature=0.5, top_k=7, top_p=0.25)
    flags = ("--model", str(folder), "--num-blocks", "64", "--generation-defaults", flag)
    open_start, own_start = (make_start(label, prompt=(5, 6), max_tokens=2) for label in ("open", "own"))
    open_start.ClearField("sampling")
    own_start.sampling.CopyFrom(SamplingOptions(temperature=0.75))
    async with server_process("serve", tmp_path / "ready", *flags, module="headrace.service") as server:
        await server.until_health(HealthCheckResponse.SERVING)
        left_open, own = [
            (await server.generation.GenerateOnce(GenerateOnceRequest(start=start))).accepted.sampling
            for start in (open_start, own_start)
        ]
    assert (left_open.temperature, left_open.top_k, left_open.top_p) == told
    assert (own.temperature, own.top_k, own.top_p) == (0.75, *told[1:])


def missing(folder: Path) -> None:
    shutil.rmtree(folder)


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def wrong_architecture(folder: Path) -> None:
    with edited_json(folder / "config.json") as config:
        config["architectures"], config["model_type"] = ["MysteryForCausalLM"], "mystery"


def truncated_shard(folder: Path) -> None:
    shard = min(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1000])


DAMAGES = (missing, empty, wrong_architecture, truncated_shard)


async def test_a_folder_that_cannot_be_served_is_one_clear_line_and_exit_code_two(tmp_path: Path) -> None:
    whole = write_tiny_llama(tmp_path / "whole", max_shard_size="100KB")

    async def refusal(number: int) -> str:
        folder = tmp_path / f"folder-{number}"
        shutil.copytree(whole, folder)
        DAMAGES[number](folder)
        flags = ("--port", "0", "--control-port", "0", "--log-format", "json")
        outcome = await run_headrace("--model", str(folder), *flags, program=SERVE)
        lines = outcome.err.splitlines()
        assert outcome.status == 2, lines
        assert "Traceback" not in outcome.err
        assert not any('"ready"' in line for line in lines)
        assert lines[-1].startswith("headrace: ")
        assert str(folder) in lines[-1]
        return lines[-1]

    told = [await refusal(number) for number in range(len(DAMAGES))]
    assert "config.json" in told[1]
    assert "ystery" in told[2]
    assert ".safetensors" in told[3]
