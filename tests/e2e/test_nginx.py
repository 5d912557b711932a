"""The README's nginx in front of real services."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.clients import InferenceClient, Tls
from tests.support.certificates import Authority
from tests.support.child_process import child_process
from tests.support.fake_runner import expected_output
from tests.support.repository import ROOT
from tests.support.service import PROMPT, running_service

NGINX = shutil.which("nginx")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed on this machine"),
]

MAIN = """
daemon off;
pid nginx.pid;
error_log error.log info;
events {}
http {
    access_log access.log;
    client_body_temp_path temp;
    proxy_temp_path temp;
    fastcgi_temp_path temp;
    uwsgi_temp_path temp;
    scgi_temp_path temp;
%s
}
"""


def the_example(addresses: list[str], folder: Path) -> str:
    """The README's part of a configuration, for these servers and a socket in `folder`."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```nginx\n(.*?)^```$", readme, flags=re.MULTILINE | re.DOTALL)
    for address in addresses:
        example, num_replaced = re.subn(r"server 10\.0\.0\.\d:50051;", f"server {address};", example, count=1)
        assert num_replaced == 1
    example, num_replaced = re.subn(r"listen 443 ", f"listen unix:{folder}/socket ", example)
    assert num_replaced == 1
    return example


@asynccontextmanager
async def running_nginx(addresses: list[str], folder: Path) -> AsyncIterator[str]:
    """nginx in front of some servers, with a certificate for localhost; its target."""
    (folder / "nginx.conf").write_text(MAIN % the_example(addresses, folder))
    assert NGINX is not None
    command = (NGINX, "-p", str(folder), "-c", "nginx.conf", "-e", "error.log")
    async with child_process(*command, stderr=asyncio.subprocess.PIPE, grace_s=10) as process:
        while not (folder / "socket").exists() and process.returncode is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert process.returncode is None, (await process.communicate())[1].decode()
        yield f"unix:{folder}/socket"


async def test_streams_and_sessions_pass_through_it_and_are_spread(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.issue("server")
    prompts = [[*PROMPT, i] for i in range(20)]
    wanted = [expected_output(prompt, 8) for prompt in prompts]
    async with (
        running_service() as one,
        running_service() as other,
        running_nginx([one.address, other.address], tmp_path) as target,
        InferenceClient(target, tls=Tls(ca=authority.cert, server_name="localhost")) as client,
    ):
        answers = [await client.generate_once(prompt, max_tokens=8, temperature=0) for prompt in prompts]
        assert [list(answer.token_ids) for answer in answers] == wanted
        async with client.session() as session:
            requests = [session.generate(prompt, max_tokens=8, temperature=0) for prompt in prompts]
            told = [await request.answer() for request in requests]
        assert [list(answer.token_ids) for answer in told] == wanted
        steps = [service.engine.load().totals.num_steps for service in (one, other)]
    assert min(steps) > 0
