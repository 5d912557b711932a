"""Generate the committed stubs under ``proto/gen`` from the files under ``proto/headrace``.

    python .ci/generate_stubs.py                 write into proto/gen
    python .ci/generate_stubs.py --check         exit 1 when proto/gen is not what would be written
    python .ci/generate_stubs.py --output DIR    write into another folder

The result depends on the pinned grpcio-tools and mypy-protobuf alone, so two machines write the same bytes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from importlib import metadata, resources
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO_ROOT = ROOT / "proto"
COMMITTED = PROTO_ROOT / "gen"
PACKAGE_INIT = (
    '"""Generated messages and stubs of the `headrace.v1` API. Run `make proto` to regenerate."""\n'
)


def installed_proto_root() -> Path:
    """The folder that holds ``google/rpc/*.proto``, as installed with googleapis-common-protos."""
    files = metadata.files("googleapis-common-protos") or []
    for file in files:
        if file.as_posix() == "google/rpc/status.proto":
            return Path(str(file.locate())).resolve().parents[2]
    raise SystemExit("google/rpc/status.proto is not installed: pip install googleapis-common-protos")


def generate(output: Path) -> None:
    """Run protoc over every file under ``proto/headrace`` and write the stubs below ``output``."""
    sources = sorted((PROTO_ROOT / "headrace").rglob("*.proto"))
    well_known = resources.files("grpc_tools") / "_proto"
    output.mkdir(parents=True, exist_ok=True)
    # protoc looks its plugins up on PATH; the one that belongs to this interpreter lies beside it.
    search_path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"--proto_path={PROTO_ROOT}",
            f"--proto_path={installed_proto_root()}",
            f"--proto_path={well_known}",
            f"--python_out={output}",
            f"--pyi_out={output}",
            f"--grpc_python_out={output}",
            f"--mypy_grpc_out=only_async,quiet:{output}",
            *(str(source.relative_to(PROTO_ROOT)) for source in sources),
        ],
        check=True,
        cwd=PROTO_ROOT,
        env={**os.environ, "PATH": search_path},
    )
    for package in {source.relative_to(PROTO_ROOT).parent for source in sources}:
        (output / package / "__init__.py").write_text(PACKAGE_INIT, encoding="utf-8")
        (output / package / "py.typed").touch()


def stub_files(folder: Path) -> dict[str, bytes]:
    """Every generated file below ``folder``, by its path relative to it."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def stale_files(committed: Path) -> list[str]:
    """Names of files below ``committed`` that are missing, left over or different from a fresh generation."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = stub_files(Path(scratch))
    present = stub_files(committed)
    return sorted(name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name))


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate the Python stubs of headrace.v1.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the stubs are stale")
    parser.add_argument("--output", type=Path, default=COMMITTED, help="folder to write to or to check")
    arguments = parser.parse_args()
    if not arguments.check:
        generate(arguments.output)
        return 0
    stale = stale_files(arguments.output)
    for name in stale:
        print(f"stale stub: {arguments.output / name}", file=sys.stderr)
    if stale:
        print("Run `make proto` and commit the result.", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
