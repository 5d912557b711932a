"""How a config.json describes rotary positions, under its older and newer names, as a `RopeSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.engine.models.json_file import JsonFields
from headrace.engine.models.rope import RopeKind, RopeSpec

_MOST_POSITIONS = 2**24
_COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
# "finetuned" only records how the weights were made; the reference writes the original length for every kind.
_SCALED_KEYS = _COMMON_KEYS | {"factor", "finetuned", "original_max_position_embeddings"}
_KEYS: Mapping[RopeKind, set[str]] = {
    RopeKind.DEFAULT: _SCALED_KEYS,
    RopeKind.LINEAR: _SCALED_KEYS,
    RopeKind.DYNAMIC: _SCALED_KEYS,
    RopeKind.LLAMA3: _SCALED_KEYS | {"low_freq_factor", "high_freq_factor"},
    RopeKind.YARN: _SCALED_KEYS
    | {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    RopeKind.LONGROPE: _SCALED_KEYS | {"attention_factor", "short_factor", "long_factor"},
}


@dataclass(frozen=True, slots=True)
class RopeDefaults:
    """What a family means by leaving a setting out, and what it calls things.

    Args:
        theta: base of the wavelengths.
        is_partial: whether the family turns a part of each head at all; a part is refused for the others, for
            the reference would not heed it.
        partial_factor: that part.
        original_max_positions: context before stretching; None takes the context itself.
        renamed_kinds: the family's own names of kinds.
    """

    theta: float = 10_000.0
    is_partial: bool = False
    partial_factor: float = 1.0
    original_max_positions: int | None = None
    renamed_kinds: Mapping[str, RopeKind] | None = None


def rope_spec(
    config: JsonFields, head_dim: int, max_positions: int, defaults: RopeDefaults | None = None
) -> RopeSpec:
    """Read rotary settings under the old names (rope_scaling, rope_theta) and the new one (rope_parameters).

    Args:
        config: of the model.
        max_positions: context length that the model declares, tokens.

    Raises:
        ModelLoadError: the kind is unknown, or a setting of it is.
    """
    scaling, parameters = config.object("rope_scaling"), config.object("rope_parameters")
    if (
        scaling is not None
        and parameters is not None
        and config.raw("rope_scaling") != config.raw("rope_parameters")
    ):
        raise config.error("rope_scaling and rope_parameters disagree: keep one of them")
    rope = scaling or parameters or JsonFields({}, f"{config.source}: rope_scaling")
    return rope_spec_of(rope, config, head_dim, max_positions, defaults or RopeDefaults())


def rope_spec_of(
    rope: JsonFields, config: JsonFields, head_dim: int, max_positions: int, defaults: RopeDefaults
) -> RopeSpec:
    """Read one object of rotary settings; what it leaves out may stand in the config.json around it.

    Raises:
        ModelLoadError: as for `rope_spec`.
    """
    kind = _kind(rope, defaults.renamed_kinds or {})
    if unknown := rope.keys - _KEYS[kind]:
        raise rope.error(f"{', '.join(sorted(unknown))} has no meaning for rope type {kind}")
    theta = rope.number("rope_theta", config.number("rope_theta", defaults.theta))
    rotary_dim = _rotary_dim(rope, config, head_dim, defaults)
    if kind is RopeKind.DEFAULT:
        return RopeSpec(theta=theta, rotary_dim=rotary_dim)
    # The reference prefers the top-level spelling, and takes the context itself where neither stands.
    original = config.integer(
        "original_max_position_embeddings",
        defaults.original_max_positions or _original_positions(rope, max_positions),
        at_least=0,
    )
    if kind is RopeKind.LLAMA3:
        return RopeSpec(
            kind=kind,
            theta=theta,
            rotary_dim=rotary_dim,
            factor=rope.number("factor"),
            original_max_positions=original,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    if kind is RopeKind.YARN:
        return _yarn_spec(rope, theta, rotary_dim, original, max_positions)
    if kind is RopeKind.LONGROPE:
        return _longrope_spec(rope, theta, rotary_dim, original, max_positions)
    return RopeSpec(
        kind=kind,
        theta=theta,
        rotary_dim=rotary_dim,
        factor=rope.number("factor"),
        original_max_positions=original,
    )


def _rotary_dim(rope: JsonFields, config: JsonFields, head_dim: int, defaults: RopeDefaults) -> int | None:
    part = rope.number(
        "partial_rotary_factor", config.number("partial_rotary_factor", defaults.partial_factor)
    )
    if part == 1.0:
        return None
    if not defaults.is_partial:
        raise rope.error("partial_rotary_factor other than 1 is not supported for this architecture")
    if not 0 < part < 1:
        raise rope.error(f"partial_rotary_factor is {part}: it must be above 0 and at most 1")
    return int(head_dim * part)


def _yarn_spec(
    rope: JsonFields, theta: float, rotary_dim: int | None, original: int, max_positions: int
) -> RopeSpec:
    return RopeSpec(
        kind=RopeKind.YARN,
        theta=theta,
        rotary_dim=rotary_dim,
        factor=rope.number("factor", max_positions / max(original, 1)),
        original_max_positions=original,
        attention_factor=_optional(rope, "attention_factor"),
        # Zero stands for "the default" in the reference.
        beta_fast=_optional(rope, "beta_fast") or 32.0,
        beta_slow=_optional(rope, "beta_slow") or 1.0,
        mscale=_optional(rope, "mscale"),
        mscale_all_dim=_optional(rope, "mscale_all_dim"),
        truncate=rope.boolean("truncate", True),
    )


def _longrope_spec(
    rope: JsonFields, theta: float, rotary_dim: int | None, original: int, max_positions: int
) -> RopeSpec:
    short, long = rope.numbers("short_factor"), rope.numbers("long_factor")
    if not short or len(short) != len(long):
        raise rope.error(
            "rope type longrope needs short_factor and long_factor, two lists of numbers of equal length"
        )
    return RopeSpec(
        kind=RopeKind.LONGROPE,
        theta=theta,
        rotary_dim=rotary_dim,
        # A context that was not stretched has the factor 1, however the two lengths are written.
        factor=max(1.0, rope.number("factor", max_positions / max(original, 1))),
        original_max_positions=original,
        attention_factor=_optional(rope, "attention_factor"),
        short_factors=short,
        long_factors=long,
    )


def _original_positions(rope: JsonFields, default: int) -> int:
    original = rope.integer("original_max_position_embeddings", default, at_least=0)
    if original > _MOST_POSITIONS:
        raise rope.error(
            f"original_max_position_embeddings is {original}: it must be {_MOST_POSITIONS} or less"
        )
    return original


def _optional(rope: JsonFields, key: str) -> float | None:
    return None if rope.raw(key) is None else rope.number(key)


def _kind(rope: JsonFields, renamed: Mapping[str, RopeKind]) -> RopeKind:
    names = {key: rope.text(key) for key in ("rope_type", "type") if rope.raw(key) is not None}
    spellings = {key: renamed.get(name, name) for key, name in names.items()}
    if len(set(spellings.values())) > 1:
        raise rope.error(f"rope_type {names['rope_type']!r} and type {names['type']!r} disagree")
    name = next(iter(spellings.values()), "default")
    try:
        return RopeKind(name)
    except ValueError:
        known = ", ".join(RopeKind)
        raise rope.error(f"the rope type {name!r} is not supported; supported: {known}") from None
