from __future__ import annotations

import pytest

from headrace.service.__main__ import main


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("models --nope", "Unrecognized arguments: --nope."),
        ("pull", "The following arguments are required: model."),
        ("token", "The following arguments are required: name."),
        ("token alice --role boss", "Argument --role: invalid choice: 'boss'"),
        ("draft some-model", "The following arguments are required: --out."),
        ("draft --out draft", "The following arguments are required: model."),
        ("draft m --out d --layers few", "Argument --layers: invalid int value: 'few'."),
        ("draft m --out d --speed 2", "Unrecognized arguments: --speed 2."),
    ],
)
def test_a_wrong_command_line_is_told_of_in_a_box_as_the_clients_commands_do(
    line: str, complaint: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    command = line.partition(" ")[0]
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    told = capfd.readouterr()
    usage, advice, title, problem, bottom = told.err.splitlines()
    assert told.out == ""
    argument = {"models": "", "token": " {NAME}"}.get(command, " {MODEL}")
    assert usage == f"Usage: headrace {command} [OPTIONS]{argument}"
    assert advice == f"Try 'headrace {command} -h' for help."
    assert title.startswith("╭─ Error ─")
    assert problem.startswith(f"│ {complaint}")
    assert bottom.startswith("╰─")
