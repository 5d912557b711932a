from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.engine import ConfigError, DistillationSettings, DraftReport

SETTINGS = DistillationSettings(Path("target"), Path("draft"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_layers", 0),
        ("num_layers", 65),
        ("num_corpus_tokens", 999),
        ("training_s", 0.0),
        ("training_s", float("nan")),
        ("max_sequence_len", 7),
        ("batch_tokens", 255),
        ("learning_rate", float("inf")),
        ("draft_vocab_size", -1),
        ("draft_vocab_size", 1),
        ("num_candidates", 1),
        ("seed", -1),
        ("seed", 2**31),
    ],
)
def test_what_can_not_be_done_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        replace(SETTINGS, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("output", Path("elsewhere")),
        ("num_corpus_tokens", 5000),
        ("training_s", 9000.0),
        ("learning_rate", 1e-4),
    ],
)
def test_work_goes_on_elsewhere_for_longer_with_more_text_or_at_another_rate(name: str, value: Any) -> None:
    assert replace(SETTINGS, **{name: value}).described() == SETTINGS.described()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target", Path("other")),
        ("num_layers", 3),
        ("text", (Path("text"),)),
        ("max_sequence_len", 128),
        ("batch_tokens", 8192),
        ("draft_vocab_size", 100),
        ("num_candidates", 100),
        ("seed", 1),
    ],
)
def test_everything_else_is_another_work(name: str, value: Any) -> None:
    assert replace(SETTINGS, **{name: value}).described() != SETTINGS.described()


def test_the_same_folder_by_another_path_is_the_same_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    by_absolute_path = replace(SETTINGS, target=tmp_path / "target", text=(tmp_path / "text",))
    assert replace(SETTINGS, text=(Path("text"),)).described() == by_absolute_path.described()


def test_the_speed_up_is_with_the_draft_model_over_without() -> None:
    assert DraftReport(1, (0.5,), 1.5, 20.0, 30.0).speed_up == 1.5
