"""Sums along the vocabulary that come out the same to the last bit whatever shares the batch.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

RUN = 256
"""Tokens that are added up before the totals are. torch adds up a row of this length in one fixed order,
while the order of a longer one depends on how many rows and threads there are."""


def runs(weights: Tensor) -> Tensor:
    """(R, runs, `RUN`): (R, V) cut into runs, the last one filled up with 0."""
    missing = -weights.shape[1] % RUN
    padded = F.pad(weights, (0, missing)) if missing else weights
    return padded.view(weights.shape[0], -1, RUN)


def cumulated_runs(weights: Tensor) -> Tensor:
    """(R, runs), fp64: the total of each run and of all before it."""
    return runs(weights).sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)


def totals(weights: Tensor) -> Tensor:
    """(R,), fp64: the total of each row."""
    return cumulated_runs(weights)[:, -1]
