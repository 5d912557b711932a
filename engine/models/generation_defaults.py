"""What a model folder says about ending a text and about sampling."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from headrace.engine.config import SamplingDefaults
from headrace.engine.models.checkpoint import CONFIG_FILE
from headrace.engine.models.json_file import JsonFields

GENERATION_CONFIG_FILE = "generation_config.json"

_log = logging.getLogger(__name__)

_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (math.nextafter(0.0, 1.0), 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (math.nextafter(0.0, 1.0), 10.0),
}
"""Controls that are read, and what they may be: the ranges of a request's."""


def declared_eos_token_ids(folder: Path, tokenizer_ids: Collection[int], vocab_size: int) -> frozenset[int]:
    """Union of the end ids of config.json, generation_config.json and the tokenizer: any of them ends a text.

    Args:
        tokenizer_ids: the tokenizer's part.
        vocab_size: a tokenizer's id from here on can never be produced and is left out with a warning, as
            is a negative one, which some files write for "none".

    Raises:
        ModelLoadError: a file declares something that is neither an id nor a list of ids, or an id beyond
            the vocabulary.
    """
    declared = set(tokenizer_ids)
    for name in (CONFIG_FILE, GENERATION_CONFIG_FILE):
        if (folder / name).is_file():
            file = JsonFields.of_file(folder / name)
            check_token_ids(file, "eos_token_id", vocab_size)
            declared.update(file.integers("eos_token_id"))
    possible = {token_id for token_id in declared if 0 <= token_id < vocab_size}
    if impossible := sorted(declared - possible):
        _log.warning("%s declares end ids outside the vocabulary of %d: %s", folder, vocab_size, impossible)
    if not possible:
        _log.warning("%s declares no end id: a text ends only at its token limit or a stop", folder)
    return frozenset(possible)


def check_token_ids(file: JsonFields, field: str, vocab_size: int) -> None:
    """Refuse ids that the model has no row for.

    Raises:
        ModelLoadError: one of the field's ids is `vocab_size` or more, or it is no id at all.
    """
    for token_id in file.integers(field):
        if token_id >= vocab_size:
            raise file.error(f"{field} is {token_id}: it must be below vocab_size, {vocab_size}")


def suggested_sampling(folder: Path) -> SamplingDefaults:
    """What generation_config.json suggests for sampling, and say it in the log.

    A control that is written there is suggested as it is written; one that is not is neutral, whatever the
    reference library takes in its place. ``do_sample: false`` suggests temperature 0: always the likeliest
    token.

    Raises:
        ModelLoadError: a control is not a number, or one that no request could ask for.
    """
    path = folder / GENERATION_CONFIG_FILE
    if not path.is_file():
        return SamplingDefaults()
    file = JsonFields.of_file(path)
    neutral = SamplingDefaults()
    suggested = SamplingDefaults(
        temperature=_control(file, "temperature", neutral.temperature),
        # Some files write -1 for "all of them".
        top_k=max(0, file.integer("top_k", neutral.top_k, at_least=-1)),
        top_p=_control(file, "top_p", neutral.top_p),
        min_p=_control(file, "min_p", neutral.min_p),
        repetition_penalty=_control(file, "repetition_penalty", neutral.repetition_penalty),
    )
    if not file.boolean("do_sample", True):
        suggested = replace(suggested, temperature=0.0)
    if suggested != neutral:
        told = (
            f"{name} {value:g}" for name, value in asdict(suggested).items() if value != asdict(neutral)[name]
        )
        _log.info("%s suggests %s for requests that leave them open", path, ", ".join(told))
    return suggested


def write_generation_config(folder: Path, ends: Mapping[str, object], sampling: SamplingDefaults) -> None:
    """Write the file that `declared_eos_token_ids` and `suggested_sampling` read.

    Args:
        ends: bos_token_id and eos_token_id, as far as they are known.
        sampling: what to suggest; neutral controls are left out.
    """
    neutral = asdict(SamplingDefaults())
    suggested = {name: value for name, value in asdict(sampling).items() if value != neutral[name]}
    (folder / GENERATION_CONFIG_FILE).write_text(json.dumps({**ends, **suggested}, indent=2))


def _control(file: JsonFields, name: str, neutral: float) -> float:
    value = file.number(name, neutral)
    lowest, highest = _RANGES[name]
    if not lowest <= value <= highest:
        raise file.error(f"{name} is {value}, which no request could ask for: {lowest:g} to {highest:g}")
    return value
