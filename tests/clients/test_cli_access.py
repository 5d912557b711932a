"""How the command line reaches a server that does not let everybody in."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.clients import InvalidArgument
from headrace.clients.connection import ConnectionOptions, Tls, open_channel
from headrace.service.auth import AuthRules
from headrace.service.identity import Role
from headrace.service.server import Entrance
from headrace.service.tls import TlsFiles, server_credentials
from headrace.service.token_drawing import entry_line
from tests.support.certificates import Authority
from tests.support.programs import run_headrace
from tests.support.service import running_service

TOKEN = "hr_the-right-token"


async def test_a_token_and_an_authority_open_an_encrypted_port(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server, own = authority.issue("server"), authority.issue("own")
    tokens, mine = tmp_path / "tokens", tmp_path / "mine"
    tokens.write_text(entry_line("alice", TOKEN, frozenset({Role.GENERATE})))
    mine.write_text(TOKEN + "\n")
    entrance = Entrance.guarded(
        AuthRules(Role.GENERATE, tokens, certificate_roles=frozenset(), health_is_open=False),
        TlsFiles(server.cert, server.key, authority.cert),
    )
    reach = ("--tls-ca", str(authority.cert), "--tls-cert", str(own.cert), "--tls-key", str(own.key))
    async with running_service(entrance=entrance) as service:
        asked = ("generate", "to be", "--raw", "-n", "3", "-t", service.address)
        good = await run_headrace(*reach, "--token-file", str(mine), *asked)
        assert (good.status, good.err) == (0, "")
        behind = await run_headrace(*asked, *reach, "--token-file", str(mine))
        assert (behind.status, behind.err) == (0, "")
        wrong = str(tmp_path / "wrong")
        overruled = await run_headrace(
            "--tls-ca", wrong, *reach[2:], *asked, *reach[:2], "--token-file", str(mine)
        )
        assert (overruled.status, overruled.err) == (0, "")
        refused = await run_headrace(*reach, *asked)
        assert refused.status == 1
        assert "authorization: Bearer" in refused.err
        assert "--token-file FILE or HEADRACE_TOKEN" in refused.err
        checked = await run_headrace(
            *reach, "health", "-t", service.address, "--timeout", "20", environment={"HEADRACE_TOKEN": TOKEN}
        )
        assert (checked.status, checked.out) == (0, "SERVING\n")


async def test_who_comes_to_a_port_in_the_wrong_way_is_told_the_right_one(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    server = authority.issue("server")
    entrance = Entrance(credentials=server_credentials(TlsFiles(server.cert, server.key, None)))
    asked = ("generate", "to be", "-t")
    async with running_service(entrance=entrance) as service:
        plain = await run_headrace(*asked, service.address)
        strange = await run_headrace("--tls-ca", str(stranger.cert), *asked, service.address)
        talkative = await run_headrace(
            *("--tls-ca", str(stranger.cert), *asked, service.address),
            environment={"GRPC_VERBOSITY": "INFO"},
        )
    async with running_service() as service:
        encrypted = await run_headrace("--tls-ca", str(authority.cert), *asked, service.address)
        operators = await run_headrace("budget", "-t", service.address)
    assert "wants --tls or --tls-ca" in plain.err
    assert "--tls-ca the authority of its certificate?" in strange.err
    assert "speaks no TLS" in encrypted.err
    # gRPC's core would tell of it in lines of its own, and does where it was told to.
    assert strange.err.count("\n") == 1
    assert talkative.err.count("\n") > 1
    assert "--control-port" in operators.err
    assert "Method not found" not in operators.err


async def test_the_servers_file_of_hashes_is_no_token(tmp_path: Path) -> None:
    hashes = tmp_path / "tokens"
    hashes.write_text("alice:sha256$00:generate\n", encoding="utf-8")
    outcome = await run_headrace("--token-file", str(hashes), "health", "-t", "127.0.0.1:1")
    assert outcome.status == 2
    assert outcome.err.startswith(f"headrace: --token-file {hashes}: holds hashes")


async def test_what_can_not_be_used_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="could be read by others"):
        open_channel("example.com:1", None, ConnectionOptions(token=TOKEN))
    with pytest.raises(InvalidArgument, match="belong together"):
        open_channel("127.0.0.1:1", None, ConnectionOptions(tls=Tls(cert=tmp_path / "x")))
    with pytest.raises(InvalidArgument, match="can't be read"):
        open_channel("127.0.0.1:1", None, ConnectionOptions(tls=Tls(ca=tmp_path / "nowhere")))
    with pytest.raises(InvalidArgument, match="printable"):
        open_channel("127.0.0.1:1", None, ConnectionOptions(token="new\nline"))
    assert TOKEN not in repr(ConnectionOptions(token=TOKEN))
