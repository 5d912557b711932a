"""Which architectures are served, and how each one's config.json becomes a `DecoderSpec`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace.engine.models.json_file import JsonFields
from headrace.engine.models.rope import RopeKind, RopeSpec
from headrace.engine.models.spec import DecoderSpec

SpecBuilder = Callable[[JsonFields], DecoderSpec]

_COMMON_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
# "finetuned" only records how the weights were made; the reference writes the original length for every kind.
_SCALED_ROPE_KEYS = _COMMON_ROPE_KEYS | {"factor", "finetuned", "original_max_position_embeddings"}
_ROPE_KEYS: Mapping[RopeKind, set[str]] = {
    RopeKind.DEFAULT: _SCALED_ROPE_KEYS,
    RopeKind.LINEAR: _SCALED_ROPE_KEYS,
    RopeKind.DYNAMIC: _SCALED_ROPE_KEYS,
    RopeKind.LLAMA3: _SCALED_ROPE_KEYS | {"low_freq_factor", "high_freq_factor"},
    RopeKind.YARN: _SCALED_ROPE_KEYS
    | {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
}


def spec_of(config: JsonFields) -> DecoderSpec:
    """Describe the decoder that a config.json declares.

    Raises:
        ModelLoadError: the architecture is not served, or a field is missing, malformed, or would be ignored.
    """
    names = config.texts("architectures")
    supported = ", ".join(sorted(SUPPORTED_ARCHITECTURES))
    if not names:
        raise config.error(f"architectures is missing: it must name one of {supported}")
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return SUPPORTED_ARCHITECTURES[name](config)
    raise config.error(f"the architecture {', '.join(names)} is not supported; supported: {supported}")


def llama_spec(config: JsonFields) -> DecoderSpec:
    """Llama and what is built like it (SmolLM2, TinyLlama, ...); defaults are the reference library's."""
    _refuse_what_would_be_ignored(config)
    num_heads = config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    max_positions = config.integer("max_position_embeddings", 2048, at_least=2)
    return DecoderSpec(
        family="llama",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_dim=config.integer("head_dim", hidden_size // num_heads),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_positions,
        rope=rope_spec(config, max_positions),
        attention_bias=config.boolean("attention_bias", False),
        mlp_bias=config.boolean("mlp_bias", False),
        tied_head=config.boolean("tie_word_embeddings", False),
    )


SUPPORTED_ARCHITECTURES: Mapping[str, SpecBuilder] = {"LlamaForCausalLM": llama_spec}


def rope_spec(config: JsonFields, max_positions: int) -> RopeSpec:
    """Read rotary settings under the old names (rope_scaling, rope_theta) and the new one (rope_parameters).

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

    kind = _rope_kind(rope)
    if unknown := rope.keys - _ROPE_KEYS[kind]:
        raise rope.error(f"{', '.join(sorted(unknown))} has no meaning for rope type {kind}")
    if rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0)) != 1.0:
        raise rope.error("partial_rotary_factor other than 1 is not supported")
    theta = rope.number("rope_theta", config.number("rope_theta", 10_000.0))
    if kind is RopeKind.DEFAULT:
        return RopeSpec(theta=theta)
    # The reference prefers the top-level spelling, and takes the context itself where neither stands.
    original = config.integer(
        "original_max_position_embeddings", rope.integer("original_max_position_embeddings", max_positions)
    )
    if kind is RopeKind.LLAMA3:
        return RopeSpec(
            kind=kind,
            theta=theta,
            factor=rope.number("factor"),
            original_max_positions=original,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    if kind is RopeKind.YARN:
        return _yarn_spec(rope, theta, original, max_positions)
    return RopeSpec(kind=kind, theta=theta, factor=rope.number("factor"), original_max_positions=original)


def _yarn_spec(rope: JsonFields, theta: float, original: int, max_positions: int) -> RopeSpec:
    def optional(key: str) -> float | None:
        return None if rope.raw(key) is None else rope.number(key)

    return RopeSpec(
        kind=RopeKind.YARN,
        theta=theta,
        factor=rope.number("factor", max_positions / original),
        original_max_positions=original,
        attention_factor=optional("attention_factor"),
        # Zero stands for "the default" in the reference.
        beta_fast=optional("beta_fast") or 32.0,
        beta_slow=optional("beta_slow") or 1.0,
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=rope.boolean("truncate", True),
    )


def _rope_kind(rope: JsonFields) -> RopeKind:
    spellings = {key: rope.text(key) for key in ("rope_type", "type") if rope.raw(key) is not None}
    if len(set(spellings.values())) > 1:
        raise rope.error(f"rope_type {spellings['rope_type']!r} and type {spellings['type']!r} disagree")
    name = next(iter(spellings.values()), "default")
    try:
        return RopeKind(name)
    except ValueError:
        known = ", ".join(RopeKind)
        raise rope.error(f"the rope type {name!r} is not supported; supported: {known}") from None


def _refuse_what_would_be_ignored(config: JsonFields) -> None:
    """Settings that other members of the family use and that this decoder does not compute."""
    if (activation := config.text("hidden_act", "silu")) != "silu":
        raise config.error(f"hidden_act {activation!r} is not supported: only silu is")
    if config.object("quantization_config") is not None:
        raise config.error("the weights are quantized (quantization_config), which is not supported")
    if config.raw("sliding_window") is not None and config.boolean("use_sliding_window", True):
        raise config.error("sliding_window is not supported for this architecture")
    if set(config.texts("layer_types")) - {"full_attention"}:
        raise config.error("layer_types other than full_attention are not supported")
