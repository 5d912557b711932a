"""Random numbers as a pure function of what they are for: no generator, no state, no order of calls.

A counter-based generator in the sense of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
(SC '11), with BLAKE2 as its mixing function: no batch, no preemption and no chunking can change a draw.
"""

from __future__ import annotations

import hashlib
import struct
from enum import StrEnum

_KEY = struct.Struct("<QQQ")
_MANTISSA_BITS = 53


class Purpose(StrEnum):
    """What a draw decides: several draws may belong to one position."""

    SAMPLE = "sample"
    """The token at that position."""
    DRAFT = "draft"
    """The draft at that position, where it is judged by rejection sampling."""
    ACCEPT = "accept"
    """Whether that draft is kept."""
    RECOVER = "recover"
    """The token in its place, if it is not."""


def uniform(seed: int, index: int, position: int, purpose: Purpose) -> float:
    """A number in [0, 1), uniform over the multiples of 2**-53.

    Args:
        seed: of the request, 0 to 2**64 - 1.
        index: which of the request's sequences draws.
        position: of the token that is drawn, in its sequence.
        purpose: what for.
    """
    digest = hashlib.blake2b(
        _KEY.pack(seed, index, position), digest_size=8, person=purpose.encode()
    ).digest()
    return float(int.from_bytes(digest, "little") >> (64 - _MANTISSA_BITS)) * 2.0**-_MANTISSA_BITS
