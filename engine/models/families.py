"""The families of decoders, each as what it makes of a config.json: a `DecoderSpec`.

Defaults are the reference library's. A setting that a decoder here would have to ignore is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from headrace.engine.models.json_file import JsonFields
from headrace.engine.models.rope import RopeKind, RopeSpec
from headrace.engine.models.rope_config import RopeDefaults, rope_spec, rope_spec_of
from headrace.engine.models.spec import (
    Activation,
    DecoderSpec,
    ExpertsSpec,
    HeadNorm,
    LayerNames,
    LayerSpec,
    NormKind,
    NormSpec,
)

_FULL, _SLIDING = "full_attention", "sliding_attention"

_AROUND_EACH_HALF = LayerNames(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_BEHIND_EACH_HALF = LayerNames(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
_FUSED = LayerNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
_MIXTRAL_NAMES = LayerNames(
    router="block_sparse_moe.gate",
    expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    expert_down="block_sparse_moe.experts.{}.w2",
)
_STABLELM_NAMES = LayerNames(query_norm="self_attn.q_layernorm", key_norm="self_attn.k_layernorm")


# The reference's other names of the same functions.
_RENAMED_ACTIVATIONS = {
    "swish": Activation.SILU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
}


def llama(config: JsonFields) -> DecoderSpec:
    """Llama 2 and 3 and what is built like them (SmolLM2, TinyLlama, ...)."""
    _refuse_window(config)
    spec = _with_attention_bias(config, _plain(config, "llama", _rope(config)))
    return replace(spec, mlp_bias=config.boolean("mlp_bias", False))


def mistral(config: JsonFields) -> DecoderSpec:
    """Mistral: Llama with a sliding window in every layer."""
    # Left out, it is the first release's; null says that there is none.
    window = config.optional_integer("sliding_window", 4096)
    return _windowed(_plain(config, "mistral", _rope(config)), [window is not None], window)


def qwen2(config: JsonFields) -> DecoderSpec:
    """Qwen2 and 2.5: a bias on queries, keys and values; where switched on, a window in upper layers."""
    spec = _plain(config, "qwen2", _rope(config))
    return replace(_windowed(spec, *_qwen_windows(config, spec.num_layers)), qkv_bias=True)


def qwen3(config: JsonFields) -> DecoderSpec:
    """Qwen3: a norm per head on queries and keys, and no bias."""
    spec = _plain(config, "qwen3", _rope(config, head_dim=128), head_dim=128)
    return _with_qwen3_attention(config, _windowed(spec, *_qwen_windows(config, spec.num_layers)))


def qwen3_moe(config: JsonFields) -> DecoderSpec:
    """Qwen3's mixture of experts; some layers may have one MLP for all."""
    spec = _plain(config, "qwen3-moe", _rope(config))
    window = _switched_window(config)
    experts = ExpertsSpec(
        count=config.integer("num_local_experts", config.integer("num_experts", 128)),
        num_selected=config.integer("num_experts_per_tok", 8),
        intermediate_size=config.integer("moe_intermediate_size", 768),
        is_normalised=config.boolean("norm_topk_prob", False),
    )
    dense, every = set(config.integers("mlp_only_layers")), config.integer("decoder_sparse_step", 1)
    layers = tuple(
        replace(layer, window=window, experts=None if i in dense or (i + 1) % every else experts)
        for i, layer in enumerate(spec.layers)
    )
    return _with_qwen3_attention(config, replace(spec, layers=layers))


def mixtral(config: JsonFields) -> DecoderSpec:
    """Mixtral: Mistral with a mixture of experts in every layer."""
    spec = _plain(config, "mixtral", _rope(config, RopeDefaults(theta=1_000_000.0)), eps=1e-5)
    experts = ExpertsSpec(
        count=config.integer("num_local_experts", config.integer("num_experts", 8)),
        num_selected=config.integer("num_experts_per_tok", 2),
        intermediate_size=spec.intermediate_size,
        is_normalised=True,
    )
    window = config.optional_integer("sliding_window", None)
    layers = tuple(replace(layer, window=window, experts=experts) for layer in spec.layers)
    return replace(spec, layers=layers, names=_MIXTRAL_NAMES)


def phi3(config: JsonFields) -> DecoderSpec:
    """Phi-3 and Phi-4: fused projections, a part of each head turned, longrope, a window in every layer."""
    defaults = RopeDefaults(
        is_partial=True,
        original_max_positions=4096,
        # Earlier releases' names of the one scaling that the family has.
        renamed_kinds={"su": RopeKind.LONGROPE, "yarn": RopeKind.LONGROPE},
    )
    rope = _rope(config, defaults)
    if rope.kind not in (RopeKind.DEFAULT, RopeKind.LONGROPE):
        raise config.error(f"the rope type {rope.kind} is not one of this family: default, longrope")
    window = config.optional_integer("sliding_window", None)
    spec = replace(_plain(config, "phi3", rope, eps=1e-5), names=_FUSED)
    return _windowed(spec, [window is not None], window)


def gemma(config: JsonFields) -> DecoderSpec:
    """Gemma: gains stored as their distance from 1, a scaled embedding, a GELU gate."""
    _refuse_window(config)
    # The first files say "gelu" and mean its tanh form, which the reference reads, too.
    activation = config.text("hidden_act", "gelu_pytorch_tanh")
    return _gemma_like(
        config, "gemma", _rope(config), "gelu_pytorch_tanh" if activation == "gelu" else activation
    )


def gemma2(config: JsonFields) -> DecoderSpec:
    """Gemma 2: norms around each half, soft caps on scores and logits, a window in every other layer."""
    activation = config.text("hidden_activation", "gelu_pytorch_tanh")
    spec = _gemma_like(config, "gemma2", _rope(config, head_dim=256), activation)
    kinds = _layer_kinds(config, [_FULL if i % 2 else _SLIDING for i in range(spec.num_layers)])
    spec = _windowed(spec, [kind == _SLIDING for kind in kinds], _window(config, 4096))
    return replace(
        spec,
        names=_AROUND_EACH_HALF,
        attention_scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_soft_cap=config.optional_number("attn_logit_softcapping", 50.0),
        logits_soft_cap=config.optional_number("final_logit_softcapping", 30.0),
    )


def gemma3(config: JsonFields) -> DecoderSpec:
    """Gemma 3, text: as Gemma 2 with a norm per head, and local layers that turn by another base."""
    activation = config.text("hidden_activation", "gelu_pytorch_tanh")
    head_dim, max_positions = _head_dim(config, 256), _max_positions(config)
    ropes = config.object("rope_parameters")
    if ropes is not None and ropes.keys - {_FULL, _SLIDING}:
        raise ropes.error(f"it must hold {_FULL} and {_SLIDING}, one set of settings for each kind of layer")
    ropes = ropes or JsonFields({}, f"{config.source}: rope_parameters")
    nothing = JsonFields({}, config.source)
    whole = rope_spec_of(
        ropes.object(_FULL) or config.object("rope_scaling") or nothing,
        config,
        head_dim,
        max_positions,
        RopeDefaults(theta=1_000_000.0),
    )
    local_theta = config.number("rope_local_base_freq", 10_000.0)
    local = rope_spec_of(
        ropes.object(_SLIDING) or nothing, nothing, head_dim, max_positions, RopeDefaults(theta=local_theta)
    )
    if config.raw("attn_logit_softcapping") is not None:
        # The reference reads it for this family and doesn't apply it.
        raise config.error("attn_logit_softcapping is not supported for this architecture")
    spec = _gemma_like(config, "gemma3", whole, activation)
    period = config.integer("sliding_window_pattern", config.integer("_sliding_window_pattern", 6))
    kinds = _layer_kinds(config, [_SLIDING if (i + 1) % period else _FULL for i in range(spec.num_layers)])
    window = _window(config, 4096)
    layers = tuple(LayerSpec(local, window) if kind == _SLIDING else LayerSpec(whole) for kind in kinds)
    return replace(
        spec,
        layers=layers,
        names=_AROUND_EACH_HALF,
        head_norm=HeadNorm.PER_HEAD,
        attention_scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        logits_soft_cap=config.optional_number("final_logit_softcapping", None),
    )


def olmo2(config: JsonFields) -> DecoderSpec:
    """OLMo 2: norms behind each half instead of before it, and over all query and all key heads together."""
    _refuse_window(config)
    spec = _with_attention_bias(config, _plain(config, "olmo2", _rope(config), eps=1e-5))
    return replace(spec, names=_BEHIND_EACH_HALF, head_norm=HeadNorm.WHOLE)


def granite(config: JsonFields) -> DecoderSpec:
    """Granite 3: Llama with a factor on embedding, scores, residuals and logits."""
    spec = llama(config)
    return replace(
        spec,
        family="granite",
        embedding_scale=config.number("embedding_multiplier", 1.0),
        attention_scale=config.number("attention_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logits_divisor=config.number("logits_scaling", 1.0),
    )


def smollm3(config: JsonFields) -> DecoderSpec:
    """SmolLM3: Llama in which every fourth layer does not turn queries and keys."""
    rope = _rope(config, RopeDefaults(theta=2_000_000.0))
    spec = _plain(config, "smollm3", rope, tied=True)
    num_layers, every = spec.num_layers, config.integer("no_rope_layer_interval", 4)
    has_rope = config.integers("no_rope_layers") or [int((i + 1) % every != 0) for i in range(num_layers)]
    if len(has_rope) != num_layers:
        raise config.error(f"no_rope_layers has {len(has_rope)} entries for {num_layers} layers")
    window = _switched_window(config, None)
    default_kinds = [_FULL if turned or window is None else _SLIDING for turned in has_rope]
    kinds = _layer_kinds(config, default_kinds)
    spec = _windowed(spec, [kind == _SLIDING for kind in kinds], window)
    layers = tuple(
        replace(layer, rope=rope if turned else None)
        for layer, turned in zip(spec.layers, has_rope, strict=True)
    )
    spec = _with_attention_bias(config, spec)
    return replace(spec, layers=layers, mlp_bias=config.boolean("mlp_bias", False))


def stablelm(config: JsonFields) -> DecoderSpec:
    """StableLM: layer norms with a bias, a part of each head turned, and both halves side by side in some."""
    _refuse_window(config)
    rope = _rope(config, RopeDefaults(is_partial=True, partial_factor=0.25))
    norm = NormSpec(config.number("layer_norm_eps", 1e-5), NormKind.LAYER, has_bias=True)
    is_parallel = config.boolean("use_parallel_residual", False)
    return replace(
        _plain(config, "stablelm", rope),
        norm=norm,
        names=replace(_STABLELM_NAMES, before_mlp=None) if is_parallel else _STABLELM_NAMES,
        head_norm=HeadNorm.OWN_GAIN if config.boolean("qk_layernorm", False) else HeadNorm.NONE,
        qkv_bias=config.boolean("use_qkv_bias", False),
        is_parallel=is_parallel,
    )


def check_layer_types(config: JsonFields, spec: DecoderSpec) -> None:
    """Compare the windows that a file lists with those that its family makes of the other fields.

    Raises:
        ModelLoadError: the family would ignore the list.
    """
    kinds = [_FULL if layer.window is None else _SLIDING for layer in spec.layers]
    if (written := config.texts("layer_types")) and list(written) != kinds:
        raise config.error(
            f"layer_types other than {', '.join(kinds)} are not supported for this architecture"
        )


def _plain(
    config: JsonFields,
    family: str,
    rope: RopeSpec,
    *,
    eps: float = 1e-6,
    head_dim: int | None = None,
    tied: bool = False,
    activation: str | None = None,
) -> DecoderSpec:
    """What all families read alike. Keywords are what a family means by leaving a field out.

    Args:
        rope: of every layer.
        activation: of the MLP, where the family has a field of its own for it.
    """
    if config.object("quantization_config") is not None:
        raise config.error("the weights are quantized (quantization_config), which is not supported")
    if config.boolean("use_bidirectional_attention", False):
        raise config.error("use_bidirectional_attention is not supported: a decoder looks back alone")
    num_heads = config.integer("num_attention_heads")
    return DecoderSpec(
        family=family,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_dim=_head_dim(config, head_dim),
        max_position_embeddings=_max_positions(config),
        norm=NormSpec(config.number("rms_norm_eps", eps)),
        layers=(LayerSpec(rope),) * config.integer("num_hidden_layers"),
        activation=_activation(config, activation),
        tied_head=config.boolean("tie_word_embeddings", tied),
    )


def _gemma_like(config: JsonFields, family: str, rope: RopeSpec, activation: str) -> DecoderSpec:
    spec = _plain(config, family, rope, head_dim=256, tied=True, activation=activation)
    norm = replace(spec.norm, offset=1.0)
    return _with_attention_bias(config, replace(spec, norm=norm, embedding_scale=math.sqrt(spec.hidden_size)))


def _with_qwen3_attention(config: JsonFields, spec: DecoderSpec) -> DecoderSpec:
    return _with_attention_bias(config, replace(spec, head_norm=HeadNorm.PER_HEAD))


def _with_attention_bias(config: JsonFields, spec: DecoderSpec) -> DecoderSpec:
    has_bias = config.boolean("attention_bias", False)
    return replace(spec, qkv_bias=has_bias, attention_out_bias=has_bias)


def _rope(
    config: JsonFields, defaults: RopeDefaults | None = None, *, head_dim: int | None = None
) -> RopeSpec:
    return rope_spec(config, _head_dim(config, head_dim), _max_positions(config), defaults)


def _head_dim(config: JsonFields, default: int | None = None) -> int:
    if default is None and config.raw("head_dim") is None:
        hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        default, rest = divmod(hidden_size, num_heads)
        if rest or default < 1:
            raise config.error(
                f"hidden_size is {hidden_size}: without head_dim it must be a multiple of "
                f"num_attention_heads, {num_heads}"
            )
    return config.integer("head_dim", default)


def _max_positions(config: JsonFields) -> int:
    return config.integer("max_position_embeddings", 2048, at_least=2)


def _activation(config: JsonFields, name: str | None) -> Activation:
    name = name or config.text("hidden_act", "silu")
    try:
        return Activation(_RENAMED_ACTIVATIONS.get(name, name))
    except ValueError:
        known = ", ".join(Activation)
        raise config.error(
            f"the activation {name!r} (hidden_act) is not supported; supported: {known}"
        ) from None


def _windowed(spec: DecoderSpec, is_sliding: Sequence[bool], window: int | None) -> DecoderSpec:
    """Give some layers a window. `is_sliding` has an entry for each layer, or one for all."""
    choices = is_sliding if len(is_sliding) > 1 else list(is_sliding) * spec.num_layers
    layers = tuple(
        replace(layer, window=window if sliding else None)
        for layer, sliding in zip(spec.layers, choices, strict=True)
    )
    return replace(spec, layers=layers)


def _window(config: JsonFields, default: int) -> int:
    """The window of the layers that have one."""
    window = config.optional_integer("sliding_window", default)
    if window is None:
        raise config.error("sliding_window is null, and some layers need it")
    return window


def _switched_window(config: JsonFields, default: int | None = 4096) -> int | None:
    """The window where use_sliding_window switches it on."""
    is_on = config.boolean("use_sliding_window", False)
    return config.optional_integer("sliding_window", default) if is_on else None


def _qwen_windows(config: JsonFields, num_layers: int) -> tuple[list[bool], int | None]:
    """Which layers have a window, and which."""
    window = _switched_window(config)
    first = config.integer("max_window_layers", 28, at_least=0)
    default = [_SLIDING if window is not None and i >= first else _FULL for i in range(num_layers)]
    kinds = _layer_kinds(config, default)
    if window is None and _SLIDING in kinds:
        raise config.error(
            f"layer_types names {_SLIDING}, and use_sliding_window with sliding_window does not"
        )
    return [kind == _SLIDING for kind in kinds], window


def _layer_kinds(config: JsonFields, default: Sequence[str]) -> Sequence[str]:
    kinds = config.texts("layer_types") or default
    if len(kinds) != len(default):
        raise config.error(f"layer_types has {len(kinds)} entries for {len(default)} layers")
    if unknown := set(kinds) - {_FULL, _SLIDING}:
        raise config.error(f"layer_types names {', '.join(sorted(unknown))}; supported: {_FULL}, {_SLIDING}")
    return kinds


def _refuse_window(config: JsonFields) -> None:
    """For families whose layers all see everything."""
    if config.raw("sliding_window") is not None and config.boolean("use_sliding_window", True):
        raise config.error("sliding_window is not supported for this architecture")
