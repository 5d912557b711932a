"""What the runner asks of a model: a step's tokens in, logits of some of them out.

Letters: T tokens of the step, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from headrace.engine.attention.backend import AttentionStep


class ForwardModel(Protocol):
    """What the runner asks of a decoder."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    def hidden(self, input_ids: Tensor, positions: Tensor, attention: AttentionStep, rows: Tensor) -> Tensor:
        """Compute one step as far as the head.

        Args:
            input_ids, positions: (T,), int64.
            attention: this step's attention over the paged cache.
            rows: (R,), int64: tokens that `logits` is going to be asked for; may be empty.

        Returns:
            (R, hidden size).
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Go from some of `hidden`'s rows to logits.

        Args:
            hidden: (R, hidden size).

        Returns:
            (R, V), fp32.
        """
        ...
