"""Which models there are: those that have a name here, and those that lie in the cache."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.engine.models.hub import SOURCES, Sources, converted_place, is_outdated

_HUB_FOLDER = "models--"


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model that can be served.

    Args:
        spec: what a person writes for it.
        description: what it is, in a line.
        download_bytes: what has to be fetched; 0 where all is there.
        cached_bytes: what the cache folder holds of it.
    """

    spec: str
    description: str
    download_bytes: int
    cached_bytes: int


def list_models(cache_dir: Path, *, sources: Sources = SOURCES) -> tuple[ListedModel, ...]:
    """Known models, fetched or not, then all others in the cache: of the hub, and converted GGUF files."""
    places = set()
    listed = []
    for model in sources.known.values():
        place = converted_place(cache_dir, model.gguf_sha256, model.name)
        places.add(place)
        kept = cache_dir / "files" / f"{model.gguf_sha256}.gguf"
        cached = _size_of(place) + _size_of(kept)
        missing = 0 if place.is_dir() or kept.is_file() else model.download_size
        listed.append(ListedModel(model.name, model.description, missing, cached))
    return (*listed, *_of_the_hub(cache_dir / "hub"), *_converted(cache_dir / "gguf", places))


def _of_the_hub(folder: Path) -> Iterator[ListedModel]:
    for place in sorted(folder.glob(f"{_HUB_FOLDER}*")):
        name = place.name.removeprefix(_HUB_FOLDER).replace("--", "/", 1)
        yield ListedModel(f"hf:{name}", "fetched from the hub", 0, _size_of(place))


def _converted(folder: Path, known: set[Path]) -> Iterator[ListedModel]:
    for place in sorted(folder.glob("*/[!.]*")):
        if place.is_dir() and place not in known:
            told = "converted from a GGUF file"
            if is_outdated(place):
                told += f" by an older version, and read no more: rm -r {shlex.quote(str(place))}"
            yield ListedModel(str(place), told, 0, _size_of(place))


def _size_of(place: Path) -> int:
    """Bytes of a file, or of all files below a folder; 0 where there is none. Links are not followed."""
    files = [place] if place.is_file() else place.rglob("*")
    return sum(file.lstat().st_size for file in files if file.is_file() and not file.is_symlink())
