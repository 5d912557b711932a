"""A constraint that lets every token follow."""

from __future__ import annotations

from headrace.engine import Constraint, ConstraintKind
from headrace.engine.sampling.constraint import AllowedTokens


class Anything:
    """A compiled constraint of the fake model's vocabulary, and its own matcher."""

    source = Constraint(ConstraintKind.REGEX, ".*")

    def start(self) -> Anything:
        return self

    def fork(self) -> Anything:
        return self

    def allowed(self, output_token_ids: tuple[int, ...]) -> AllowedTokens:
        return AllowedTokens(b"\xff" * 33, may_end=True, is_over=False)
