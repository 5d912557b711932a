"""What a model folder says about ending a text and about sampling."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from headrace.engine.models.checkpoint import CONFIG_FILE
from headrace.engine.models.json_file import JsonFields

GENERATION_CONFIG_FILE = "generation_config.json"

_log = logging.getLogger(__name__)

_SAMPLING_KEYS = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def declared_eos_token_ids(folder: Path, tokenizer_ids: Collection[int], vocab_size: int) -> frozenset[int]:
    """Union of the end ids of config.json, generation_config.json and the tokenizer: any of them ends a text.

    Args:
        tokenizer_ids: the tokenizer's part.
        vocab_size: ids from here on can never be produced and are left out with a warning.

    Raises:
        ModelLoadError: a file declares something that is neither an id nor a list of ids.
    """
    declared = set(tokenizer_ids)
    for name in (CONFIG_FILE, GENERATION_CONFIG_FILE):
        if (folder / name).is_file():
            declared.update(JsonFields.of_file(folder / name).integers("eos_token_id"))
    possible = {token_id for token_id in declared if 0 <= token_id < vocab_size}
    if impossible := sorted(declared - possible):
        _log.warning("%s declares end ids outside the vocabulary of %d: %s", folder, vocab_size, impossible)
    if not possible:
        _log.warning("%s declares no end id: a text ends only at its token limit or a stop", folder)
    return frozenset(possible)


def log_sampling_defaults(folder: Path) -> None:
    """Say that a folder's sampling settings are not applied: requests state their own."""
    path = folder / GENERATION_CONFIG_FILE
    if not path.is_file():
        return
    file = JsonFields.of_file(path)
    if declared := {key: file.raw(key) for key in _SAMPLING_KEYS if file.raw(key) is not None}:
        _log.info("%s suggests %s: not applied, requests say what they want", path, declared)
