"""Known models, fetched once into the cache folder that the server would use, too."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from headrace.engine.models.hub import resolve_model
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
    return resolve_model(name, None, Path(os.environ.get("HEADRACE_CACHE") or default_cache_dir()))
