"""`headrace tokenize` and `headrace detokenize` as their users run them."""

from __future__ import annotations

import json

from headrace.service.limits import Limits
from tests.support.fake_server import running_fake_server
from tests.support.programs import run_headrace
from tests.support.service import running_service


async def test_a_text_becomes_ids_and_ids_a_text() -> None:
    async with running_fake_server() as server:
        ids = await run_headrace("tokenize", "hé", "-t", server.target)
        piped = await run_headrace("tokenize", "-", "-t", server.target, stdin="hé")
        spelt = await run_headrace("tokenize", "hé", "-t", server.target, "--tokens")
        whole = await run_headrace("tokenize", "hé", "-t", server.target, "--json")
        text = await run_headrace("detokenize", "104", "233", "-t", server.target)
        as_json = await run_headrace("detokenize", "104", "233", "-t", server.target, "--json")
    assert (ids.status, ids.out, ids.err) == (0, "104 233\n", "")
    assert piped.out == ids.out
    assert spelt.out == '     104  "h"\n     233  "é"\n'
    assert json.loads(whole.out) == {
        "token_ids": [104, 233],
        "tokens": ["U+0068", "U+00E9"],
        "texts": ["h", "é"],
    }
    assert (text.out, json.loads(as_json.out)) == ("hé\n", {"text": "hé"})


async def test_what_is_no_id_is_refused() -> None:
    word = await run_headrace("detokenize", "mill", "-t", "127.0.0.1:1")
    negative = await run_headrace("detokenize", "-t", "127.0.0.1:1", "--", "-1")
    large = await run_headrace("detokenize", "99999999999", "-t", "127.0.0.1:1")
    assert (word.status, negative.status, large.status) == (2, 2, 2)
    assert word.err == "headrace: 'mill' is no token id: use numbers such as 504 2365\n"
    assert "'-1' is no token id" in negative.err
    assert "must be token ids: Value out of range: 99999999999" in large.err


async def test_an_id_that_the_model_does_not_have_is_called_an_id() -> None:
    async with running_service() as service:
        foreign = await run_headrace("detokenize", "104", "70000", "-t", service.address)
    assert foreign.status == 2
    assert foreign.err.startswith("headrace: ID: must be from 0 to ")


async def test_a_text_that_is_refused_is_called_a_text() -> None:
    async with running_service(limits=Limits(max_text_bytes=3)) as service:
        long = await run_headrace("tokenize", "four", "-t", service.address)
    assert long.status == 2
    assert long.err.startswith("headrace: TEXT: ")
