"""What Dockerfiles say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path


def variables_of(dockerfile: Path) -> Mapping[str, str]:
    """What the last image of a Dockerfile sets for the server."""
    last = dockerfile.read_text().rpartition("\nFROM ")[2]
    return dict(re.findall(r"\b(HEADRACE_\w+)=(\S+)", last))
