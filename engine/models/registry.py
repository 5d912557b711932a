"""Which architectures are served.

An architecture that is not listed is refused, with the list of those that are. Running it through its own
`transformers` class with this engine's attention plugged in was considered: such a class decides by itself
about masks, about positions, about what it keeps between calls and about where one sequence ends and the next
begins. The engine could not promise for it that a row's result is its own alone, that a chunk, a preemption
or a cached prefix changes nothing, or that every setting of the file is honoured. A family is a description
of some thirty lines in `headrace.engine.models.families`, compared with the reference at every position: that
is the way to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace.engine.models import families
from headrace.engine.models.json_file import JsonFields
from headrace.engine.models.spec import DecoderSpec, HeadNorm

SpecBuilder = Callable[[JsonFields], DecoderSpec]

SUPPORTED_ARCHITECTURES: Mapping[str, SpecBuilder] = {
    "GemmaForCausalLM": families.gemma,
    "Gemma2ForCausalLM": families.gemma2,
    "Gemma3ForCausalLM": families.gemma3,
    "GraniteForCausalLM": families.granite,
    "LlamaForCausalLM": families.llama,
    "MistralForCausalLM": families.mistral,
    "MixtralForCausalLM": families.mixtral,
    "Olmo2ForCausalLM": families.olmo2,
    "Phi3ForCausalLM": families.phi3,
    "Qwen2ForCausalLM": families.qwen2,
    "Qwen3ForCausalLM": families.qwen3,
    "Qwen3MoeForCausalLM": families.qwen3_moe,
    "SmolLM3ForCausalLM": families.smollm3,
    "StableLmForCausalLM": families.stablelm,
}

_MOST: Mapping[str, int] = {
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "moe_intermediate_size": 2**22,
    "vocab_size": 2**24,
    "num_experts": 2**14,
    "num_local_experts": 2**14,
    "num_experts_per_tok": 2**14,
    "max_position_embeddings": 2**24,
    "original_max_position_embeddings": 2**24,
    "sliding_window": 2**31 - 1,
}
"""Far above every model there is: a greater number is a damaged file, and would be counted up to."""
_MOST_PARTS = 2**18


def spec_of(config: JsonFields) -> DecoderSpec:
    """Describe the decoder that a config.json declares.

    Raises:
        ModelLoadError: the architecture is not served, or a field is missing, malformed, or would be ignored.
    """
    _check_sizes(config)
    names = config.texts("architectures")
    supported = ", ".join(sorted(SUPPORTED_ARCHITECTURES))
    if not names:
        raise config.error(f"architectures is missing: it must name one of {supported}")
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            spec = SUPPORTED_ARCHITECTURES[name](config)
            families.check_layer_types(config, spec)
            _check_num_parts(config, spec)
            return spec
    raise config.error(f"the architecture {', '.join(names)} is not supported; supported: {supported}")


def _check_sizes(config: JsonFields) -> None:
    """Before anything is made in these numbers. What is no number at all is left to its reader."""
    for field, most in _MOST.items():
        value = config.raw(field)
        if isinstance(value, int) and value > most:
            raise config.error(f"{field} is {value}: it must be a whole number of {most} or less")


def _check_num_parts(config: JsonFields, spec: DecoderSpec) -> None:
    """Layers times what each is made of: every part has tensors with names of their own."""
    num_experts = sum(layer.experts.count for layer in spec.layers if layer.experts is not None)
    if num_experts > _MOST_PARTS:
        raise config.error(
            f"num_hidden_layers and num_experts make {num_experts} experts: "
            f"at most {_MOST_PARTS} are possible"
        )
    num_gains = spec.num_heads * spec.num_layers if spec.head_norm is HeadNorm.OWN_GAIN else 0
    if num_gains > _MOST_PARTS:
        raise config.error(
            f"num_hidden_layers and num_attention_heads make {num_gains} heads with a norm of their own: "
            f"at most {_MOST_PARTS} are possible"
        )
