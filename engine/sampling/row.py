"""What the sampler has to know of one row of a step."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engine.sampling.draws import Purpose
from headrace.engine.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class SampledRow:
    """How one row's token is chosen.

    Args:
        index: which of the request's sequences it is.
        position: of the token that is chosen.
        num_prompt_tokens: how many of the known tokens the caller gave.
        known_token_ids: all tokens up to the chosen one; may be empty unless `params.needs_history`.
        suppressed_token_ids: not to be chosen this time, whatever `params` says.
        allowed_bits: when given, only ids whose bit is set may be chosen: bit i % 8, from the lowest, of byte
            i // 8. No bytes at all forbid every token.
        purpose: what its number is for.
    """

    params: SamplingParams
    index: int
    position: int
    num_prompt_tokens: int = 0
    known_token_ids: tuple[int, ...] = ()
    suppressed_token_ids: frozenset[int] = frozenset()
    allowed_bits: bytes | None = None
    purpose: Purpose = Purpose.SAMPLE

    @property
    def is_adjusted(self) -> bool:
        """Whether anything but the model has a say in this row's logits, temperature aside."""
        return bool(self.suppressed_token_ids or self.allowed_bits is not None or self.params.is_adjusted)
