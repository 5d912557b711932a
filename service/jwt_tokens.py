"""Signed tokens (JWT, RFC 7519), verified against a local key set (JWKS, RFC 7517). Needs `headrace[jwt]`.

As RFC 8725 has it: only asymmetric algorithms, and of each key the one that it names (without `alg`: RS256,
ES256, ES384, ES512 or EdDSA, as its type and curve have it); issuer, audience and expiry are
always checked. Keys are never fetched: whoever rotates them replaces the file.
"""

from __future__ import annotations

from pathlib import Path

import jwt

from headrace.service.file_watch import UnusableFile, WatchedFiles, read_text
from headrace.service.identity import Identity, Role, is_valid_name
from headrace.service.jwt_rules import JwtRules

_ALGORITHMS = frozenset(
    {f"{family}{size}" for family in ("RS", "PS", "ES") for size in (256, 384, 512)} | {"EdDSA"}
)
_LEEWAY_S = 30
_MAX_TOKEN_LEN = 8192


class JwtVerifier:
    """Says whose token one is.

    Raises:
        UnusableFile: the keys can't be taken.
    """

    def __init__(self, rules: JwtRules) -> None:
        self._rules = rules
        self._keys = WatchedFiles([rules.jwks], lambda: _read_keys(rules.jwks))

    def verify(self, token: str) -> Identity | None:
        """The client of `token`; None if anything about it is wrong."""
        if len(token) > _MAX_TOKEN_LEN:
            return None
        try:
            header = jwt.get_unverified_header(token)
            key = self._key_for(header.get("kid"), header.get("alg"))
            if key is None:
                return None
            claims = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                audience=self._rules.audience,
                issuer=self._rules.issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "iss", "aud", "sub"], "enforce_minimum_key_length": True},
            )
            name, roles = claims["sub"], _roles_in(claims.get(self._rules.roles_claim))
        except (jwt.PyJWTError, ValueError, TypeError):
            return None
        if not isinstance(name, str) or not is_valid_name(name):
            return None
        return Identity(name, roles)

    def _key_for(self, key_id: object, algorithm: object) -> jwt.PyJWK | None:
        fitting = [key for key in self._keys.current() if key.algorithm_name == algorithm]
        if key_id is None:
            return fitting[0] if len(fitting) == 1 else None
        return next((key for key in fitting if key.key_id == key_id), None)


def _roles_in(claim: object) -> frozenset[Role]:
    """Roles of ours in the claim; others are for other services."""
    if claim is None:
        return frozenset({Role.GENERATE})
    words = claim.split() if isinstance(claim, str) else claim if isinstance(claim, list) else []
    return frozenset(role for role in Role if role.value in words)


def _read_keys(path: Path) -> tuple[jwt.PyJWK, ...]:
    try:
        keys = jwt.PyJWKSet.from_json(read_text(path)).keys
    except (jwt.PyJWTError, ValueError, TypeError, AttributeError) as error:
        raise UnusableFile(f"{path}: is no JSON Web Key Set with keys in it") from error
    for key in keys:
        if key.algorithm_name not in _ALGORITHMS:
            raise UnusableFile(
                f"{path}: holds a key for {key.algorithm_name}: only public keys (RSA, EC, Ed25519) are taken"
            )
    return tuple(keys)
