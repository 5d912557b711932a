from __future__ import annotations

import pytest

from headrace.clients.connection import ConnectionOptions
from headrace.service.limits import Limits, is_valid_request_id


@pytest.mark.parametrize("label", ["a", "x" * 128, "with space", "~!@#$%^&*()", "3f2504e0-4f89-11d3"])
def test_printable_ascii_is_a_label(label: str) -> None:
    assert is_valid_request_id(label)


@pytest.mark.parametrize("label", ["", "x" * 129, "a\n", "\n", "tab\t", "\x7f", "\x1b[0m", "é", "a" * 10**6])
def test_anything_else_is_none(label: str) -> None:
    assert not is_valid_request_id(label)


def test_a_client_of_ours_sends_and_takes_messages_as_long_as_the_server_does() -> None:
    assert ConnectionOptions().max_message_bytes == Limits().max_message_bytes == 16 * 2**20
