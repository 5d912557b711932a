"""Settings of speculation: who proposes tokens, and how many."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings

from headrace.engine import MAX_SPECULATIVE_TOKENS, DraftSampling, Speculation, SpeculationConfig


class SpeculationSettings(BaseSettings):
    """Part of `ServiceConfig`."""

    speculation: Literal["none", "prompt_lookup", "draft_model"] | None = Field(
        None,
        description="who proposes tokens that the model then verifies, several in one step: nobody; what "
        "followed the same words before, in prompt or answer; or a small model. The answers stay the same. "
        "Unset: draft_model with --draft-model, else none",
    )
    draft_model: str | None = Field(
        None,
        min_length=1,
        description="small model of the same vocabulary that proposes tokens: whatever --model takes",
    )
    num_speculative_tokens: int | None = Field(
        None,
        ge=1,
        le=MAX_SPECULATIVE_TOKENS,
        description="how many tokens are proposed per step; unset: as many as pay at the time, or none",
    )
    max_speculative_tokens: int | None = Field(
        None,
        ge=1,
        le=MAX_SPECULATIVE_TOKENS,
        description="most that may be proposed per step, by the server or by a request that asks for a "
        "number; unset: 8, or --num-speculative-tokens if that is more",
    )
    draft_sampling: Literal["auto", "coupled", "rejection"] = Field(
        "auto",
        description="how a draft model's tokens are judged where tokens are drawn, not greedy. coupled: a "
        "seed gives the same answer with and without speculation; rejection: more are kept, and the "
        "distribution alone is the same; auto: coupled for requests that bring a seed, else rejection",
    )

    draft_weight_dtype: Literal["same", "int8", "int4"] = Field(
        "same",
        description="as --weight-dtype, for the draft model: it gets faster, and the answers stay the same",
    )

    def speculation_config(self, draft_path: Path | None = None) -> SpeculationConfig:
        """What the engine is told.

        Args:
            draft_path: where the draft model's files are; None takes its name for it.
        """
        kind = self.speculation or ("none" if self.draft_model is None else "draft_model")
        if self.draft_model is not None and draft_path is None:
            draft_path = Path(self.draft_model)
        return SpeculationConfig(
            kind=Speculation(kind),
            draft_model=draft_path,
            num_speculative_tokens=self.num_speculative_tokens,
            max_speculative_tokens=self.max_speculative_tokens or max(8, self.num_speculative_tokens or 0),
            draft_sampling=DraftSampling(self.draft_sampling),
            draft_weight_dtype=self.draft_weight_dtype,
        )
