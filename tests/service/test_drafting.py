from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.service.commands import draft
from headrace.service.progress import ShownProgress
from tests.support.distillation import tick_while_learning
from tests.support.tiny_models import CORPUS, write_tiny_llama


@pytest.fixture(autouse=True)
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    tick_while_learning(monkeypatch)


@pytest.fixture
def target(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Path:
    folder = write_tiny_llama(tmp_path / "target", num_hidden_layers=3)
    capfd.readouterr()
    return folder


def flags(folder: Path, target: Path | str, *others: str) -> list[str]:
    text = folder / "text.txt"
    text.write_text("\n".join(f"{n}. {line}" for n in range(9) for line in CORPUS), encoding="utf-8")
    few = ["--layers", "1", "--text", str(text), "--corpus-tokens", "1000", "--minutes", "0.2"]
    return [str(target), "--out", str(folder / "draft"), *few, *others]


def test_it_tells_what_the_draft_model_is_worth_and_how_to_use_it(
    tmp_path: Path, target: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert draft(flags(tmp_path, target)) == 0
    size, kept, speed, use, work = capfd.readouterr().out.splitlines()
    out = tmp_path / "draft"
    assert size == f"{out}: 0.1 million parameters, embedding and head included"
    assert kept.startswith("drafts kept, by place: ")
    assert speed.startswith("one stream: ")
    assert speed.endswith(" x")
    assert use.startswith(f"use it: headrace serve --model {target} --draft-model {out}")
    kind = json.loads((out / "report.json").read_text())["draft_weight_dtype"]
    assert use.endswith(" --draft-weight-dtype int8") == (kind == "int8")
    assert work.startswith(f"{out / 'distillation'} is only for going on with it: delete it")


@pytest.mark.parametrize(
    ("others", "complaint"),
    [
        (["--layers", "3"], "the target has 3 layers"),
        (["--layers", "0"], "num_layers=0 is too small: use 1 or more"),
        (["--minutes", "0"], "training_s=0.0 must be positive and finite"),
        (["--minutes", "nan"], "training_s=nan must be positive and finite"),
        (["--learning-rate", "-1"], "learning_rate=-1.0 must be positive and finite"),
        (["--corpus-tokens", "1"], "num_corpus_tokens=1 is too small: use 1000 or more"),
        (["--seed", "-1"], "seed=-1 is too small"),
        (["--text", "nowhere.txt"], "nowhere.txt can't be read: No such file or directory"),
    ],
)
def test_what_it_can_not_do_is_one_line_and_exit_code_two(
    tmp_path: Path, target: Path, capfd: pytest.CaptureFixture[str], others: list[str], complaint: str
) -> None:
    assert draft(flags(tmp_path, target, *others)) == 2
    written = capfd.readouterr()
    assert written.out == ""
    assert written.err.startswith(f"headrace: {complaint}")
    assert written.err.count("\n") == 1
    assert not (tmp_path / "draft").exists()


def test_a_target_that_is_none_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert draft(flags(tmp_path, tmp_path / "nothing", "--cache", str(tmp_path))) == 2
    written = capfd.readouterr()
    assert written.err.startswith("headrace: ")
    assert written.err.count("\n") == 1


def test_help_says_that_the_work_may_be_deleted(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        draft(["--help"])
    assert ended.value.code == 0
    assert "delete it when you are done" in " ".join(capsys.readouterr().out.split())


def test_broken_off_it_says_how_to_go_on_and_then_does(
    tmp_path: Path, target: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: ShownProgress, stage: str, done: int, total: int) -> None:
        if stage == "learning":
            raise KeyboardInterrupt

    with monkeypatch.context() as patches:
        patches.setattr(ShownProgress, "__call__", interrupted)
        assert draft(flags(tmp_path, target)) == 130
    written = capfd.readouterr()
    assert written.out == ""
    assert "the same command goes on from here" in written.err
    assert "Traceback" not in written.err
    assert not (tmp_path / "draft" / "config.json").exists()
    # More time is no other work.
    assert draft([*flags(tmp_path, target), "--minutes", "0.3"]) == 0
    assert (tmp_path / "draft" / "config.json").exists()
    assert "gathering text" not in capfd.readouterr().err


def test_another_draft_model_in_the_same_folder_is_refused(
    tmp_path: Path, target: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert draft(flags(tmp_path, target)) == 0
    capfd.readouterr()
    assert draft(flags(tmp_path, target, "--layers", "2")) == 2
    assert "begun with num_layers=1, not 2" in capfd.readouterr().err
