"""Rotary positions as GGUF files describe them: in metadata, and in tensors of factors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from headrace.engine.models.json_file import JsonFields

ConfigFields = dict[str, object]
RopeFactors = Mapping[str, tuple[float, ...]]
"""The factors of each tensor of `ROPE_FACTOR_TENSORS` that a file holds."""

COMMON_FACTORS, SHORT_FACTORS, LONG_FACTORS = (
    "rope_freqs.weight",
    "rope_factors_short.weight",
    "rope_factors_long.weight",
)
ROPE_FACTOR_TENSORS = frozenset({COMMON_FACTORS, SHORT_FACTORS, LONG_FACTORS})
"""Tensors that no layer computes with: by how much each wavelength is stretched, one entry for each pair."""

ROPE_KEYS = frozenset(
    f"rope.scaling.{key}"
    for key in (
        "type",
        "factor",
        "original_context_length",
        "attn_factor",
        "finetuned",
        "yarn_attn_factor",
        "yarn_beta_fast",
        "yarn_beta_slow",
        "yarn_ext_factor",
    )
)
"""Metadata that is read here. That a scaling was trained with ("finetuned") changes nothing."""


def shortest(value: float) -> float:
    """The decimal number that was meant: the file holds its rounding to 32 bits."""
    return float(str(np.float32(value)))


def rope_fields(metadata: JsonFields, name: str, factors: RopeFactors) -> ConfigFields:
    """What a config.json says of the same rotary positions.

    Args:
        metadata: of the file.
        name: llama.cpp's, of the architecture.
        factors: of the file's tensors.

    Raises:
        ModelLoadError: they can't be said so.
    """
    kind = metadata.text(f"{name}.rope.scaling.type", "none")
    scaling = _Scaling(metadata, f"{name}.rope.scaling.")
    context = metadata.integer(f"{name}.context_length")
    original = metadata.integer(scaling.key("original_context_length"), context)
    if factors.keys() & {SHORT_FACTORS, LONG_FACTORS} or kind == "longrope":
        return _longrope(metadata, scaling, original, factors)
    match kind:
        case "none" | "linear":
            scaling.require_one("attn_factor")
            factor = scaling.number("factor") if kind == "linear" else 1.0
            return {"rope_scaling": _stretched(factor, context, factors.get(COMMON_FACTORS))}
        case "yarn" if not factors:
            return {"rope_scaling": _yarn(scaling, original)}
        case "yarn":
            raise metadata.error(f"{COMMON_FACTORS} beside rope scaling 'yarn' can't be converted")
        case _:
            raise metadata.error(
                f"rope scaling {kind!r} can't be converted exactly; supported: none, linear, yarn, longrope"
            )


class _Scaling:
    """The numbers of `rope.scaling`."""

    def __init__(self, metadata: JsonFields, prefix: str) -> None:
        self._metadata, self._prefix = metadata, prefix

    def key(self, key: str) -> str:
        return self._prefix + key

    def number(self, key: str, default: float | None = None) -> float:
        return shortest(self._metadata.number(self.key(key), default))

    def require_one(self, *keys: str) -> None:
        for key in keys:
            if (value := self.number(key, 1.0)) != 1.0:
                raise self._metadata.error(
                    f"{self.key(key)} is {value}, which can't be converted: only 1 can"
                )


def _stretched(factor: float, context: int, factors: tuple[float, ...] | None) -> ConfigFields | None:
    if factors is None:
        return {"rope_type": "linear", "factor": factor} if not math.isclose(factor, 1.0) else None
    # Llama 3.1 and later. llama.cpp divides each frequency by an entry of the tensor, however it was made:
    # that is longrope with one set of factors.
    stretches = [factor * entry for entry in factors]
    return _factors(stretches, stretches, context, 1.0)


def _longrope(metadata: JsonFields, scaling: _Scaling, original: int, factors: RopeFactors) -> ConfigFields:
    if factors.keys() != {SHORT_FACTORS, LONG_FACTORS}:
        raise metadata.error(
            f"rope scaling 'longrope' needs the tensors {SHORT_FACTORS} and {LONG_FACTORS}, and no others"
        )
    attention_factor = scaling.number("attn_factor", 1.0)
    rope = _factors(list(factors[SHORT_FACTORS]), list(factors[LONG_FACTORS]), original, attention_factor)
    return {"rope_scaling": rope, "original_max_position_embeddings": original}


def _factors(short: list[float], long: list[float], original: int, attention_factor: float) -> ConfigFields:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
        "attention_factor": attention_factor,
    }


def _yarn(scaling: _Scaling, original: int) -> ConfigFields:
    scaling.require_one("yarn_ext_factor")
    factor = scaling.number("factor")
    # llama.cpp multiplies YaRN's own attention factor by those that a file names.
    extra = scaling.number("attn_factor", 1.0) * scaling.number("yarn_attn_factor", 1.0)
    rope: ConfigFields = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": scaling.number("yarn_beta_fast", 32.0),
        "beta_slow": scaling.number("yarn_beta_slow", 1.0),
    }
    if extra != 1.0:
        rope["attention_factor"] = extra * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    return rope
