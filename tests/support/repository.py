"""The repository as the layout, stub and packaging tests see it."""

from __future__ import annotations

import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Import name of each top package and the folder that holds it.
PACKAGE_FOLDERS = {
    "headrace.clients": ROOT / "clients" / "python",
    "headrace.engine": ROOT / "engine",
    "headrace.service": ROOT / "service",
    "headrace.v1": ROOT / "proto" / "gen" / "headrace" / "v1",
}


@dataclass(frozen=True, slots=True)
class SourceModule:
    """One Python file of the distribution."""

    name: str
    path: Path
    is_package: bool


def repository_files() -> list[Path]:
    """Every file that git tracks or would add, and that exists."""
    # The tree may belong to another user than the one who runs the tests.
    listing = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return sorted(path for name in set(listing.split("\0")) if name and (path := ROOT / name).is_file())


def hand_written_python() -> list[Path]:
    """Every Python file of the repository that no tool generates."""
    generated = ROOT / "proto" / "gen"
    return [path for path in repository_files() if path.suffix == ".py" and generated not in path.parents]


def source_modules() -> list[SourceModule]:
    """Every module of the distribution, generated stubs included, found by walking the folders."""
    modules = []
    for package, folder in PACKAGE_FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join([package, *(parts[:-1] if is_package else parts)])
            modules.append(SourceModule(name, path, is_package))
    return modules


def pyproject() -> dict[str, object]:
    """The parsed pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pyproject_value(*keys: str) -> object:
    """One value of pyproject.toml, by its path of keys."""
    value: object = pyproject()
    for key in keys:
        if not isinstance(value, dict):
            raise KeyError(".".join(keys))
        value = value[key]
    return value
