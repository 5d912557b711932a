"""TLS of the ports, with certificates of openssl: who gets a connection, and what a renewal changes."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from pathlib import Path

import grpc
import pytest

from headrace.clients import InferenceClient, InvalidArgument, RetryPolicy, Tls, Unavailable
from headrace.service.auth import AuthRules
from headrace.service.file_watch import UnusableFile
from headrace.service.identity import Role
from headrace.service.server import Entrance
from headrace.service.tls import TlsFiles, certificate_name, server_credentials
from headrace.v1.generation_pb2 import GenerateRequest
from headrace.v1.generation_pb2_grpc import GenerationServiceStub
from tests.support.certificates import Authority, Certificate
from tests.support.fake_runner import expected_output, make_fake_model
from tests.support.service import PROMPT, ids_of, make_start, rest_of, running_service
from tests.support.step_gate import StepGate

ONCE = RetryPolicy(max_attempts=1)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def server_cert(authority: Authority) -> Certificate:
    return authority.issue("server")


def tls_entrance(cert: Certificate, client_ca: Path | None = None) -> Entrance:
    may = None if client_ca is None else frozenset({Role.GENERATE})
    rules = AuthRules(Role.GENERATE, certificate_roles=may)
    return Entrance.guarded(rules, TlsFiles(cert.cert, cert.key, client_ca))


async def ask(address: str, tls: Tls | None) -> list[int]:
    """What a client that trusts so gets."""
    async with InferenceClient(address, tls=tls, retry=ONCE) as client:
        answer = await client.generate_once(list(PROMPT), max_tokens=8, temperature=0, timeout_s=30)
        return list(answer.token_ids)


async def test_an_encrypted_answer_is_the_same_answer(authority: Authority, server_cert: Certificate) -> None:
    async with running_service(entrance=tls_entrance(server_cert)) as service:
        assert await ask(service.address, Tls(ca=authority.cert)) == expected_output(PROMPT, 8)


@pytest.mark.parametrize("case", ["plain text", "another authority", "expired", "another name"])
async def test_a_client_turns_away_from_a_server_that_it_can_not_trust(
    case: str, authority: Authority, tmp_path: Path
) -> None:
    names = "DNS:elsewhere.example" if case == "another name" else "DNS:localhost,IP:127.0.0.1"
    cert = authority.issue(f"server {case}", names, is_expired=case == "expired")
    trusted = Authority(tmp_path).cert if case == "another authority" else authority.cert
    async with running_service(entrance=tls_entrance(cert)) as service:
        with pytest.raises(Unavailable):
            await ask(service.address, None if case == "plain text" else Tls(ca=trusted))
        if case == "another name":
            named = Tls(ca=trusted, server_name="elsewhere.example")
            assert await ask(service.address, named) == expected_output(PROMPT, 8)


@pytest.mark.parametrize("case", ["none", "another authority", "expired"])
async def test_a_client_without_a_good_certificate_gets_no_connection(
    case: str, authority: Authority, server_cert: Certificate, tmp_path: Path
) -> None:
    own = (Authority(tmp_path) if case == "another authority" else authority).issue(
        f"client {case}", is_expired=case == "expired"
    )
    async with running_service(entrance=tls_entrance(server_cert, authority.cert)) as service:
        shown = (None, None) if case == "none" else (own.cert, own.key)
        with pytest.raises(Unavailable):
            await ask(service.address, Tls(authority.cert, *shown))
        good = authority.issue("good client")
        assert await ask(service.address, Tls(authority.cert, good.cert, good.key)) == expected_output(
            PROMPT, 8
        )


def subject_shown_at(address: str, authority: Authority) -> str:
    """Common name in the certificate that a new connection is shown."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(cafile=str(authority.cert))
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, int(port))) as connection,
        context.wrap_socket(connection, server_hostname="localhost") as secured,
    ):
        peer = secured.getpeercert()
        assert peer is not None
        names: list[object] = [value for rdn in peer["subject"] for _, value in rdn]  # type: ignore[str-unpack]
        return str(names[0])


async def test_a_renewed_certificate_is_shown_to_new_connections_while_old_streams_go_on(
    authority: Authority,
) -> None:
    cert, renewed = authority.issue("before"), authority.issue("after")
    gate = StepGate()
    async with running_service(make_fake_model(before_step=gate), entrance=tls_entrance(cert)) as service:
        trust = grpc.ssl_channel_credentials(authority.cert.read_bytes())
        async with grpc.aio.secure_channel(service.address, trust) as channel:
            call = GenerationServiceStub(channel).Generate(GenerateRequest(start=make_start(max_tokens=30)))
            begun = [response async for response in rest_of(call, 1)]
            assert await asyncio.to_thread(subject_shown_at, service.address, authority) == "before"
            # Half of a renewal: the key is new, the certificate is not. What was in force stays so.
            half = Certificate(cert.key, cert.key)
            half.replace_with(Certificate(renewed.key, renewed.key))
            assert await asyncio.to_thread(subject_shown_at, service.address, authority) == "before"
            cert.replace_with(renewed)
            assert await asyncio.to_thread(subject_shown_at, service.address, authority) == "after"
            gate.open()
            events = [response.event for response in begun]
            events += [response.event async for response in rest_of(call)]
            assert await call.code() is grpc.StatusCode.OK
    assert ids_of(events) == expected_output(PROMPT, 30)


@pytest.fixture
def broken(tmp_path: Path, authority: Authority) -> Certificate:
    good, other = authority.issue("good"), authority.issue("other")
    made = Certificate(tmp_path / "cert.pem", tmp_path / "key.pem")
    made.cert.write_bytes(good.cert.read_bytes())
    made.key.write_bytes(other.key.read_bytes())
    return made


def test_files_that_do_not_fit_together_are_refused_at_the_start(
    broken: Certificate, server_cert: Certificate, tmp_path: Path
) -> None:
    with pytest.raises(UnusableFile, match="no certificate and its key"):
        server_credentials(TlsFiles(broken.cert, broken.key))
    with pytest.raises(UnusableFile, match="can't be read"):
        server_credentials(TlsFiles(tmp_path / "nowhere", broken.key))
    damaged = tmp_path / "damaged.pem"
    damaged.write_text("-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n")
    with pytest.raises(UnusableFile, match="holds no certificates"):
        server_credentials(TlsFiles(server_cert.cert, server_cert.key, damaged))


def test_a_key_in_the_place_of_a_certificate_is_told_with_the_flag(
    server_cert: Certificate, tmp_path: Path
) -> None:
    cert, key, other = server_cert.cert, server_cert.key, tmp_path / "other"
    other.write_text("words")
    both = tmp_path / "both.pem"
    both.write_text(cert.read_text() + key.read_text())
    for files, told in (
        (TlsFiles(key, cert), f"{key}: holds a private key, and --tls-cert takes a certificate"),
        (TlsFiles(cert, cert), f"{cert}: holds a certificate, and --tls-key takes a private key"),
        (TlsFiles(cert, key, key), f"{key}: holds a private key, and --tls-client-ca takes a certificate"),
        (TlsFiles(other, key), f"{other}: holds neither certificates nor keys in PEM, and --tls-cert takes"),
    ):
        with pytest.raises(UnusableFile, match=re.escape(told)):
            server_credentials(files)
    server_credentials(TlsFiles(both, both, both))


async def test_a_client_is_told_which_of_its_files_is_another(
    authority: Authority, server_cert: Certificate, tmp_path: Path
) -> None:
    ca, cert, key, other = authority.cert, server_cert.cert, server_cert.key, tmp_path / "other"
    other.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\n")
    for tls, told in (
        (
            Tls(ca=key),
            f"{key}: holds a private key, and --tls-ca (Tls.ca) takes a certificate",
        ),
        (
            Tls(ca, key, cert),
            f"{cert}: holds a certificate, and --tls-key (Tls.key) takes a private",
        ),
        (Tls(ca, key, key), f"{key}: holds a private key, and --tls-cert (Tls.cert) takes"),
        (
            Tls(ca, cert, other),
            f"{other}: is encrypted, and --tls-key (Tls.key) takes a private key",
        ),
        (Tls(tmp_path / "none"), "can't be read"),
    ):
        with pytest.raises(InvalidArgument, match=re.escape(told)):
            await InferenceClient("127.0.0.1:1", tls=tls).__aenter__()


def test_a_peer_is_named_by_its_certificate() -> None:
    pem, common, alternative = b"-----", b"service-a", b"spiffe://cluster/a"
    assert certificate_name({"x509_pem_cert": [pem], "x509_common_name": [common]}) == "service-a"
    only_alternative = {"x509_pem_cert": [pem], "x509_subject_alternative_name": [alternative]}
    assert certificate_name(only_alternative) == "spiffe://cluster/a"
    assert certificate_name({"x509_common_name": [common]}) is None
