"""Rotary position embedding (RoFormer, arXiv 2104.09864) and its long variants (YaRN, arXiv 2309.00071;
LongRoPE, arXiv 2402.13753).

Every variant is either computed as the reference library computes it or refused when the model is loaded: a
scaling that is read wrongly degrades long inputs without any error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.engine.errors import ModelLoadError
from headrace.engine.native.kit import native_kit

# Far beyond every model; within them all that is computed stays finite.
_GREATEST_THETA, _GREATEST_FACTOR = 1e30, 1e6
_LEAST_BETA, _GREATEST_BETA = 1e-6, 1e6
_POSITIONS_AT_ONCE = 2**16


class RopeKind(StrEnum):
    """The variants that are computed exactly."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    DYNAMIC = "dynamic"
    """Depends on how long the sequence has grown, so cached keys would go stale. Up to the model's own length
    it is the default variant, and it is offered no further."""
    LONGROPE = "longrope"
    """One set of factors up to the original length and another for sequences that have grown beyond it, for
    their first tokens too: keys cached by then would go stale. So the longest sequence that is served decides
    once for all of them: up to the original length the short factors turn everything, beyond it the long
    ones do. The reference, which switches by the length of each sequence, gives the same for all sequences
    in the first case, and in the second for those that begin beyond the original length."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """How positions turn queries and keys. Values that a kind doesn't use are left at their defaults.

    Args:
        theta: base of the wavelengths.
        rotary_dim: how many of a head's coordinates are turned, the first ones; None turns all.
        factor: by how much the context was stretched.
        original_max_positions: context length before stretching.
        low_freq_factor, high_freq_factor: llama3: wavelengths beyond ``original / low`` are stretched whole,
            those below ``original / high`` not at all.
        attention_factor: yarn, longrope: factor on cosine and sine; None derives it from `factor`.
        beta_fast, beta_slow: yarn: rotations over the original context where the ramp begins and ends.
        mscale, mscale_all_dim: yarn: together they give the attention factor where it isn't named.
        truncate: yarn: whether the ramp's ends are rounded to whole dimensions.
        short_factors, long_factors: longrope: by how much each wavelength is stretched, one for every turned
            pair.
    """

    kind: RopeKind = RopeKind.DEFAULT
    theta: float = 10_000.0
    rotary_dim: int | None = None
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        # Written so that NaN is refused, too.
        if not (0 < self.theta <= _GREATEST_THETA and 1.0 <= self.factor <= _GREATEST_FACTOR):
            raise ModelLoadError(
                f"rope_theta {self.theta} and rope factor {self.factor} are out of range: "
                f"theta > 0, at most {_GREATEST_THETA:g}; factor >= 1, at most {_GREATEST_FACTOR:g}"
            )
        if self.kind is RopeKind.YARN:
            self._check_yarn()
        if self.attention_factor is not None and not 0 < self.attention_factor < math.inf:
            raise ModelLoadError(f"rope attention_factor must be above 0, not {self.attention_factor}")
        if self.kind is RopeKind.LONGROPE and self.original_max_positions == 1:
            raise ModelLoadError("longrope needs original_max_position_embeddings of 2 or more, not 1")
        if self.kind is RopeKind.LLAMA3 and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ModelLoadError(
                f"llama3 rope scaling needs 0 < low_freq_factor < high_freq_factor, "
                f"not {self.low_freq_factor} and {self.high_freq_factor}"
            )
        needs_original = self.kind in (RopeKind.LLAMA3, RopeKind.YARN, RopeKind.LONGROPE)
        if needs_original and self.original_max_positions < 1:
            raise ModelLoadError(
                f"{self.kind} rope scaling needs original_max_position_embeddings of 1 or more, "
                f"not {self.original_max_positions}"
            )
        least = min((*self.short_factors, *self.long_factors), default=1.0)
        if least <= 0:
            raise ModelLoadError(f"longrope factors must be above 0, not {least}")

    def _check_yarn(self) -> None:
        """Its formulas divide by the logarithm of theta and take that of the betas."""
        if not self.theta > 1:
            raise ModelLoadError(f"yarn rope scaling needs a rope_theta above 1, not {self.theta}")
        if not _LEAST_BETA <= self.beta_slow < self.beta_fast <= _GREATEST_BETA:
            raise ModelLoadError(
                f"yarn rope scaling needs {_LEAST_BETA:g} <= beta_slow < beta_fast <= {_GREATEST_BETA:g}, "
                f"not beta_slow {self.beta_slow} and beta_fast {self.beta_fast}"
            )
        for name, value in (("mscale", self.mscale), ("mscale_all_dim", self.mscale_all_dim)):
            if value is not None and not 0 <= value < math.inf:
                raise ModelLoadError(f"yarn rope scaling needs a {name} of 0 or more, not {value}")

    def num_turned(self, head_dim: int) -> int:
        """How many coordinates of a head are turned."""
        return head_dim if self.rotary_dim is None else self.rotary_dim

    def check_fits(self, head_dim: int) -> None:
        """Refuse a head that can't be turned so.

        Raises:
            ModelLoadError: the coordinates that are turned don't make pairs within the head, or the factors
                differ from the pairs in number.
        """
        turned = self.num_turned(head_dim)
        if turned % 2 or not 2 <= turned <= head_dim:
            raise ModelLoadError(
                f"{turned} of a head's {head_dim} coordinates can't be turned: it must be an even number"
            )
        if self.kind is not RopeKind.LONGROPE:
            return
        for name, factors in (("short_factor", self.short_factors), ("long_factor", self.long_factors)):
            if len(factors) != turned // 2:
                raise ModelLoadError(
                    f"longrope {name} has {len(factors)} entries: it needs {turned // 2}, one "
                    f"for every pair of the {turned} coordinates that are turned"
                )

    def longest_positions(self, max_position_embeddings: int) -> int:
        """The greatest context that this scaling was made for, tokens."""
        match self.kind:
            case RopeKind.LINEAR:
                return int(max_position_embeddings * self.factor)
            case RopeKind.YARN:
                return max(max_position_embeddings, int(self.original_max_positions * self.factor))
            case _:
                return max_position_embeddings

    def longest_unstretched(self, max_position_embeddings: int) -> int:
        """The greatest context in which every sequence is turned as the reference turns it, tokens."""
        if self.kind is RopeKind.LONGROPE and self.short_factors != self.long_factors:
            return min(max_position_embeddings, self.original_max_positions)
        return max_position_embeddings

    def factors_for(self, max_positions: int) -> tuple[float, ...]:
        """Longrope's factors for a server whose longest sequence is `max_positions` tokens."""
        return self.long_factors if max_positions > self.original_max_positions else self.short_factors


class RotaryTable:
    """Cosine and sine of every position, computed once in fp32. It takes `rotary_bytes`."""

    def __init__(
        self, spec: RopeSpec, head_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Compute the table.

        Args:
            max_positions: positions 0 .. max_positions - 1 can be looked up: the longest sequence, tokens.
            dtype: of the factors that `rows` gives out.
        """
        inverse_frequencies, attention_factor = rope_frequencies(
            spec, spec.num_turned(head_dim), max_positions
        )
        num_still = head_dim // 2 - len(inverse_frequencies)
        # (positions, 2, 2, D/2): cosine twice, then the sine for the swapped halves, sign included.
        self._table = torch.empty((max_positions, 2, 2, head_dim // 2), dtype=dtype, device=device)
        # In parts: on the way a position takes several times as much as in the table.
        for first in range(0, max_positions, _POSITIONS_AT_ONCE):
            part = self._table[first : first + _POSITIONS_AT_ONCE]
            positions = torch.arange(first, first + len(part), dtype=torch.float32)
            angles = positions[:, None] * inverse_frequencies
            cosine = F.pad(angles.cos() * attention_factor, (0, num_still), value=1.0)
            sine = F.pad(angles.sin() * attention_factor, (0, num_still))
            part.copy_(torch.stack((cosine, cosine, -sine, sine), dim=1).view(part.shape))

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Factors for the tokens of one step; all layers share them.

        Args:
            positions: (T,), int64.

        Returns:
            cosine, sine: (T, 1, 2, D/2) each, for `rotate`.
        """
        rows = self._table.index_select(0, positions)
        return rows[:, None, 0], rows[:, None, 1]


def rotary_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """What a `RotaryTable` takes for each position."""
    return 2 * head_dim * dtype.itemsize


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each head by its token's position; the two halves of the head are the coordinates.

    Args:
        heads: (T, H, D), last axis contiguous.
        cosine, sine: as `RotaryTable.rows` gives them.

    Returns:
        (T, H, D), contiguous.
    """
    num_tokens, num_heads, head_dim = heads.shape
    halves = heads.view(num_tokens, num_heads, 2, head_dim // 2)
    return (halves * cosine).addcmul_(halves.flip(2), sine).view(num_tokens, num_heads, head_dim)


def rotate_given(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Do the same to heads that the caller gives away: they are turned in place where that is faster."""
    kit = native_kit()
    if kit is not None and kit.token_ops.takes(heads):
        return kit.token_ops.rotate_(heads, cosine, sine)
    return rotate(heads, cosine, sine)


def order_of_coordinates(spec: RopeSpec, head_dim: int) -> Tensor | None:
    """Where `rotate` wants a head's coordinates, for a head of which only the first ones are turned.

    `rotate` turns coordinate i with i + D/2, and such a model means i with i + turned/2. Queries and keys in
    another order, the same for both, have the same products: so their projections' rows are put in order
    once, and a partly turned head costs no more than any other.

    Returns:
        (D,), int64: for each place, the coordinate that goes there; None where all are in place.
    """
    turned = spec.num_turned(head_dim)
    if turned == head_dim:
        return None
    first, second = torch.arange(turned).chunk(2)
    still_first, still_second = torch.arange(turned, head_dim).chunk(2)
    return torch.cat((first, still_first, second, still_second))


def rope_frequencies(spec: RopeSpec, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Angle per position of each pair of coordinates, and the factor on cosine and sine.

    Args:
        head_dim: how many coordinates are turned.
        max_positions: the longest sequence, tokens.

    Returns:
        (D/2,) fp32 radians per position; the attention factor, 1 for every kind but yarn and longrope.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base_frequencies = 1.0 / (spec.theta**exponents)
    match spec.kind:
        case RopeKind.DEFAULT | RopeKind.DYNAMIC:
            return base_frequencies, 1.0
        case RopeKind.LINEAR:
            return base_frequencies / spec.factor, 1.0
        case RopeKind.LLAMA3:
            return _llama3_frequencies(spec, base_frequencies), 1.0
        case RopeKind.YARN:
            return _yarn_frequencies(spec, head_dim), _yarn_attention_factor(spec)
        case RopeKind.LONGROPE:
            factors = torch.tensor(spec.factors_for(max_positions), dtype=torch.float32)
            return 1.0 / (factors * spec.theta**exponents), _longrope_attention_factor(spec)


def _llama3_frequencies(spec: RopeSpec, base_frequencies: Tensor) -> Tensor:
    """Short wavelengths stay, long ones are divided by the factor, those between are blended."""
    original = spec.original_max_positions
    wavelengths = 2 * math.pi / base_frequencies
    blend = (original / wavelengths - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blended = (1 - blend) * base_frequencies / spec.factor + blend * base_frequencies
    is_long = wavelengths > original / spec.low_freq_factor
    is_short = wavelengths < original / spec.high_freq_factor
    return torch.where(
        is_long, base_frequencies / spec.factor, torch.where(is_short, base_frequencies, blended)
    )


def _yarn_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """YaRN's "NTK by parts": interpolate the slow dimensions, keep the fast ones, ramp between."""

    def dimension_of(num_rotations: float) -> float:
        rotations_at_one = spec.original_max_positions / (num_rotations * 2 * math.pi)
        return head_dim * math.log(rotations_at_one) / (2 * math.log(spec.theta))

    low, high = dimension_of(spec.beta_fast), dimension_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # The reference widens an empty ramp by the same amount instead of dividing by zero.
    width = (high - low) or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    wavelengths = spec.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    interpolated, extrapolated = 1.0 / (spec.factor * wavelengths), 1.0 / wavelengths
    return interpolated * ramp + extrapolated * (1 - ramp)


def _yarn_attention_factor(spec: RopeSpec) -> float:
    if spec.attention_factor is not None:
        return spec.attention_factor

    def mscale_of(weight: float) -> float:
        return 1.0 if spec.factor <= 1 else 0.1 * weight * math.log(spec.factor) + 1.0

    if spec.mscale and spec.mscale_all_dim:
        return mscale_of(spec.mscale) / mscale_of(spec.mscale_all_dim)
    return mscale_of(1.0)


def _longrope_attention_factor(spec: RopeSpec) -> float:
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(spec.factor) / math.log(spec.original_max_positions))
