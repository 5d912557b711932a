"""Weights of eight or four bits, in groups along the input that have scales of their own.

Letters: N outputs, K inputs, G groups of an output.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP_SIZE = 32
"""Inputs of a group: as many as in GGUF's common types, so that what had those keeps its numbers."""

_INT8_OFFSET, _INT8_MOST, _INT4_MOST = 128, 127, 15


class WeightKind(Enum):
    """How the weights of linear layers are kept; the value is the kernels' name for it."""

    SAME = 0
    """In the type that the model computes in."""
    INT8 = 1
    """Whole numbers from -127 to 127 times the group's scale."""
    INT4 = 2
    """Whole numbers from 0 to 15 times the group's scale, added to its least value."""
    KEPT_BF16 = 3
    """In bf16 while the model computes in fp32: for weights that bf16 holds exactly."""
    WITH_INT8 = 4
    """In fp32 and, for products of few rows, as INT8, too: for weights that eight bits hold exactly."""
    WITH_INT4 = 5
    """In fp32 and, for products of few rows, as INT4, too: for weights that four bits hold exactly."""


KEPT_KINDS = frozenset({WeightKind.KEPT_BF16, WeightKind.WITH_INT8, WeightKind.WITH_INT4})
"""Fewer bits are read than is computed in, and nothing is lost by it."""

WITH_NUMBERS = {WeightKind.INT4: WeightKind.WITH_INT4, WeightKind.INT8: WeightKind.WITH_INT8}
"""How a weight is kept with numbers of a kind beside it, the fewest bits first."""


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A weight as whole numbers.

    Args:
        width: K. The last group is filled up with zeros.
        numbers: (N, G, 32), uint8; of eight bits 128 above what they mean.
        scales: (N, G), float16.
        least: (N, G), float16: what a number of zero means; of eight bits all zero.
    """

    kind: WeightKind
    width: int
    numbers: Tensor
    scales: Tensor
    least: Tensor

    def restored(self) -> Tensor:
        """What the numbers mean: (N, K), fp32."""
        offset = _INT8_OFFSET if self.kind is WeightKind.INT8 else 0
        values = (self.numbers.float() - offset) * self.scales.float()[..., None]
        return (values + self.least.float()[..., None]).flatten(1)[:, : self.width]


def likely_scales(groups: Tensor, kind: WeightKind) -> tuple[Tensor, Tensor]:
    """What the usual formats would choose for groups of numbers that they give.

    Args:
        groups: (N, G, 32), fp32, finite.
        kind: INT8 or INT4.

    Returns:
        Scales and least values, fp32 as fp16 holds them: (choices, N, G) both.
    """
    # Together they would take three times as long.
    lowest, highest = groups.amin(dim=-1), groups.amax(dim=-1)
    farthest = torch.where(-lowest > highest, lowest, highest)
    # Q4_1 spans a group's numbers, Q4_0 begins at the farthest from zero, Q8_0 ends there, Q5_0 is
    # there after sixteen steps.
    if kind is WeightKind.INT4:
        choices = [((highest - lowest) / _INT4_MOST, lowest), (farthest / -8, farthest)]
    else:
        none = torch.zeros_like(farthest)
        choices = [(farthest / _INT8_MOST, none), (farthest / 16, none)]
    scales, least = (torch.stack(parts).half().float() for parts in zip(*choices, strict=True))
    return scales, least


def quantise(weight: Tensor, kind: WeightKind) -> QuantisedWeight:
    """Round every weight to the nearest number that its group can hold.

    Args:
        weight: (N, K), finite.
        kind: INT8 or INT4.
    """
    width = weight.shape[1]
    groups = F.pad(weight.float(), (0, -width % GROUP_SIZE)).view(weight.shape[0], -1, GROUP_SIZE)
    lowest, highest = groups.aminmax(dim=-1)
    if kind is WeightKind.INT8:
        scales, least = torch.maximum(-lowest, highest) / _INT8_MOST, torch.zeros_like(lowest)
    else:
        scales, least = (highest - lowest) / _INT4_MOST, lowest
    scales, least = scales.half(), least.half()
    # A group of equal weights, or of weights too small for a scale, is its least value throughout.
    inverse = torch.where(scales > 0, 1.0 / scales.float(), 0.0)
    first, last = (-_INT8_MOST, _INT8_MOST) if kind is WeightKind.INT8 else (0, _INT4_MOST)
    numbers = ((groups - least.float()[..., None]) * inverse[..., None]).round_().clamp_(first, last)
    if kind is WeightKind.INT8:
        numbers += _INT8_OFFSET
    return QuantisedWeight(kind, width, numbers.to(torch.uint8), scales, least)
