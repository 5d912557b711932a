"""The machine that a figure was measured on."""

from __future__ import annotations

import importlib.util
import platform
from dataclasses import dataclass
from importlib import metadata
from os import cpu_count, sched_getaffinity
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the client ran; for a server at a loopback address it is the server's machine, too.

    Args:
        num_usable_cores: cores that this process may use.
    """

    processor: str
    num_cores: int
    num_usable_cores: int
    memory_gib: float
    system: str
    python: str
    headrace: str
    grpc: str


def this_machine() -> Machine:
    """What is known of it."""
    return Machine(
        processor=_field(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine(),
        num_cores=cpu_count() or 1,
        num_usable_cores=len(sched_getaffinity(0)),
        memory_gib=round(int((_field(Path("/proc/meminfo"), "MemTotal") or "0").split()[0]) / 1048576, 1),
        system=platform.platform(),
        python=platform.python_version(),
        headrace=metadata.version("headrace"),
        grpc=metadata.version("grpcio") if importlib.util.find_spec("grpc") else "",
    )


def _field(path: Path, name: str) -> str | None:
    """The first value of a name in a file of `name : value` lines."""
    if not path.is_file():
        return None
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return None
