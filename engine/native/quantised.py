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
_ROWS_AT_ONCE = 256


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
        values = _restore(self.kind, self.numbers, self.scales, self.least)
        return values.flatten(1)[:, : self.width]


def hold_exactly(weight: Tensor) -> QuantisedWeight | None:
    """Find the whole numbers that a weight was restored from, as those of many GGUF files are.

    Args:
        weight: (N, K), fp32, finite.

    Returns:
        Of four or, if they don't do, of eight bits; None where neither gives each number of `weight` back.
    """
    if weight.shape[1] % GROUP_SIZE:
        return None
    for kind in (WeightKind.INT4, WeightKind.INT8):
        parts = []
        # Some rows at a time: most weights show at their first that they are none, and memory stays small.
        for rows in torch.split(weight, _ROWS_AT_ONCE):
            part = _hold_rows(rows, kind)
            if part is None:
                break
            parts.append(part)
        else:
            numbers, scales, least = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            return QuantisedWeight(kind, weight.shape[1], numbers, scales, least)
    return None


def _hold_rows(rows: Tensor, kind: WeightKind) -> tuple[Tensor, Tensor, Tensor] | None:
    groups = rows.reshape(rows.shape[0], -1, GROUP_SIZE)
    lowest, highest = groups.aminmax(dim=-1)
    farthest = torch.where(-lowest > highest, lowest, highest)
    none = torch.zeros_like(farthest)
    # How the usual formats choose scales: Q4_1 spans a group's numbers, Q4_0 begins at the farthest from
    # zero, Q8_0 ends there, Q5_0 is there after sixteen steps.
    if kind is WeightKind.INT4:
        choices = [((highest - lowest) / _INT4_MOST, lowest), (farthest / -8, farthest)]
    else:
        choices = [(farthest / _INT8_MOST, none), (farthest / 16, none)]
    first = choices[0]
    numbers, scales, least = _round(groups, kind, *first)
    for choice in choices[1:]:
        is_missed = (_restore(kind, numbers, scales, least) != groups).any(-1)
        if not is_missed.any():
            break
        others = _round(groups, kind, *choice)
        numbers = torch.where(is_missed[..., None], others[0], numbers)
        scales, least = (
            torch.where(is_missed, other, one) for other, one in ((others[1], scales), (others[2], least))
        )
    is_exact = torch.equal(_restore(kind, numbers, scales, least), groups)
    return (numbers, scales, least) if is_exact else None


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
    return QuantisedWeight(kind, width, *_round(groups, kind, scales, least))


def _round(groups: Tensor, kind: WeightKind, scales: Tensor, least: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, scales and least values of groups, as they are kept."""
    scales, least = scales.half(), least.half()
    # A group of equal weights, or of weights too small for a scale, is its least value throughout.
    inverse = torch.where(scales != 0, 1.0 / scales.float(), 0.0)
    first, last = (-_INT8_MOST, _INT8_MOST) if kind is WeightKind.INT8 else (0, _INT4_MOST)
    numbers = ((groups - least.float()[..., None]) * inverse[..., None]).round_().clamp_(first, last)
    if kind is WeightKind.INT8:
        numbers += _INT8_OFFSET
    return numbers.to(torch.uint8), scales, least


def _restore(kind: WeightKind, numbers: Tensor, scales: Tensor, least: Tensor) -> Tensor:
    offset = _INT8_OFFSET if kind is WeightKind.INT8 else 0
    # The product is exact, so this rounds once.
    return (numbers.float() - offset) * scales.float()[..., None] + least.float()[..., None]
