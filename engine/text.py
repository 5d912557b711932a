"""The text of one sequence: ids become characters, characters run into stop strings."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from headrace.engine.detokenizer import IncrementalDetokenizer
from headrace.engine.errors import TextFailed, is_panic
from headrace.engine.sequence import OutputParams, StopConditions
from headrace.engine.stop_strings import StopStrings
from headrace.engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class OutputText:
    """Takes a sequence's ids one by one and tells the text that is certain.

    Whatever adds to the text raises `TextFailed` when the tokenizer breaks over it; then it is over.

    Args:
        tokenizer: the model's.
        output: whether text is wanted, and how special tokens are shown.
        stop: which stop strings end it, and whether a stop is left in.
        is_constrained: whether somebody counts on every character that the tokens spell, the first one, too.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        output: OutputParams,
        stop: StopConditions,
        *,
        is_constrained: bool = False,
    ) -> None:
        self._is_told = output.wants_text
        self._is_stop_included = stop.is_stop_included
        self._stops = StopStrings(stop.strings, is_included=stop.is_stop_included) if stop.strings else None
        # Stop strings are searched in the text even when nobody wants to see it.
        self._detokenizer = (
            IncrementalDetokenizer(
                tokenizer,
                skip_special_tokens=output.skip_special_tokens,
                # With an echo the first space is the prompt's.
                keeps_first_space=is_constrained and not output.is_echoed,
            )
            if output.wants_text or stop.strings
            else None
        )

    @property
    def may_stop(self) -> bool:
        """Whether some text would end it."""
        return self._stops is not None

    def echo(self, token_ids: Sequence[int]) -> str:
        """Let the output begin with the prompt, in which no stop counts; get its text."""
        if self._detokenizer is None:
            return ""
        try:
            text = self._detokenizer.push(token_ids)
        except BaseException as fault:
            raise _failed(fault) from fault
        return text if self._is_told else ""

    def push(self, token_id: int, *, is_stop_armed: bool = True) -> tuple[str, str | None]:
        """Add an id.

        Args:
            is_stop_armed: whether a stop string that is completed now ends the text.

        Returns:
            The text that is certain now, and the stop string that has ended it, if one has.
        """
        if self._detokenizer is None:
            return "", None
        try:
            text = self._detokenizer.push((token_id,))
        except BaseException as fault:
            raise _failed(fault) from fault
        if is_stop_armed or self._stops is None:
            return self._search(text)
        text = self._stops.pass_over(text)
        return text if self._is_told else "", None

    def end_with(self, token_id: int) -> str:
        """Add the id that ends the sequence; get its text if a stop is to be left in."""
        return self.push(token_id)[0] if self._is_stop_included else ""

    def flush(self) -> str:
        """Get what is held back: no more ids follow. Nothing comes once a stop string has been found."""
        if self._detokenizer is None:
            return ""
        try:
            held_back = self._detokenizer.flush()
        except BaseException as fault:
            raise _failed(fault) from fault
        text, matched_stop = self._search(held_back)
        if matched_stop is None and self._stops is not None:
            text += self._stops.flush() if self._is_told else ""
        return text

    def _search(self, text: str) -> tuple[str, str | None]:
        matched_stop = None
        if self._stops is not None:
            text, matched_stop = self._stops.push(text)
        if matched_stop is not None:
            self._detokenizer = None
        return text if self._is_told else "", matched_stop


def _failed(fault: BaseException) -> BaseException:
    """What to raise for what the tokenizer has raised: an interrupt is none of its faults."""
    if not (isinstance(fault, Exception) or is_panic(fault)):
        return fault
    logger.error("the tokenizer can't tell the text of a sequence", exc_info=fault)
    return TextFailed(type(fault).__name__)
