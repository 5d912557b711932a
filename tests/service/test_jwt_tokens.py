from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from headrace.service.auth import Authenticator, AuthRules
from headrace.service.file_watch import UnusableFile
from headrace.service.identity import Identity, Role
from headrace.service.jwt_rules import JwtRules
from headrace.service.jwt_tokens import JwtVerifier
from headrace.service.status import RpcFailure

RSA_KEY = rsa.generate_private_key(65537, 2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
ED_KEY = ed25519.Ed25519PrivateKey.generate()
PublicJwk = dict[str, object]


def jwk_of(key: Any, algorithm: str, key_id: str) -> PublicJwk:
    maker: Any = jwt.get_algorithm_by_name(algorithm)
    written = maker.to_jwk(key.public_key(), as_dict=True)
    return {**written, "kid": key_id, "alg": algorithm}


KEYS = [jwk_of(RSA_KEY, "PS256", "rsa"), jwk_of(EC_KEY, "ES256", "ec"), jwk_of(ED_KEY, "EdDSA", "ed")]


def rules(tmp_path: Path, *keys: PublicJwk) -> JwtRules:
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps({"keys": list(keys or KEYS)}))
    return JwtRules(path, issuer="https://issuer", audience="headrace")


def claims(**changes: object) -> dict[str, object]:
    now_s = int(time.time())
    said = {"iss": "https://issuer", "aud": "headrace", "sub": "svc:alice", "exp": now_s + 300, **changes}
    return {name: value for name, value in said.items() if value is not None}


def signed(key: Any, algorithm: str, key_id: str | None, **changes: object) -> str:
    headers = {} if key_id is None else {"kid": key_id}
    return jwt.encode(claims(**changes), key, algorithm, headers)


@pytest.mark.parametrize(
    ("key", "algorithm", "key_id"),
    [(RSA_KEY, "PS256", "rsa"), (EC_KEY, "ES256", "ec"), (ED_KEY, "EdDSA", None)],
)
def test_a_token_of_a_known_key_says_who_calls(
    tmp_path: Path, key: object, algorithm: str, key_id: str | None
) -> None:
    verifier = JwtVerifier(rules(tmp_path))
    alice = Identity("svc:alice", frozenset({Role.GENERATE}))
    assert verifier.verify(signed(key, algorithm, key_id)) == alice


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        (None, {Role.GENERATE}),
        ([], set()),
        (["control", "billing"], {Role.CONTROL}),
        ("generate control", {Role.GENERATE, Role.CONTROL}),
        ({"control": True}, set()),
        (7, set()),
    ],
)
def test_roles_are_those_of_the_claim(tmp_path: Path, roles: object, expected: set[Role]) -> None:
    identity = JwtVerifier(rules(tmp_path)).verify(signed(EC_KEY, "ES256", "ec", roles=roles))
    assert identity is not None
    assert identity.roles == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"exp": int(time.time()) - 3600},
        {"nbf": int(time.time()) + 3600},
        {"exp": None},
        {"aud": "billing"},
        {"aud": None},
        {"iss": "https://evil"},
        {"iss": None},
        {"sub": None},
        {"sub": ""},
        {"sub": "new\nline"},
        {"sub": "x" * 300},
    ],
)
def test_a_token_that_says_anything_wrong_is_nobodys(tmp_path: Path, changes: dict[str, object]) -> None:
    assert JwtVerifier(rules(tmp_path)).verify(signed(EC_KEY, "ES256", "ec", **changes)) is None


def test_no_signature_is_taken_but_that_of_the_key_itself(tmp_path: Path) -> None:
    verifier = JwtVerifier(rules(tmp_path))
    stranger = ec.generate_private_key(ec.SECP256R1())
    forged = [
        signed(stranger, "ES256", "ec"),
        signed(EC_KEY, "ES256", "rsa"),
        signed(EC_KEY, "ES256", "unknown"),
        signed("secret" * 10, "HS256", "ec"),
        # The right key with an algorithm that it is not for.
        signed(RSA_KEY, "RS256", "rsa"),
        # As one for whom the public key is a shared secret.
        signed(str(KEYS[0]["n"]), "HS256", "rsa"),
        jwt.encode(claims(), "", "none"),
        "a.b.c",
        "",
        "x" * 10_000,
    ]
    assert [verifier.verify(token) for token in forged] == [None] * len(forged)


def test_keys_that_are_no_public_keys_are_refused(tmp_path: Path) -> None:
    secret: PublicJwk = {"kty": "oct", "k": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0", "kid": "x"}
    with pytest.raises(UnusableFile, match="only public keys"):
        JwtVerifier(rules(tmp_path, secret))
    (tmp_path / "jwks.json").write_text("no json")
    with pytest.raises(UnusableFile, match="no JSON Web Key Set"):
        JwtVerifier(JwtRules(tmp_path / "jwks.json", "i", "a"))


def test_the_port_takes_a_signed_token_and_no_other(tmp_path: Path) -> None:
    authenticator = Authenticator(AuthRules(Role.GENERATE, jwt=rules(tmp_path)))

    def admitted(token: str) -> Identity | None:
        admittance = authenticator.by_metadata((("authorization", f"bearer {token}"),))
        assert admittance is not None
        assert admittance.is_current()
        return admittance.identity

    assert admitted(signed(EC_KEY, "ES256", "ec")) == Identity("svc:alice", frozenset({Role.GENERATE}))
    with pytest.raises(RpcFailure, match="for clients of role 'generate'"):
        admitted(signed(EC_KEY, "ES256", "ec", roles=["control"]))
    with pytest.raises(RpcFailure, match="not known, not valid"):
        admitted(signed(EC_KEY, "ES256", "ec", aud="billing"))
