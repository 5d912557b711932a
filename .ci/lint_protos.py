"""Run buf over ``proto/`` offline.

    python .ci/lint_protos.py                  buf lint
    python .ci/lint_protos.py --against REV    buf breaking: the protos now against those of a git revision

buf would fetch ``google/rpc/status.proto`` from a schema registry. Here each workspace is a copy under
``build/`` in which that file is the one that googleapis-common-protos installed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from generate_stubs import PROTO_ROOT, ROOT, installed_proto_root

WORKSPACE = ROOT / "build" / "proto"
BASELINE = ROOT / "build" / "proto-baseline"
BUF = Path(sys.executable).parent / "buf"


def add_google_rpc(workspace: Path) -> None:
    """Copy the installed ``google/rpc/*.proto`` into a buf workspace."""
    target = workspace / "google" / "rpc"
    target.mkdir(parents=True)
    for source in (installed_proto_root() / "google" / "rpc").glob("*.proto"):
        shutil.copy(source, target)


def make_workspace() -> Path:
    """A fresh workspace that holds the protos of the working tree."""
    shutil.rmtree(WORKSPACE, ignore_errors=True)
    shutil.copytree(PROTO_ROOT, WORKSPACE, ignore=shutil.ignore_patterns("gen"))
    add_google_rpc(WORKSPACE)
    return WORKSPACE


def make_baseline(revision: str) -> Path:
    """A fresh workspace that holds the protos of a git revision."""
    shutil.rmtree(BASELINE, ignore_errors=True)
    BASELINE.mkdir(parents=True)
    archive = BASELINE / "protos.tar"
    subprocess.run(
        ["git", "archive", f"--output={archive}", revision, "proto/headrace"], check=True, cwd=ROOT
    )
    shutil.unpack_archive(archive, BASELINE)
    shutil.copy(PROTO_ROOT / "buf.yaml", BASELINE / "proto")
    add_google_rpc(BASELINE / "proto")
    return BASELINE / "proto"


def main() -> int:
    parser = argparse.ArgumentParser(description="Run buf over the protos, offline.")
    parser.add_argument("--against", metavar="REV", help="report breaking changes since this git revision")
    revision: str | None = parser.parse_args().against
    workspace = make_workspace()
    command = [str(BUF), "lint"]
    if revision is not None:
        command = [str(BUF), "breaking", "--against", str(make_baseline(revision))]
    return subprocess.run(command, cwd=workspace, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
