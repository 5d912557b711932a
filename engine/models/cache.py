"""Folders made once and kept: complete or not there at all, whoever else works on the same cache.

A folder is built beside its place and renamed into it, under a lock between processes. Its manifest says what
was put in; a folder that no longer agrees with it is built anew.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from headrace.engine.errors import ModelLoadError
from headrace.engine.models.json_file import JsonFields

MANIFEST_FILE = "manifest.json"

_log = logging.getLogger(__name__)

_STAGING_PREFIX = ".making-"


def ensure_folder(place: Path, build: Callable[[Path], None]) -> Path:
    """Give `place`, built first where it isn't there or is damaged.

    Args:
        place: the folder; the one above it is made and holds lock and unfinished work.
        build: fills an empty folder that it is given.

    Raises:
        ModelLoadError: the cache can't be written.
        Exception: whatever `build` raises; then nothing is left behind.
    """
    if is_intact(place):
        return place
    with _locked(place):
        # Another process may have built it while this one waited.
        if is_intact(place):
            return place
        if place.exists():
            _log.warning("%s is damaged or incomplete: it is made anew", place)
        with _staging(place) as staging:
            build(staging)
            _write_manifest(staging)
            if place.exists():
                shutil.rmtree(place)
            staging.rename(place)
    return place


def is_intact(folder: Path) -> bool:
    """Whether a folder holds what its manifest says, file by file."""
    if not (folder / MANIFEST_FILE).is_file():
        return False
    try:
        manifest = JsonFields.of_file(folder / MANIFEST_FILE)
        files = manifest.object("files")
        if files is None:
            return False
        return all(
            _agrees(folder / name, entry) for name in files.keys if (entry := files.object(name)) is not None
        )
    except ModelLoadError as error:
        _log.warning("%s", error)
        return False


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _agrees(path: Path, entry: JsonFields) -> bool:
    if not path.is_file():
        return False
    status = path.stat()
    if status.st_size != entry.integer("size", at_least=0):
        return False
    # Summing up gigabytes at every start would cost seconds: an untouched file counts as whole.
    return status.st_mtime_ns == entry.integer("mtime_ns") or sha256_of(path) == entry.text("sha256")


def _write_manifest(folder: Path) -> None:
    files = {}
    for path in sorted(folder.iterdir()):
        status = path.stat()
        files[path.name] = {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": sha256_of(path)}
    (folder / MANIFEST_FILE).write_text(json.dumps({"files": files}, indent=1))


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Work on `place` alone. What a process that was killed left behind there is removed."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(place.parent / f".{place.name}.lock"):
            for abandoned in place.parent.glob(f"{_STAGING_PREFIX}{glob.escape(place.name)}-*"):
                shutil.rmtree(abandoned, ignore_errors=True)
            yield
    except OSError as error:
        raise ModelLoadError(
            f"the cache folder {place.parent} can't be used: {error}; name another one with HEADRACE_CACHE"
        ) from error


@contextmanager
def _staging(place: Path) -> Iterator[Path]:
    staging = Path(tempfile.mkdtemp(prefix=f"{_STAGING_PREFIX}{place.name}-", dir=place.parent))
    # mkdtemp keeps others out, which a finished model has no reason for.
    staging.chmod(0o777 & ~_umask())
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
