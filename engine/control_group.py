"""The control group that this process is in: what it, and each group around it, leaves of memory and cores.

In a container the group stands at the root of what is mounted; a service of the system stands further down,
where its membership says. Both versions of control groups are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MEMORY_V2 = (
    ("memory.max", "memory.high"),
    "memory.current",
    ("inactive_file", "active_file", "file_mapped"),
)
_MEMORY_V1 = (
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file", "total_mapped_file"),
)


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """Of this process, unless told otherwise.

    Args:
        root: where groups are mounted; version 1 has a folder for each controller there.
        membership: file with a line ``number:controllers:/path`` for each hierarchy; version 2 is number 0.
    """

    root: Path = Path("/sys/fs/cgroup")
    membership: Path = Path("/proc/self/cgroup")

    def free_memory(self) -> int | None:
        """Bytes that may still be taken, the least that any of the groups leaves; None without a limit."""
        groups = (
            *((folder, _MEMORY_V2) for folder in self._folders("")),
            *((folder, _MEMORY_V1) for folder in self._folders("memory")),
        )
        frees = (_free_memory(folder, *names) for folder, names in groups)
        return min((free for free in frees if free is not None), default=None)

    def num_cores(self) -> int | None:
        """Whole cores that may be used at once, one at least; None where no group sets a limit."""
        told = [_read(folder / "cpu.max").split() for folder in self._folders("")]
        told += [
            [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
            for folder in self._folders("cpu")
        ]
        numbers = ([_number(text) for text in each] for each in told if len(each) == 2)
        cores = (max(1, quota // period) for quota, period in numbers if quota is not None and period)
        return min(cores, default=None)

    def _folders(self, controller: str) -> Iterator[Path]:
        """The group's folder and those around it, up to the root: as far as they are there.

        Args:
            controller: of version 1; empty for version 2.
        """
        mounted = self.root / controller
        yield mounted
        for line in _read(self.membership).splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if controller in controllers.split(",") and (controller or number == "0"):
                inner = Path(path.lstrip("/"))
                yield from (mounted / each for each in (inner, *inner.parents) if each != Path())


def _free_memory(
    folder: Path, limit_names: tuple[str, ...], usage_name: str, cache_keys: tuple[str, str, str]
) -> int | None:
    limits = [_number(_read(folder / name)) for name in limit_names]
    usage = _number(_read(folder / usage_name))
    in_bytes = [limit for limit in limits if limit is not None]
    if not in_bytes or usage is None:
        return None
    # Files that were read, a model's for one, are let go where memory is asked for; those that are mapped, as
    # libraries are, are in use.
    stat = dict(line.partition(" ")[::2] for line in _read(folder / "memory.stat").splitlines())
    inactive, active, mapped = (_number(stat.get(key, "")) or 0 for key in cache_keys)
    can_go = inactive + max(0, active - mapped)
    return max(0, min(in_bytes) - usage + min(usage, can_go))


def _number(text: str) -> int | None:
    """What a file gives as a number; None for anything else, such as "max", or "-1" for no limit."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() else None


def _read(file: Path) -> str:
    """What a file says; nothing where there is none, or none that may be read."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
