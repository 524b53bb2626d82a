"""Every example runs, against a package as it is emitted: copied elsewhere, with nothing else of
this repository to import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from generator.emit import emit_package
from generator.target import find_target

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

RUNS: dict[str, tuple[str, ...]] = {
    "plain_pytorch.py": ("step 9: loss",),
    "graph_trainer.py": ("4 nodes of the package", "step 4: loss"),
    "graph_trainer.py --how tag": ("0 nodes of the package",),
    "existing_model.py": ("2 norms adopted: gradients differ by",),
    "main_grad.py": ("main_grad after 4 micro-batches",),
}

RUNNER = """
import runpy, sys, torch
from generated.h200.rmsnorm_backward.runtime.forward import reference_forward
from generated.h200.rmsnorm_backward.runtime.reference import reference_backward

torch.set_num_threads(1)
# PyTorch's fused operators, which only a GPU has.
library = torch.library.Library("aten", "IMPL")
library.impl("_fused_rms_norm", lambda x, shape, w, eps: reference_forward(x, w, eps), "CPU")
library.impl(
    "_fused_rms_norm_backward",
    lambda dy, x, shape, rstd, w, mask: reference_backward(
        dy, x, rstd, w, need_dx=mask[0], need_dw=mask[1]
    ),
    "CPU",
)
for line in {lines!r}:
    name, *arguments = line.split()
    print("# " + line)
    sys.argv = [name, *arguments]
    runpy.run_path({folder!r} + "/" + name, run_name="__main__")
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each run printed. They share a process, whose only other module is the package: without
    kernels, which no CPU needs."""
    folder = tmp_path_factory.mktemp("elsewhere")
    emit_package([], [], find_target("h200"), folder / "generated" / "h200" / "rmsnorm_backward")
    done = subprocess.run(
        [
            *(sys.executable, "-W", "error::UserWarning", "-c"),
            RUNNER.format(lines=list(RUNS), folder=str(EXAMPLES)),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    parts = done.stdout.split("# ")[1:]
    return {part.splitlines()[0]: part for part in parts}


def test_every_example_is_run() -> None:
    assert {line.split()[0] for line in RUNS} == {path.name for path in EXAMPLES.glob("*.py")}


@pytest.mark.parametrize("line", RUNS)
def test_example_runs(outputs: dict[str, str], line: str) -> None:
    for sentence in RUNS[line]:
        assert sentence in outputs[line]
