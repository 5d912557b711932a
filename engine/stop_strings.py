"""Ends a text at the first stop string, wherever the borders of tokens fall."""

from __future__ import annotations


class StopStrings:
    """Passes text on and holds back the longest tail that may still become a stop string.

    What ends first counts: of several stops in one text the one whose last character comes earliest, and of
    those that end together the longest. So it never matters how the text was cut into pieces.

    Args:
        stops: the texts that end the output; none of them empty.
        is_included: whether the stop itself stays in the output.
    """

    def __init__(self, stops: tuple[str, ...], *, is_included: bool = False) -> None:
        self._stops = stops
        self._is_included = is_included
        self._longest_tail = max(map(len, stops), default=1) - 1
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text.

        Returns:
            What may be told now, and the stop string that ended the text (then nothing more is to be pushed).
        """
        text = self._held + text
        found = min(
            ((start + len(stop), -len(stop)) for stop in self._stops if (start := text.find(stop)) >= 0),
            default=None,
        )
        if found is None:
            cut = len(text) - self._num_to_hold(text)
            self._held = text[cut:]
            return text[:cut], None
        end, minus_len = found
        self._held = ""
        return text[: end if self._is_included else end + minus_len], text[end + minus_len : end]

    def pass_over(self, text: str) -> str:
        """Add text in which no stop counts; a stop string that begins in it counts only if it ends later.

        Returns:
            What may be told now.
        """
        text = self._held + text
        cut = len(text) - self._num_to_hold(text)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Get what is held back: the text is over and no stop has come."""
        held, self._held = self._held, ""
        return held

    def _num_to_hold(self, text: str) -> int:
        """Length of the longest tail that is the beginning, not the whole, of a stop string."""
        for length in range(min(self._longest_tail, len(text)), 0, -1):
            tail = text[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
