"""benchmarks.command: every command of the folder can be started, and refuses in one sentence."""

from __future__ import annotations

from importlib import import_module

import pytest

from benchmarks.command import exit_code
from generator.errors import NormforgeError
from generator.paths import REPOSITORY

COMMANDS = [
    path.stem
    for path in sorted((REPOSITORY / "benchmarks").glob("*.py"))
    if "= command_line(" in path.read_text()
]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_how_to_start_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        import_module(f"benchmarks.{name}").main(["--help"])
    assert ended.value.code == 0
    assert f"python -m benchmarks.{name} " in capsys.readouterr().out


def test_a_refusal_is_one_sentence_behind_the_name(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> int:
        raise NormforgeError("planted")

    assert exit_code("/somewhere/knob.py", refuse) == 2
    assert capsys.readouterr().err == "knob.py: planted\n"
    assert exit_code("/somewhere/knob.py", lambda: 1) == 1
