"""What `--help` says of flags, whichever command they belong to."""

from __future__ import annotations

import pytest

from tests.support.programs import run_headrace


@pytest.mark.parametrize("command", ["", "generate", "tokenize", "top"])
async def test_no_type_stands_beside_a_flag(command: str) -> None:
    told = await run_headrace(*command.split(), "--help")
    assert told.status == 0
    assert "--tls " in told.out
    assert "--help " in told.out
    assert "bool" not in told.out
    # Of what takes a value it says which.
    assert "FILE" in told.out
