"""From a model's name to a model that runs. Torch is imported here, when a model is really wanted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headrace.engine.config import EngineConfig
from headrace.engine.distillation.settings import DistillationProgress, DistillationSettings, DraftReport
from headrace.engine.runner.protocol import LoadedModel, LoadProgress

if TYPE_CHECKING:
    from headrace.engine.models.listing import ListedModel


def load_model(config: EngineConfig, progress: LoadProgress | None = None) -> LoadedModel:
    """Read a model, allocate its KV pool, make it ready to run. Takes seconds: call it off the event loop.

    Args:
        config: which model, and how.
        progress: told how it goes.

    Raises:
        ModelLoadError: the files can't be served.
        ConfigError: the configuration doesn't suit the model or the machine.
    """
    from headrace.engine.runner.loading import load

    return load(config, progress)


def check_machine(config: EngineConfig) -> None:
    """Check what a machine can do, before a model is fetched for it: device, types, attention backend, KV
    memory. What the model's files have to tell, `load_model` checks before it reads weights.

    Raises:
        ConfigError: this machine can't do it.
    """
    from headrace.engine.runner.foresight import check_machine as check

    check(config)


def check_model(path: Path) -> None:
    """Check that a folder holds a model that can be served: its config.json, which weights there are, its
    tokenizer. No weights are read.

    Raises:
        ModelLoadError: it holds none, or one that can't be served.
    """
    from headrace.engine.models.loader import check_folder
    from headrace.engine.models.tokenizer import load_tokenizer

    check_folder(path)
    load_tokenizer(path)


def resolve_model(spec: str, cache_dir: Path, progress: LoadProgress | None = None) -> Path:
    """Find, or fetch into the cache, what `spec` names. May take minutes: call it off the event loop.

    Args:
        spec: a folder, a GGUF file, ``hf:org/name``, or the name of a known model.
        cache_dir: where fetched and converted models are kept.
        progress: told how it goes.

    Returns:
        A folder that `load_model` takes.

    Raises:
        ModelLoadError: there is no such thing, or it can't be fetched.
    """
    from headrace.engine.models.hub import resolve_model as resolve

    return resolve(spec, progress, cache_dir)


def look_up_model(spec: str) -> None:
    """Check that `spec` names a model that is here, or one that may be fetched; nothing is read or fetched.

    Args:
        spec: see `resolve_model`.

    Raises:
        ModelLoadError: there is no such thing.
    """
    from headrace.engine.models.hub import look_up_model as look_up

    look_up(spec)


def list_models(cache_dir: Path) -> tuple[ListedModel, ...]:
    """Models that have a name of their own, and all that lie in the cache.

    Args:
        cache_dir: where fetched and converted models are kept.
    """
    from headrace.engine.models.listing import list_models as listed

    return listed(cache_dir)


def make_draft_model(settings: DistillationSettings, progress: DistillationProgress) -> DraftReport:
    """Make a draft model for a target by distillation.

    It takes minutes to hours, and may be broken off and gone on with.

    Raises:
        ModelLoadError: the target can't be loaded.
        ConfigError: the settings don't suit the target, or the output folder holds other work.
    """
    from headrace.engine.distillation.distil import distil

    return distil(settings, progress)
