"""Compile the kernels: ``python -m headrace.engine.native.build``. Never done behind a user's back.

Each kernel file is compiled once per instruction set, the library chooses among them when it is loaded. So
what is built on one x86 machine runs on every other.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

KERNELS = Path(__file__).parent / "kernels"

_COMPILERS = ("g++", "c++", "clang++")
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    # Packed numbers are read as what they are packed from.
    "-fno-strict-aliasing",
    # A sum is rounded where the source says so, whatever the instruction set.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    # GCC's own vector headers set them off.
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
)
_AVX512 = (
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mfma",
    "-mprfchw",
    "-mprefer-vector-width=512",
)
_VARIANT_FLAGS = {
    "avx512bf16": (*_AVX512, "-mavx512bf16", "-mavx512vnni"),
    "avx512": _AVX512,
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "generic": (),
}
_VARIANT_SOURCES = ("attention.cpp", "linear.cpp", "quantised.cpp", "tokens.cpp")
# What another variant's code does for one (see api.cpp).
_BORROWED = {("avx512", "quantised.cpp")}
_COMMON_SOURCES = ("api.cpp", "packing.cpp", "plan.cpp", "stack.cpp")
_X86 = ("x86_64", "AMD64")


class BuildError(Exception):
    """There is no compiler, or it refuses the sources; the message says which."""


@dataclass(frozen=True, slots=True)
class _Unit:
    source: Path
    flags: tuple[str, ...]
    output: Path


def library_stem() -> str:
    """Begin of the file name of every library that is built from these sources for this kind of machine."""
    digest = hashlib.sha256(repr((_FLAGS, sorted(_VARIANT_FLAGS.items()), sorted(_BORROWED))).encode())
    for source in sorted(KERNELS.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return f"headrace-native-{platform.system()}-{platform.machine()}-{digest.hexdigest()[:16]}".lower()


def default_folders() -> tuple[Path, ...]:
    """Where a library is looked for, beside the package first; the first that can be written is built in."""
    return (
        Path(__file__).parent / "built",
        Path("~/.cache/headrace/native").expanduser(),
    )


def build(folder: Path | None = None, compiler: str | None = None) -> Path:
    """Compile the library unless it is there already.

    Args:
        folder: where it goes; None takes the first of `default_folders` that can be written.
        compiler: None takes the first of the usual names that is found.

    Returns:
        The library's path.

    Raises:
        BuildError: no compiler, no folder, or the compiler fails.
    """
    command = _find_compiler(compiler)
    version = _run([command, "--version"]).splitlines()[0]
    name = f"{library_stem()}-{hashlib.sha256(version.encode()).hexdigest()[:8]}.so"
    place = _writable(default_folders() if folder is None else (folder,))
    target = place / name
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=place) as work:
        units = _units(Path(work))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda unit: _compile(command, unit), units))
        linked = Path(work) / name
        _run([command, "-shared", "-fopenmp", *(str(unit.output) for unit in units), "-o", str(linked)])
        # In one move: nobody ever loads half a library.
        linked.replace(target)
    return target


def _units(work: Path) -> list[_Unit]:
    units = [_Unit(KERNELS / name, _FLAGS, work / f"{name}.o") for name in _COMMON_SOURCES]
    variants = _VARIANT_FLAGS if platform.machine() in _X86 else {"generic": ()}
    for variant, variant_flags in variants.items():
        flags = (*_FLAGS, *variant_flags, f"-DHEADRACE_VARIANT={variant}")
        units += [
            _Unit(KERNELS / name, flags, work / f"{variant}-{name}.o")
            for name in _VARIANT_SOURCES
            if (variant, name) not in _BORROWED
        ]
    return units


def _compile(compiler: str, unit: _Unit) -> None:
    _run([compiler, *unit.flags, "-c", str(unit.source), "-o", str(unit.output)])


def _find_compiler(wanted: str | None) -> str:
    if wanted is not None:
        found = shutil.which(wanted)
        if found is None:
            raise BuildError(f"compiler {wanted!r} is not found: name one that is on the PATH")
        return found
    for name in _COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return found
    raise BuildError(
        f"no C++ compiler: none of {', '.join(_COMPILERS)} is on the PATH. Install one (on Debian: apt-get "
        "install g++) or name it with --compiler. Without the library torch computes the same, more slowly"
    )


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _writable(folders: Sequence[Path]) -> Path:
    reasons = []
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # What is built belongs to no repository.
            (folder / ".gitignore").write_text("*\n", encoding="utf-8")
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
        else:
            return folder
    raise BuildError(f"no folder to build in: {'; '.join(reasons)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; says where the library is, or on stderr why there is none."""
    parser = argparse.ArgumentParser(prog="python -m headrace.engine.native.build", description=__doc__)
    parser.add_argument("--folder", type=Path, help="where the library goes (default: beside the package)")
    parser.add_argument("--compiler", help="C++ compiler (default: the first of g++, c++, clang++)")
    options = parser.parse_args(arguments)
    try:
        target = build(options.folder, options.compiler)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
