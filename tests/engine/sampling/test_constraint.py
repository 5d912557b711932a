"""What a constraint may hold, and what becomes of a matcher's answer."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from headrace.engine import Constraint, ConstraintFailed, ConstraintKind, InvalidRequest
from headrace.engine.sampling.constraint import (
    MAX_CHOICES,
    MAX_CONSTRAINT_BYTES,
    AllowedTokens,
    RowConstraint,
    RowMask,
)


@dataclass
class Answering:
    """A matcher that always gives the same answer."""

    answer: AllowedTokens | None
    asked: list[tuple[int, ...]] = field(default_factory=list)

    def allowed(self, output_token_ids: tuple[int, ...]) -> AllowedTokens:
        self.asked.append(output_token_ids)
        if self.answer is None:
            raise ConstraintFailed("no way on")
        return self.answer

    def fork(self) -> Answering:
        return Answering(self.answer)


def bits(*token_ids: int) -> bytes:
    return sum(1 << token_id for token_id in token_ids).to_bytes(3, "little")


def mask_of(answer: AllowedTokens | None, *end_token_ids: int) -> RowMask:
    return RowConstraint(Answering(answer), (), frozenset(end_token_ids)).mask()


@pytest.mark.parametrize(
    ("kind", "text", "choices", "wanted"),
    [
        (ConstraintKind.JSON_SCHEMA, "", (), "must not be empty"),
        (ConstraintKind.REGEX, "", (), "must not be empty"),
        (ConstraintKind.GRAMMAR, "", (), "must not be empty"),
        (ConstraintKind.CHOICE, "", (), f"must hold 1 to {MAX_CHOICES} options, got 0"),
        (ConstraintKind.CHOICE, "", ("a",) * (MAX_CHOICES + 1), f"got {MAX_CHOICES + 1}"),
        (ConstraintKind.CHOICE, "", ("a", ""), "must not hold an empty option"),
        (ConstraintKind.REGEX, "a" * (MAX_CONSTRAINT_BYTES + 1), (), f"at most {MAX_CONSTRAINT_BYTES} bytes"),
        (ConstraintKind.GRAMMAR, "ü" * (MAX_CONSTRAINT_BYTES // 2 + 1), (), "bytes of UTF-8"),
        (ConstraintKind.CHOICE, "", ("a" * MAX_CONSTRAINT_BYTES, "b"), f"got {MAX_CONSTRAINT_BYTES + 1}"),
    ],
)
def test_what_is_missing_or_too_large_is_refused_by_the_name_of_its_kind(
    kind: ConstraintKind, text: str, choices: tuple[str, ...], wanted: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Constraint(kind, text, choices)
    [violation] = refusal.value.violations
    assert violation.field == f"constraint.{kind.value}"
    assert wanted in violation.description


def test_constraints_of_equal_content_are_one_key() -> None:
    one = Constraint(ConstraintKind.CHOICE, choices=("a", "b"))
    assert {one: 1}[Constraint(ConstraintKind.CHOICE, choices=("a", "b"))] == 1
    assert one != Constraint(ConstraintKind.CHOICE, choices=("b", "a"))
    assert Constraint(ConstraintKind.REGEX, "a") != Constraint(ConstraintKind.GRAMMAR, "a")


def test_an_end_id_may_be_drawn_where_the_text_is_complete() -> None:
    complete = AllowedTokens(bits(1, 9), may_end=True, is_over=False)
    assert mask_of(complete, 17, 2) == RowMask(bits(1, 2, 9, 17), must_end=False)


def test_no_end_id_is_drawn_where_the_text_is_not_complete_be_it_a_part_of_it() -> None:
    incomplete = AllowedTokens(bits(1, 9), may_end=False, is_over=False)
    assert mask_of(incomplete, 9, 17) == RowMask(bits(1), must_end=False)


def test_where_nothing_can_follow_the_end_must() -> None:
    over = AllowedTokens(bits(), may_end=True, is_over=True)
    assert mask_of(over, 17) == RowMask(bits(17), must_end=True)


def test_a_constraint_that_fails_forbids_everything_and_says_why() -> None:
    assert mask_of(None, 17) == RowMask(b"", failure="no way on")


def test_the_matcher_is_asked_about_the_output_and_gives_the_same_again() -> None:
    matcher = Answering(AllowedTokens(bits(3), may_end=False, is_over=False))
    constraint = RowConstraint(matcher, (5, 6), frozenset())
    assert constraint.mask() == constraint.mask()
    assert matcher.asked == [(5, 6), (5, 6)]
