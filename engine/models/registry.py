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
from headrace.engine.models.spec import DecoderSpec

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
            spec = SUPPORTED_ARCHITECTURES[name](config)
            families.check_layer_types(config, spec)
            return spec
    raise config.error(f"the architecture {', '.join(names)} is not supported; supported: {supported}")
