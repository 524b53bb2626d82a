"""benchmarks.command: every command of the folder can be started, and refuses in one sentence."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch

from benchmarks.command import exit_code
from generator.errors import NormforgeError
from generator.paths import GENERATED, REPOSITORY

COMMANDS = [
    path.stem
    for path in sorted((REPOSITORY / "benchmarks").glob("*.py"))
    if "= command_line(" in path.read_text()
]
NEED_A_GPU = (
    "batch_invariance",
    "bit_exact",
    "errors",
    "flushes",
    "forward",
    "host_time",
    "layouts",
    "stress",
)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_how_to_start_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        import_module(f"benchmarks.{name}").main(["--help"])
    assert ended.value.code == 0
    assert f"python -m benchmarks.{name} " in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", NEED_A_GPU)
def test_without_a_gpu_it_says_so(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, module = tmp_path / "out.json", GENERATED / "h200" / "rmsnorm_backward"
    given = ["--module", str(module)] if name == "errors" else []
    assert import_module(f"benchmarks.{name}").main([*given, "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert said == f"{name}.py: this needs a CUDA GPU, and PyTorch sees none\n"
    assert not out.exists()


def test_a_refusal_is_one_sentence_behind_the_name(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> int:
        raise NormforgeError("planted")

    assert exit_code("/somewhere/knob.py", refuse) == 2
    assert capsys.readouterr().err == "knob.py: planted\n"
    assert exit_code("/somewhere/knob.py", lambda: 1) == 1
