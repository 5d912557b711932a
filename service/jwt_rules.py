"""What a signed token must say; apart from `jwt_tokens`, which needs a library of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class JwtRules:
    """What a token must say.

    Args:
        jwks: file of the keys, public ones alone.
        issuer, audience: what its `iss` and `aud` must be.
        roles_claim: claim that lists its roles: a list, or words with spaces between. Without it: generate.
    """

    jwks: Path
    issuer: str
    audience: str
    roles_claim: str = "roles"
