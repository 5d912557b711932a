"""Models, text and health over the wire; what the client asks of its caller."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import headrace.clients.client as client_module
from headrace.clients import (
    Chat,
    ChatMessage,
    DeadlineExceeded,
    InferenceClient,
    InvalidArgument,
    NotFound,
    RetryPolicy,
    ServingStatus,
    Unavailable,
)
from headrace.clients.events import Sampling
from tests.support.fake_server import running_fake_server


async def test_models_are_described() -> None:
    async with running_fake_server() as server, InferenceClient(server.target) as client:
        (model,) = await client.models()
    assert (model.name, model.max_sequence_length, model.end_token_ids) == ("fake", 128, (0,))
    assert model.bos_token_id is None
    assert model.default_sampling.temperature == 1.0
    assert model.default_sampling.seed is None


async def test_text_becomes_ids_and_ids_become_text() -> None:
    async with running_fake_server() as server, InferenceClient(server.target) as client:
        plain = await client.tokenize("hé")
        spelled = await client.tokenize("hé", with_tokens=True)
        assert (plain.token_ids, plain.tokens, plain.texts) == ((104, 233), (), ())
        assert (spelled.tokens, spelled.texts) == (("U+0068", "U+00E9"), ("h", "é"))
        assert await client.detokenize(plain.token_ids) == "hé"
        with pytest.raises(InvalidArgument):
            await client.detokenize([-1])


async def test_a_text_is_scored_by_its_characters_or_its_ids() -> None:
    async with running_fake_server() as server, InferenceClient(server.target) as client:
        by_text = await client.score("abc")
        by_ids = await client.score([97, 98, 99], num_context_tokens=2, logprobs=2, model="fake")
        with pytest.raises(InvalidArgument) as caught:
            await client.score([97, -1])
        with pytest.raises(InvalidArgument):
            await client.score("abc", logprobs=-1)
    assert [entry.chosen.token_id for entry in by_text.tokens] == [98, 99]
    assert by_text.log_likelihood == (-98 - 99) / 4
    assert [entry.chosen.token_id for entry in by_ids.tokens] == [99]
    assert [top.token_id for top in by_ids.tokens[0].top] == [0, 1]
    assert caught.value.violations[0].field == "text"


async def test_accepted_tells_every_sampling_value() -> None:
    async with running_fake_server() as server, InferenceClient(server.target) as client:
        answer = await client.generate_once(
            "hello",
            temperature=0.5,
            top_k=3,
            top_p=0.75,
            min_p=0.25,
            typical_p=0.5,
            seed=9,
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            repetition_penalty=1.5,
            logit_bias={7: 1.5, 5: -1.0},
            allowed_token_ids=[1, 2],
            banned_token_ids=[3],
            bad_words=["x"],
            best_of=1,
        )
        plain = await client.generate_once("hello")
    assert answer.accepted.sampling == Sampling(
        temperature=0.5,
        top_k=3,
        top_p=0.75,
        min_p=0.25,
        seed=9,
        typical_p=0.5,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias=((5, -1.0), (7, 1.5)),
        allowed_token_ids=(1, 2),
        banned_token_ids=(3,),
        bad_words=("x",),
        best_of=1,
    )
    assert plain.accepted.sampling == Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@pytest.mark.parametrize("wrap", [Chat, list], ids=["Chat", "messages"])
async def test_a_chat_is_rendered(wrap: type[Chat] | type[list[ChatMessage]]) -> None:
    chat = wrap([ChatMessage("system", "a"), ChatMessage("user", "b")])
    async with running_fake_server() as server, InferenceClient(server.target) as client:
        rendered = await client.apply_chat_template(chat)
    assert rendered.text == "<system>a<user>b"
    assert len(rendered.token_ids) == len(rendered.text)


async def test_health_tells_the_status_and_does_not_wait_for_a_better_one() -> None:
    async with running_fake_server() as server, InferenceClient(server.target) as client:
        assert await client.health() is ServingStatus.SERVING
        await server.set_serving(False)
        assert await client.health() is ServingStatus.NOT_SERVING
        with pytest.raises(NotFound):
            await client.health("no.such.Service")


async def test_health_of_nobody_is_unavailable() -> None:
    async with InferenceClient("127.0.0.1:1") as client:
        with pytest.raises(Unavailable):
            await client.health()


async def test_who_waits_asks_until_the_server_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_ASK_EVERY_S", 0.0)
    answers: list[Unavailable | ServingStatus] = [
        Unavailable("nobody"),
        ServingStatus.NOT_SERVING,
        ServingStatus.SERVING,
    ]

    async def health(self: InferenceClient, service: str = "", *, timeout_s: float) -> ServingStatus:
        assert service == "some.Service"
        answer = answers.pop(0)
        if isinstance(answer, Unavailable):
            raise answer
        return answer

    monkeypatch.setattr(InferenceClient, "health", health)
    async with InferenceClient("127.0.0.1:1") as client:
        assert await client.wait_until_serving("some.Service", timeout_s=60) is ServingStatus.SERVING
    assert answers == []


async def test_who_waits_for_a_server_that_says_nothing_waits_no_longer_than_was_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, answers_s = 100.0, list[float]()

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    async def health(self: InferenceClient, service: str = "", *, timeout_s: float) -> ServingStatus:
        answers_s.append(timeout_s)
        await sleep(timeout_s)
        raise DeadlineExceeded("not a word")

    loop = SimpleNamespace(time=lambda: now_s)
    monkeypatch.setattr(client_module, "asyncio", SimpleNamespace(get_running_loop=lambda: loop, sleep=sleep))
    monkeypatch.setattr(InferenceClient, "health", health)
    with pytest.raises(DeadlineExceeded):
        await InferenceClient("127.0.0.1:1").wait_until_serving(timeout_s=12)
    assert answers_s == [5.0, 5.0, 1.5]
    assert now_s == 112.0


async def test_when_the_time_is_over_the_last_answer_stands() -> None:
    async with running_fake_server() as server, InferenceClient(server.target) as client:
        await server.set_serving(False)
        assert await client.wait_until_serving(timeout_s=0) is ServingStatus.NOT_SERVING
        with pytest.raises(NotFound):
            await client.wait_until_serving("no.such.Service", timeout_s=60)
    async with InferenceClient("127.0.0.1:1") as client:
        with pytest.raises(Unavailable):
            await client.wait_until_serving(timeout_s=0.3)


async def test_a_client_that_is_not_open_says_how_to_open_it() -> None:
    client = InferenceClient("127.0.0.1:1", retry=RetryPolicy(max_attempts=1))
    with pytest.raises(RuntimeError, match="async with"):
        await client.models()
    async with client:
        with pytest.raises(RuntimeError, match="already"):
            await client.__aenter__()
    with pytest.raises(RuntimeError, match="async with"):
        client.generate("hello")


async def test_a_client_can_be_opened_again() -> None:
    async with running_fake_server() as server:
        client = InferenceClient(server.target)
        for _ in range(2):
            async with client:
                assert (await client.generate_once("hello")).text == "hello "
