from __future__ import annotations

import pytest

from headrace.clients.cli_options import with_flags


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("sampling.top_p: must be above 0, got 0", "--top-p: must be above 0, got 0"),
        (
            "n: must be from 1 to 128; time_limit: too long",
            "--n: must be from 1 to 128; --time-limit: too long",
        ),
        (
            "output.logprobs: too many, or set stop.max_tokens lower",
            "--logprobs: too many, or set --max-tokens lower",
        ),
        ("sampling.banned_token_ids: too many ids", "--ban-token-id: too many ids"),
        (
            "speculation.num_speculative_tokens: must be at most 8; speculation.enabled: leave it out",
            "--num-speculative-tokens: must be at most 8; --speculation: leave it out",
        ),
        ("constraint.choice.options[3]: is empty", "--choice: is empty"),
        ("text: must be at most 5 bytes", "PROMPT: must be at most 5 bytes"),
        # What has no flag, and what is no field, stays as it is.
        ("cache.salt: must be at most 256 characters", "cache.salt: must be at most 256 characters"),
        ("no such file: model: x at 127.0.0.1:1", "no such file: model: x at 127.0.0.1:1"),
    ],
)
def test_fields_are_told_as_flags(said: str, told: str) -> None:
    assert with_flags(said) == told
