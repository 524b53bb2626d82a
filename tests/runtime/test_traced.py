"""The operators, and what is traced around them, which compilers keep on disk of a norm. An old
graph calls today's operators, so nothing of this may change under one VERSION; and what is on disk
is served again in another process, with whatever tables are there."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from generator.paths import LIBRARY, REPOSITORY
from normforge.api import Package
from normforge.frontends.layer_norm_operators import LAYER_NORM_SCHEMAS, LayerNormOperators
from normforge.frontends.library import VERSION
from normforge.frontends.operators import SCHEMAS, Operators
from normforge.table import TABLE, Table
from tests.support.entry_points import needs_whole_forward, write_layer_norm_package
from tests.support.fresh import INDUCTOR, printed_by, run_fresh

WRITTEN_BY = "2.13."
"""The PyTorch that wrote the text."""
KNOWN = Path(__file__).with_name(f"traced_{VERSION}.txt")
BF16 = torch.bfloat16


def leaf(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, requires_grad=True)


def calls(rms: Package, layer: Any) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Norms of the kinds that differ in what is traced, and their arguments."""
    x, residual, weight = leaf(4, 8), leaf(4, 8), leaf(8)
    wide_weight, wide_residual = leaf(8, dtype=torch.float32), leaf(4, 8, dtype=torch.float32)
    return {
        "rms_norm": (rms.rms_norm, (x, weight)),
        "rms_norm, fp32 weight": (rms.rms_norm, (x, wide_weight)),
        "rms_norm, no weight": (rms.rms_norm, (x,)),
        "rms_norm, offset": (lambda x, w: rms.rms_norm(x, w, 1e-5, weight_offset=1.0), (x, weight)),
        "rms_norm, tiny eps": (lambda x, w: rms.rms_norm(x, w, 1e-40), (x, weight)),
        "rms_norm, residual": (
            lambda x, w, r: rms.rms_norm(x, w, 1e-5, residual=r),
            (x, weight, residual),
        ),
        "rms_norm, fp32 residual": (
            lambda x, w, r: rms.rms_norm(x, w, 1e-5, residual=r),
            (x, weight, wide_residual),
        ),
        "rms_norm, added": (
            lambda x, w, r: rms.ops.rms_norm_and_add(x, r, w, 1e-5, 0.0, rms.name)[0],
            (x, weight, residual),
        ),
        "rms_norm, bias": (lambda x, w: rms.rms_norm(x, w, bias=w), (x, weight)),
        "layer_norm": (layer.layer_norm, (x, weight, weight)),
        "layer_norm, no bias": (layer.layer_norm, (x, weight)),
        "layer_norm, fp32 bias": (layer.layer_norm, (x, weight, wide_weight)),
        "layer_norm, residual": (
            lambda x, w, r: layer.layer_norm(x, w, w, residual=r),
            (x, weight, residual),
        ),
    }


def traced(norm: Callable[..., Any], given: tuple[Any, ...]) -> Iterator[str]:
    """Every node of a forward with its backward."""

    def step(*given: torch.Tensor) -> Any:
        results = norm(*given)
        results = results if isinstance(results, tuple) else (results,)
        return results, torch.autograd.grad(results, given, [torch.ones_like(y) for y in results])

    for node in make_fx(step, tracing_mode="fake")(*given).graph.nodes:
        if node.op in ("call_function", "output"):
            yield f"  {node.name} = {node.target}{node.args}{node.kwargs or ''}"


def results_of_backward(dtype: torch.dtype, residual: torch.dtype | None) -> str:
    with FakeTensorMode():
        rows, rstd = torch.empty(4, 8, dtype=dtype), torch.empty(4, 1)
        weight = torch.empty(8, dtype=dtype)
        third = None if residual is None else torch.empty(4, 8, dtype=residual)
        found = Operators.rms_norm_backward(
            rows, rows, rstd, weight, third, None, 0.0, True, True, ""
        )
        return "; ".join(f"{t.dtype} {tuple(t.shape)} {t.stride()}" for t in found)


@pytest.mark.skipif(
    not torch.__version__.startswith(WRITTEN_BY),
    reason="other versions of PyTorch write the same graphs in other words",
)
def test_nothing_that_compilers_keep_changes_under_one_version(
    package: Package, tmp_path: Path
) -> None:
    layer = write_layer_norm_package(tmp_path)
    schemas = {**SCHEMAS, **LAYER_NORM_SCHEMAS}
    lines = [f"{name}{schema}" for name, schema in schemas.items()]
    assert len(Operators.all) + len(LayerNormOperators.all) == len(schemas)
    lines += [
        f"rms_norm_backward, residual {residual}: {results_of_backward(BF16, residual)}"
        for residual in (None, BF16, torch.float32)
    ]
    for name, (norm, given) in calls(package, layer).items():
        lines += [name, *traced(norm, given)]
    text = "\n".join(lines) + "\n"
    for name in (package.name, layer.name):
        text = text.replace(name, "PACKAGE")
    text = re.sub(r"(?<=device\(type=')\w+", "cpu", text)
    fresh = tmp_path / KNOWN.name
    fresh.write_text(text)
    assert text == (KNOWN.read_text() if KNOWN.exists() else ""), (
        "graphs that were compiled before call operators that mean something else now: give "
        f"normforge/frontends/library.py another VERSION, and move {fresh} here"
    )


# ---- Graphs on disk ------------------------------------------------------------------------------


CHILD = """
import json, sys
sys.path[:0] = [{library!r}, {root!r}]
import torch
import normforge
from torch._dynamo.utils import counters
from torch.nn.functional import rms_norm
from tests.support.entry_points import aten_on_cpu

assert normforge.__file__.startswith({library!r}), normforge.__file__

def step(x, w):
    return rms_norm(x, (16,), w, 1e-5)

def by_function(x, w):
    return normforge.rms_norm(x, w, 1e-5)

ops, ran = normforge.packages.chosen("rmsnorm_backward").ops, []
for name in ("_forward", "_backward"):
    kept = getattr(ops, name)
    setattr(ops, name, lambda *a, n=name, k=kept: ran.append(n) or k(*a))
ways = {{"backend": (step, normforge.inductor_backend()), "function": (by_function, "inductor")}}
with aten_on_cpu():
    for function, backend in [ways[name] for name in {ways!r}]:
        ran.clear()
        torch._dynamo.reset()
        counters.clear()
        x, w = torch.randn(4, 16, requires_grad=True), torch.randn(16, requires_grad=True)
        compiled = torch.compile(function, backend=backend, fullgraph=True)
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
# Forward and backward are two graphs.
MISS = {"graphs": [0, 2, 0], "joint": [0, 1, 0]}
HIT = {"graphs": [2, 0, 0], "joint": [1, 0, 0]}


def install(site: Path, *gpus: str) -> Path:
    """A copy of the library with packages without kernels for some GPUs."""
    shutil.copytree(LIBRARY, site / "normforge", ignore=shutil.ignore_patterns("__pycache__"))
    for gpu in gpus:
        folder = site / "normforge" / "generated" / gpu / "rmsnorm_backward"
        folder.mkdir(parents=True)
        target = {"name": gpu, "title": gpu, "arch": "sm_90a", "sms": 1}
        (folder / TABLE).write_text(json.dumps(Table(target, (), ()).to_json()))
    return site


@needs_whole_forward
def test_compiled_code_of_another_graph_pass_is_not_run(tmp_path: Path) -> None:
    site, cache = install(tmp_path / "site", "h200"), tmp_path / "cache"
    assert compile_with(cache, site, "backend", "function") == [MISS, MISS]
    with (site / "normforge" / "frontends" / "additions.py").open("a") as file:
        file.write("\n# Folds others.\n")
    # Plain Inductor has a pass that folds, too.
    assert compile_with(cache, site, "backend", "function") == [MISS, MISS]
    assert compile_with(cache, site, "backend", "function") == [HIT, HIT]


def of_version(site: Path, version: str, *changes: tuple[str, str, str]) -> Path:
    """A copy of the library of another version, in which texts of some files were replaced."""
    install(site, "h200")
    library = "frontends/library.py"
    for file, old, new in ((library, f'VERSION = "{VERSION}"', f'VERSION = "{version}"'), *changes):
        path = site / "normforge" / file
        text = path.read_text()
        assert old in text, (file, old)
        path.write_text(text.replace(old, new))
    return site


def compile_with(
    cache: Path, site: Path, *ways: str, gpu: str = "h200"
) -> list[dict[str, list[int]]]:
    """Hits, misses and bypasses of each way's compilation, all in one fresh process, in an
    environment where Inductor is strict."""
    script = CHILD.format(root=str(REPOSITORY), library=str(site), ways=ways)
    settings = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "NORMFORGE_GPU": gpu}
    done = run_fresh(script, site, imported=INDUCTOR, **settings)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@needs_whole_forward
def test_compiled_code_is_kept_for_other_tables_too(tmp_path: Path) -> None:
    site, cache = install(tmp_path / "site", "h100", "h200"), tmp_path / "cache"
    ways = ("backend", "function")
    assert compile_with(cache, site, *ways, gpu="h200") == [MISS, MISS]
    assert compile_with(cache, site, *ways, gpu="h100") == [HIT, HIT]


@needs_whole_forward
def test_compiled_code_of_an_older_version_is_not_run(tmp_path: Path) -> None:
    """A joint graph on disk has the backward's operator and what was traced around it. Here that
    operator takes its arguments in another order since, and so the old calls would be wrong."""
    old, cache = install(tmp_path / "old", "h200"), tmp_path / "cache"
    operators = "frontends/operators.py"
    swapped = (
        (operators, "Tensor dy, Tensor x", "Tensor x, Tensor dy"),
        (operators, "given.dy,\n                given.x,", "given.x,\n                given.dy,"),
        (
            operators,
            "        dy: torch.Tensor,\n        x: ",
            "        x: torch.Tensor,\n        dy: ",
        ),
        ("frontends/routes.py", '(given["grad_out"], x', '(x, given["grad_out"]'),
    )
    newer = of_version(tmp_path / "newer", "v2", *swapped)
    ways = ("backend", "function")
    assert compile_with(cache, old, *ways) == [MISS, MISS]
    assert compile_with(cache, newer, *ways) == [MISS, MISS]


SETTINGS = """
import torch
from torch._inductor import config
from normforge.frontends.graph_pass import make_backend
from normforge.frontends.operators import Operators
import torch._inductor.compile_fx as inductor

seen = []
def compile_fx(module, inputs, *, config_patches, **more):
    seen.append({k: v for k, v in config_patches.items() if "." in k or k.startswith("max")})
    return module.forward

inductor.compile_fx = compile_fx
backend = make_backend(type("None", (Operators,), {"__init__": lambda self: None,
    "package": "none", "rms_norm": None})(), **{"max_autotune": True})
for how in ({}, {"mode": "reduce-overhead"}, {"options": {"max_fusion_size": 3}}):
    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=backend, **how)(torch.ones(3))
assert seen == [
    {"max_autotune": True},
    {"triton.cudagraphs": True, "max_autotune": True},
    {"max_fusion_size": 3, "max_autotune": True},
], seen
"""


def test_mode_and_options_of_torch_compile_reach_inductor() -> None:
    printed_by(SETTINGS, imported=INDUCTOR)
