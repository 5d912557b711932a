"""How likely a draft is to be kept, going by those that were judged."""

from __future__ import annotations

_FORGET = 0.97
"""Weight of what is known when something new comes: some thirty judgements are remembered."""


class KeptRate:
    """A chance, learned from yes and no with exponential forgetting.

    Args:
        forget: weight of the past at each new judgement, in (0, 1].
    """

    __slots__ = ("_forget", "_num_kept", "_num_seen")

    def __init__(self, forget: float = _FORGET) -> None:
        self._forget = forget
        self._num_kept = 0.0
        self._num_seen = 0.0

    def add(self, *, is_kept: bool) -> None:
        """Learn from one draft that was judged."""
        self._num_kept = self._num_kept * self._forget + is_kept
        self._num_seen = self._num_seen * self._forget + 1.0

    def chance(self, prior: float, weight: float) -> float:
        """The chance that the next one is kept.

        Args:
            prior: what is believed before anything was judged.
            weight: how many judgements that belief is worth; above 0.
        """
        return (self._num_kept + weight * prior) / (self._num_seen + weight)
