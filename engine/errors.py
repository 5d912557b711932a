"""Everything that the engine can say went wrong.

Two kinds: an `EngineError` is somebody's answer (a caller's, an operator's) and carries a message
made for him; an `EngineBug` means that our own book-keeping is broken, and nobody may catch it to go on.
"""

from __future__ import annotations

from dataclasses import dataclass


class EngineError(Exception):
    """Root of the errors that reach a caller or an operator."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of a request that can't be taken.

    Args:
        field: path of the field as the caller spells it, such as ``sampling.top_p``.
        description: what was wrong and what would be right.
    """

    field: str
    description: str


class InvalidRequest(EngineError):
    """The request can never be served as it stands; sending it again is of no use."""

    def __init__(self, *violations: FieldViolation) -> None:
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations))
        self.violations = violations

    @classmethod
    def of(cls, field: str, description: str) -> InvalidRequest:
        """Build the usual case: one field, one reason."""
        return cls(FieldViolation(field, description))


class DuplicateRequest(EngineError):
    """A live request already has this id."""


class NoChatTemplate(EngineError):
    """The served model brings no chat template, so chat messages can't be rendered."""


class Overloaded(EngineError):
    """The waiting queue is full.

    Args:
        retry_after_s: when it makes sense to try again, seconds.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Draining(EngineError):
    """The engine finishes what it has and takes nothing new."""


class EngineDead(EngineError):
    """The background loop has ended; no request can be served any more."""


class DeadlineExceeded(EngineError):
    """The caller's deadline passed before the request was finished."""


class RequestFailed(EngineError):
    """The model failed on this one request (a non-finite row, say); the others go on."""


class NothingToDraw(RequestFailed):
    """The request's own controls leave no token that could be drawn."""


class ConstraintFailed(RequestFailed):
    """The text of this one request can't be continued within its constraint."""


class ConfigError(EngineError):
    """The engine can't start as configured."""


class ModelLoadError(EngineError):
    """The model's files can't be served: missing, damaged, unsupported, or unlike their own description."""


class DraftingFailed(EngineError):
    """A draft model could not be made; the message says what is left and how to go on."""


class EngineBug(Exception):
    """Root of the errors that mean the engine's own state is wrong: the loop ends on them."""


class InvalidTransition(EngineBug):
    """A sequence was moved along an edge that its life does not have."""


class IntegrityError(EngineBug):
    """Blocks, tables and counts of the KV pool do not add up."""


class TextFailed(Exception):
    """The tokenizer can't tell the text of one sequence: its fault, and no other request's."""


class LibraryPanic(Exception):
    """A library with a core in Rust has panicked. What it raises itself is no `Exception`, so it would pass
    every barrier and take down with it whoever shares the thread."""


def is_panic(fault: BaseException) -> bool:
    """Whether `fault` is what PyO3 makes of a panic in Rust: tokenizers and llguidance raise it."""
    return type(fault).__module__ == "pyo3_runtime"
