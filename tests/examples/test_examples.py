"""Every example runs and its numbers are right, against a package as it is emitted: copied
elsewhere, with nothing else of this repository to import."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from generator.cli.main import make_parser
from generator.package.emit import emit_package
from generator.paths import REPOSITORY
from generator.target import find_target
from tests.support.patience import patience
from tests.support.samples import compiled_fallbacks, compiled_forwards

EXAMPLES = REPOSITORY / "examples"
PACKAGE = "generated.h200.rmsnorm_backward"

LINES = (
    "plain_pytorch.py",
    "plain_pytorch.py --compile",
    "graph_trainer.py",
    "graph_trainer.py --how tag",
    "existing_model.py",
    "main_grad.py",
)

RUNNER = f"""
import contextlib, io, json, runpy, sys, warnings
import torch
from torch._inductor import metrics
import {PACKAGE} as package
from {PACKAGE} import installed
from {PACKAGE}.runtime.serve.forward import Forward, reference_forward
from {PACKAGE}.runtime.serve.reference import reference_backward

sys.modules["normforge"] = package  # which would choose it on its GPU
gpu, folder, *lines = sys.argv[1:]
torch.set_num_threads(1)
# What the package warns of, when it has no kernel for a call.
warnings.filterwarnings("error", ".*using (PyTorch|the formula)", UserWarning)
seen = dict.fromkeys(("forward", "routed"), 0)


def counted(kind, function):
    def call(*arguments):
        found = function(*arguments)
        seen[kind] += found is not None
        return found

    return call


Forward.__call__ = counted("forward", Forward.__call__)
installation = installed.__self__
installation._route = counted("routed", installation._route)
installation._quick = counted("routed", installation._quick)
if not int(gpu):
    warnings.simplefilter("error", UserWarning)
    installation._device = "CPU"
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
for line in lines:
    sys.argv = line.split()
    metrics.reset()
    seen.update(forward=0, routed=0)
    before = torch.cuda.memory_stats().get("allocation.all.allocated", 0)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        numbers = runpy.run_path(folder + "/" + sys.argv[0])["main"]()
    run = {{
        "numbers": numbers,
        "printed": printed.getvalue(),
        "compiled": metrics.generated_kernel_count,
        **seen,
        "allocations": torch.cuda.memory_stats().get("allocation.all.allocated", 0) - before,
    }}
    print(json.dumps(run))
"""


class Run(NamedTuple):
    """numbers: what main returned. compiled: kernels by Inductor. forward: calls of the package's.
    routed: calls of PyTorch's backward that the package served. allocations: of GPU memory."""

    numbers: dict[str, float]
    printed: str
    compiled: int
    forward: int
    routed: int
    allocations: int


class Runs(NamedTuple):
    """rounding: the most by which results in the examples' dtype may differ."""

    on_gpu: bool
    rounding: float
    runs: dict[str, Run]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(on, marks=getattr(pytest.mark, mark))
        for on, mark in (("cpu", "slow"), ("gpu", "gpu"))
    ],
)
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Every line in a process whose only other module is the package: with the kernels for any
    shape on a GPU, and without kernels elsewhere. The examples choose their device."""
    on_gpu = request.param == "gpu"
    folder = tmp_path_factory.mktemp("elsewhere")
    # The folder's name is what the examples import, whatever the GPU.
    package = folder.joinpath(*PACKAGE.split("."))
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    if on_gpu:
        here = request.getfixturevalue("here")
        made = compiled_fallbacks(here), here, package, compiled_forwards(here)
        emit_package([], *made, standalone=True)
    else:
        emit_package([], [], find_target("h200"), package, standalone=True)
        environment["CUDA_VISIBLE_DEVICES"] = ""
    process = subprocess.run(
        [sys.executable, "-c", RUNNER, str(int(on_gpu)), str(EXAMPLES), *LINES],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(300),
    )
    assert process.returncode == 0, process.stderr[-2000:]
    runs = [Run(**json.loads(line)) for line in process.stdout.splitlines()]
    # bf16 on a GPU, where sums are rounded once and PyTorch's twice; fp32 elsewhere.
    return Runs(on_gpu, 2e-2 if on_gpu else 1e-5, dict(zip(LINES, runs, strict=True)))


def test_every_example_is_run() -> None:
    assert {line.split()[0] for line in LINES} == {path.name for path in EXAMPLES.glob("*.py")}


def test_slurm_script_starts_one_tuner_on_all_gpus_of_a_node(tmp_path: Path) -> None:
    """The database is there already; `srun` says what it was told to run."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    storage = "postgresql+psycopg://tuner@host/normforge"
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(REPOSITORY),
        "SLURM_GPUS_ON_NODE": "8",
        "PYTHON": sys.executable,
        "NORMFORGE_STORAGE": storage,
    }
    command = ["bash", str(EXAMPLES / "slurm" / "tune.sbatch"), "--gpu", "h200"]
    told = subprocess.check_output(command, env=environment, text=True).splitlines()
    program = told.index("tune.py")
    assert told[program - 1] == sys.executable
    args = make_parser().parse(told[program + 1 :])
    assert (args.gpu, args.devices, args.storage) == ("h200", tuple(range(8)), storage)


@pytest.mark.parametrize("kind", ["Model", "PlainModel"])
def test_main_grad_counts_every_micro_batch_once(kind: str) -> None:
    """The sum is made of gradients that autograd returns and no hook sees. The example compares two
    models with one hook, whose mistakes would be in both."""
    example = runpy.run_path(str(EXAMPLES / "main_grad.py"))
    torch.manual_seed(0)
    model, apart = example[kind](16), example["PlainModel"](16)
    apart.load_state_dict(model.state_dict())
    expected = [torch.zeros_like(parameter) for parameter in apart.parameters()]
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
        parameter.grad_added_to_main_grad = False
        parameter.register_post_accumulate_grad_hook(example["add_to_main_grad"])
    for batch in torch.randn(3, 8, 16):
        model(batch).square().sum().backward()
        found = torch.autograd.grad(apart(batch).square().sum(), [*apart.parameters()])
        for total, gradient in zip(expected, found, strict=True):
            total += gradient
        for parameter, total in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.main_grad, total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("line", LINES)
def test_examples_print_what_they_return(done: Runs, line: str) -> None:
    run = done.runs[line]
    for name, number in run.numbers.items():
        form = "{}" if isinstance(number, int) else "{:.4f}" if "loss" in name else "{:.1e}"
        assert form.format(number) in run.printed, name


@pytest.mark.parametrize("done", [pytest.param("gpu", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize("line", LINES)
def test_examples_use_the_gpu_where_there_is_one(done: Runs, line: str) -> None:
    assert done.runs[line].allocations > 0


@pytest.mark.parametrize("line", ["plain_pytorch.py", "plain_pytorch.py --compile"])
def test_plain_loop_learns_from_pytorchs_gradients(done: Runs, line: str) -> None:
    run = done.runs[line]
    assert run.forward == 10 * 3
    assert run.numbers["error"] < done.rounding
    assert run.numbers["last loss"] < 0.6 * run.numbers["first loss"]
    assert (run.compiled > 0) == ("--compile" in line)


@pytest.mark.parametrize(
    ("line", "nodes", "marked"),
    # Two norms, each with its backward: the package's, or marked with their two results.
    [("graph_trainer.py", 4, 0), ("graph_trainer.py --how tag", 0, 12)],
)
def test_graph_trainer_learns_from_pytorchs_gradients(
    done: Runs, line: str, nodes: int, marked: int
) -> None:
    run = done.runs[line]
    assert (run.numbers["nodes"], run.numbers["marked"]) == (nodes, marked)
    assert run.forward == 5 * nodes // 2
    assert run.numbers["error"] < done.rounding
    assert run.numbers["last loss"] < 0.9 * run.numbers["first loss"]
    assert (run.compiled > 0) == (marked > 0)


def test_existing_models_get_pytorchs_results(done: Runs) -> None:
    run = done.runs["existing_model.py"]
    assert run.routed == 2
    assert run.forward == 2
    assert run.numbers["adopted norms"] == 2
    assert run.numbers["routed"] < done.rounding
    assert run.numbers["adopted"] < done.rounding


def test_main_grad_is_the_sum_over_micro_batches(done: Runs) -> None:
    """It is in fp32 up to the few elements of y that are rounded to the other neighbour in bf16;
    the gradient that flows on through dx is bf16."""
    run = done.runs["main_grad.py"]
    assert run.forward == 4
    numbers = dict(run.numbers)
    assert numbers.pop("norm.weight") < (1e-3 if done.on_gpu else 1e-5)
    assert set(numbers) == {"up.weight", "down.weight"}
    assert max(numbers.values()) < (5e-3 if done.on_gpu else 5e-4)
