"""What Inductor's caches keep of `inductor_backend`: served again to the same package, in another
process, and to no other package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from generator.package.files import write_code
from generator.paths import REPOSITORY
from generator.runtime.frontends.operators import code_digest
from generator.runtime.table import TABLE, Table
from tests.support.entry_points import needs_whole_forward
from tests.support.patience import patience

CHILD = """
import importlib.util, json, sys
sys.path.insert(0, {root!r})
import torch
from torch._dynamo.utils import counters
from torch.nn.functional import rms_norm
from tests.support.entry_points import aten_on_cpu

def load(folder):
    # As somebody may who looks into several packages: nothing stays in sys.modules.
    spec = importlib.util.spec_from_file_location("looked_at", folder + "/__init__.py")
    module = sys.modules["looked_at"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in [name for name in sys.modules if name.split(".")[0] == "looked_at"]:
        del sys.modules[name]
    return module

def step(x, w):
    return rms_norm(x, (16,), w, 1e-5)

with aten_on_cpu():
    for folder in sys.argv[1:]:
        package, ran = load(folder), []
        ops = package._package.ops
        for name in ("_forward", "_backward"):
            kept = getattr(ops, name)
            setattr(ops, name, lambda *a, n=name, k=kept: ran.append(n) or k(*a))
        torch._dynamo.reset()
        counters.clear()
        x, w = torch.randn(4, 16, requires_grad=True), torch.randn(16, requires_grad=True)
        compiled = torch.compile(step, backend=package.inductor_backend(), fullgraph=True)
        found = torch.autograd.grad(compiled(x, w).square().sum(), (x, w))
        assert ran == ["_forward", "_backward"], ran
        wanted = torch.autograd.grad(step(x, w).square().sum(), (x, w))
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted))
        graph, joint = counters["inductor"], counters["aot_autograd"]
        print(json.dumps({{
            "graphs": [graph["fxgraph_cache_" + way] for way in ("hit", "miss", "bypass")],
            "joint": [joint["autograd_cache_" + way] for way in ("hit", "miss", "bypass")],
        }}))
"""


def emit(folder: Path, title: str) -> Path:
    """A package without kernels that is imported from its own folder."""
    folder.mkdir()
    table = Table({"name": "none", "title": title, "arch": "sm_90a", "sms": 1}, (), ())
    write_code(folder, table)
    (folder / TABLE).write_text(json.dumps(table.to_json()))
    return folder


def compile_with(cache: Path, *packages: Path) -> list[dict[str, list[int]]]:
    """Hits, misses and bypasses of every package's compilation, all in one fresh process."""
    script = CHILD.format(root=str(REPOSITORY))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *map(str, packages)],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=patience(200),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@needs_whole_forward
@pytest.mark.slow
def test_compiled_code_is_kept_for_its_package_alone(tmp_path: Path) -> None:
    one, other = emit(tmp_path / "one", "one GPU"), emit(tmp_path / "other", "another GPU")
    newer = emit(tmp_path / "newer", "one GPU")  # the tables of `one`, and later code
    with (newer / "runtime" / "serve" / "reference.py").open("r+") as file:
        assert file.read()
        file.write("\n# Another formula.\n")
    cache = tmp_path / "cache"
    # Forward and backward are two graphs.
    miss = {"graphs": [0, 2, 0], "joint": [0, 1, 0]}
    hit = {"graphs": [2, 0, 0], "joint": [1, 0, 0]}
    assert compile_with(cache, one, other) == [miss, miss]
    assert compile_with(cache, newer, other) == [miss, hit]


def test_code_that_pytorch_keeps_is_not_taken_for_that_of_a_later_runtime(tmp_path: Path) -> None:
    """torch.compile itself keeps joint graphs, into which it has traced the backward's Python."""
    script = "import {0}; print({0}._package.ops.namespace)"
    names = []
    for name in ("one", "same", "newer"):
        emit(tmp_path / name, "one GPU")
        if name == "newer":
            with (tmp_path / name / "runtime" / "frontends" / "gradients.py").open("a") as file:
                file.write("\n# Another backward.\n")
        command = [sys.executable, "-c", script.format(name)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
        names.append(done.stdout)
    assert names[0] == names[1] != names[2]


@pytest.mark.parametrize(
    ("name", "content"), [("a.py", "2"), ("b.py", "1"), ("c.py", ""), ("note.txt", "")]
)
def test_code_digest_changes_with_python_files_only(
    tmp_path: Path, name: str, content: str
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "a.py").write_text("1")
    (new / name).write_text(content)
    assert (code_digest(old) == code_digest(new)) == (name == "note.txt")


SETTINGS = """
import sys
sys.path[:0] = [{root!r}]
import torch
from torch._inductor import config
from generator.runtime.frontends.graph_pass import make_backend
from generator.runtime.frontends.operators import Operators
import torch._inductor.compile_fx as inductor

seen = []
def compile_fx(module, inputs, *, config_patches, **more):
    seen.append({{k: v for k, v in config_patches.items() if "." in k or k.startswith("max")}})
    return module.forward

inductor.compile_fx = compile_fx
backend = make_backend(type("None", (Operators,), {{"__init__": lambda self: None,
    "namespace": "none", "rms_norm": None}})(), **{{"max_autotune": True}})
for how in ({{}}, {{"mode": "reduce-overhead"}}, {{"options": {{"max_fusion_size": 3}}}}):
    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=backend, **how)(torch.ones(3))
assert seen == [
    {{"max_autotune": True}},
    {{"triton.cudagraphs": True, "max_autotune": True}},
    {{"max_fusion_size": 3, "max_autotune": True}},
], seen
"""


def test_mode_and_options_of_torch_compile_reach_inductor() -> None:
    script = SETTINGS.format(root=str(REPOSITORY))
    subprocess.run([sys.executable, "-c", script], check=True)
