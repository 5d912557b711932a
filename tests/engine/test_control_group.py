from __future__ import annotations

from pathlib import Path

import pytest

from headrace.engine.control_group import ControlGroup

UNLIMITED_V1 = "9223372036854771712\n"


def group(folder: Path, files: dict[str, str], membership: str = "") -> ControlGroup:
    """A group with these files below its root."""
    for name, content in files.items():
        file = folder / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    (folder / "membership").write_text(membership)
    return ControlGroup(folder / "cgroup", folder / "membership")


def memory(limit: str, usage: int, **more: str) -> dict[str, str]:
    return {"memory.max": f"{limit}\n", "memory.current": f"{usage}\n"} | more


def below(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": content for name, content in files.items()}


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        (memory("1000", 300), "0::/\n", 700),
        (memory("1000", 900) | {"memory.stat": "anon 500\ninactive_file 300\n"}, "", 400),
        (
            memory("1000", 900) | {"memory.stat": "inactive_file 300\nactive_file 200\nfile_mapped 150\n"},
            "",
            450,
        ),
        (memory("1000", 900) | {"memory.stat": "active_file 20\nfile_mapped 150\n"}, "", 100),
        (memory("max", 300), "", None),
        (memory("100", 300), "", 0),
        (memory("max", 300) | {"memory.high": "500\n"}, "", 200),
        (
            below("system.slice/headrace.service", memory("1000", 1)),
            "0::/system.slice/headrace.service\n",
            999,
        ),
        (
            below("pods", memory("1000", 600)) | below("pods/one", memory("900", 100)),
            "0::/pods/one\n",
            400,
        ),
        (below("others", memory("1000", 600)), "0::/mine\n", None),
        (
            {"memory/memory.limit_in_bytes": "1000\n", "memory/memory.usage_in_bytes": "1\n"},
            "5:memory:/docker/abc\n",
            999,
        ),
        (
            {
                "memory/memory.limit_in_bytes": UNLIMITED_V1,
                "memory/memory.usage_in_bytes": "1\n",
                "memory/slice/memory.limit_in_bytes": "1000\n",
                "memory/slice/memory.usage_in_bytes": "500\n",
                "memory/slice/memory.stat": "inactive_file 7\ntotal_inactive_file 60\ntotal_active_file 50\n"
                "total_mapped_file 10\n",
            },
            "7:cpu,cpuacct:/elsewhere\n5:memory:/slice\n0::/\n",
            600,
        ),
        (memory("-1", 300), "", None),
        ({"memory/memory.limit_in_bytes": "-1\n", "memory/memory.usage_in_bytes": "1\n"}, "", None),
        (memory("lots", 300), "", None),
        (memory("1000", 300) | {"memory.current": "max\n"}, "", None),
        (memory("1000", 900) | {"memory.stat": "\nodd\nactive_file x\ninactive_file 300\n"}, "", 400),
        ({}, "", None),
    ],
    ids=[
        "limit",
        "files that can go",
        "files that were read twice can go, too",
        "mapped files can't",
        "no limit",
        "over the limit",
        "throttled",
        "a service of the system",
        "the group around it has less",
        "another's",
        "version 1",
        "version 1, further down",
        "no limit in another's words",
        "no limit in another's words, version 1",
        "no number for a limit",
        "no number in use",
        "lines that say nothing",
        "no group",
    ],
)
def test_memory_is_what_the_narrowest_group_leaves(
    tmp_path: Path, files: dict[str, str], membership: str, expected: int | None
) -> None:
    assert group(tmp_path, files, membership).free_memory() == expected


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({"cpu.max": "200000 100000\n"}, "0::/\n", 2),
        ({"cpu.max": "150000 100000\n"}, "", 1),
        ({"cpu.max": "50000 100000\n"}, "", 1),
        ({"cpu.max": "max 100000\n"}, "", None),
        ({"cpu.max": "-1 100000\n"}, "", None),
        ({"cpu.max": "some more\n"}, "", None),
        ({"cpu.max": "100000 0\n"}, "", None),
        ({"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, "0::/a/b\n", 3),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "", 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "", None),
        ({}, "", None),
    ],
)
def test_cores_are_those_of_the_narrowest_group(
    tmp_path: Path, files: dict[str, str], membership: str, expected: int | None
) -> None:
    assert group(tmp_path, files, membership).num_cores() == expected


def test_where_there_are_no_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    nowhere = ControlGroup(tmp_path / "none", tmp_path / "none")
    assert nowhere.free_memory() is None
    assert nowhere.num_cores() is None
