"""What comparing decoders with transformers found, for a person who reads the tests' output."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


class FamilyTable:
    """Greatest difference of logits, and ways to generate in which all ids were equal, by variant."""

    def __init__(self) -> None:
        self._differences: dict[str, tuple[int, float]] = {}
        self._ways: dict[str, list[str]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been compared."""
        return not self._differences and not self._ways

    def add_logits(self, variant: str, num_positions: int, difference: float) -> None:
        """Note the greatest difference over so many positions."""
        self._differences[variant] = (num_positions, difference)

    def add_equal_ids(self, variant: str, way: str) -> None:
        """Note that generating in this way gave the reference's ids."""
        self._ways.setdefault(variant, []).append(way)

    def lines(self) -> Iterator[str]:
        """A heading and a line for each variant."""
        yield f"{'variant':<30} {'positions':>9} {'max |logit diff|':>17}  64 greedy ids equal"
        for variant in sorted(self._differences.keys() | self._ways.keys()):
            positions, difference = self._differences.get(variant, (0, float("nan")))
            ways = ", ".join(sorted(self._ways.get(variant, [])))
            yield f"{variant:<30} {positions:>9} {difference:>17.1e}  {ways}"


FAMILY_TABLE = pytest.StashKey[FamilyTable]()
