"""DTensor splits the operators of a package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.fresh import printed_by

PROGRAM = """
import json, sys, traceback
from pathlib import Path
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from tests.support.entry_points import write_package

package = write_package(Path("{folder}") / "package")
assert "torch.distributed.tensor" not in sys.modules
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = init_device_mesh("cpu", (2,))
dy, x, stream, rstd, weight = (
    torch.randn(n) for n in ((4, 8), (4, 8), (4, 8), (4, 1), (8,))
)

def split(tensor):
    return DTensor.from_local(tensor, mesh, [Shard(0)])

def everywhere(tensor):
    return DTensor.from_local(tensor, mesh, [Replicate()])

for name, part in PARTS.items():
    try:
        exec(part, dict(globals()))
        wrong = ""
    except Exception:
        wrong = traceback.format_exc()
    print(json.dumps([name, wrong]))
"""
"""Runs parts that know a mesh of two, and tells what went wrong in each."""

PARTS = {}
PARTS["imported after the package"] = """
rows = [DTensor.from_local(t, mesh, [Shard(0)]) for t in (dy, x, rstd)]
everywhere = DTensor.from_local(weight, mesh, [Replicate()])
dx, dw = package.rmsnorm_backward(*rows, everywhere)
assert (dx.placements, dw.placements) == ((Shard(0),), (Partial("sum"),))
wanted = package.rmsnorm_backward(dy, x, rstd, weight)
assert torch.equal(dx.to_local(), wanted[0]) and torch.equal(dw.to_local(), wanted[1])
"""

PARTS["written out"] = """
from normforge.frontends.decomposed import replace_decomposed
replaced = []

def backend(module, given):
    replaced.append(replace_decomposed(module.graph, package.ops))
    module.recompile()
    return torch._dynamo.lookup_backend("aot_eager")(module, given)

def norm(x, weight):
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))

local, scale = torch.randn(2, 4, 16), torch.rand(16) + 0.5
for placement in (Shard(0), Shard(1), Replicate()):
    torch.compiler.reset()  # with sizes left open, PyTorch 2.9 refuses DTensors
    found = []
    for run in (torch.compile(norm, backend=backend, fullgraph=True), norm):
        x = DTensor.from_local(local, mesh, [placement]).requires_grad_()
        weight = DTensor.from_local(scale, mesh, [Replicate()]).requires_grad_()
        y = run(x, weight)
        gradients = torch.autograd.grad(y.to_local().square().sum(), (x, weight))
        found.append([(t.placements, t.to_local()) for t in (y.detach(), *gradients)])
    for (one, numbers), (other, wanted) in zip(*found, strict=True):
        assert one == other, (placement, one, other)
        torch.testing.assert_close(numbers, wanted)
assert replaced == [1, 1, 1], replaced

# PyTorch's operators give results of these that are split in other ways than the operator's. A norm
# may still be the operator without a weight.
for rows, split_rows, scales, split_scales, norms in (
    (torch.randn(2, 4, 16), Shard(2), torch.rand(32), Replicate(), 0),
    (torch.randn(2, 4, 16), Partial("sum"), torch.rand(16), Replicate(), 0),
    (torch.randn(2, 4, 32), Replicate(), torch.rand(16), Shard(0), 1),
):
    replaced.clear()
    torch.compiler.reset()
    x, weight = (
        DTensor.from_local(rows, mesh, [split_rows]),
        DTensor.from_local(scales, mesh, [split_scales]),
    )
    y = torch.compile(norm, backend=backend, fullgraph=True)(x, weight)
    assert y.placements == norm(x, weight).placements, (split_rows, split_scales)
    assert replaced == [norms], (split_rows, split_scales, replaced)
"""

PARTS["rows and dw"] = """
local, scale = torch.randn(2, 3, 4, 16), torch.randn(16)
x = DTensor.from_local(local, mesh, [Shard(1)]).requires_grad_()
weight = DTensor.from_local(scale, mesh, [Replicate()]).requires_grad_()
y = package.rms_norm(x, weight)
assert y.placements == (Shard(1),), y.placements
assert torch.equal(y.to_local(), package.rms_norm(local, scale))
dy = torch.randn(2, 3, 4, 16)
y.backward(DTensor.from_local(dy, mesh, [Shard(1)]))
rstd = package.ops.rms_norm(local, scale, None, 0.0, package.name)[1]
dx, dw = package.rmsnorm_backward(dy, local, rstd, scale)
assert x.grad.placements == (Shard(1),) and torch.equal(x.grad.to_local(), dx)
assert weight.grad.placements == (Partial("sum"),), weight.grad.placements
assert torch.equal(weight.grad.to_local(), dw)

heads = DTensor.from_local(torch.randn(2, 3, 2, 16), mesh, [Shard(2)])
per_head = DTensor.from_local(torch.randn(2, 16), mesh, [Shard(0)]).requires_grad_()
y, stream = package.rms_norm(heads, per_head, residual=heads)
assert y.placements == stream.placements == (Shard(2),)
y.sum().backward()
assert per_head.grad.placements == (Shard(0),), per_head.grad.placements

narrow = [DTensor.from_local(t.bfloat16(), mesh, [Shard(1)]) for t in (dy, local)]
stream = DTensor.from_local(dy, mesh, [Shard(1)])  # wider than x: a result of its own
scales = DTensor.from_local(rstd, mesh, [Shard(1)]), weight.detach().bfloat16()
narrow_dx, _, third = package.rmsnorm_backward(*narrow, *scales, dresidual=stream)
assert (narrow_dx.dtype, third.dtype) == (torch.bfloat16, torch.float32)
assert narrow_dx.placements == third.placements == (Shard(1),), third.placements
assert third.shape == x.shape and third.to_local().shape == local.shape
again = package.rmsnorm_backward(
    *(t.to_local() for t in (*narrow, *scales)), dresidual=stream.to_local()
)
assert torch.equal(third.to_local(), again[2])
none = package.ops.rms_norm_backward(*narrow, *scales, None, None, 0.0, True, True, package.name)[2]
assert none.placements == (Replicate(),), none.placements  # an empty tensor, which is nobody's rows

split = DTensor.from_local(torch.randn(2, 8), mesh, [Shard(1)])  # columns: gathered first
assert package.rms_norm(split).placements == (Replicate(),)

step = torch.compile(package.rms_norm, backend="aot_eager", fullgraph=True)
x.grad = weight.grad = None
step(x, weight).backward(DTensor.from_local(dy, mesh, [Shard(1)]))
assert torch.equal(x.grad.to_local(), dx)
assert weight.grad.placements == (Partial("sum"),)
"""

# DTensor remembers how the results of an operator are split, and their shapes.
PARTS["wanted in an earlier call"] = """
given = [*map(split, (dy, x, rstd)), everywhere(weight)]
wanted = package.rmsnorm_backward(dy, x, rstd, weight)
for need_dx, need_dw in ((True, False), (True, True), (False, True), (True, True)):
    dx, dw = package.rmsnorm_backward(*given, need_dx=need_dx, need_dw=need_dw)
    assert (dx is not None, dw is not None) == (need_dx, need_dw)
    if need_dx:
        assert (dx.shape, dx.placements) == ((8, 8), (Shard(0),)), (dx.shape, dx.placements)
        assert torch.equal(dx.to_local(), wanted[0])
    if need_dw:
        assert (dw.shape, dw.placements) == ((8,), (Partial("sum"),)), (dw.shape, dw.placements)
        assert torch.equal(dw.to_local(), wanted[1])
for dtype in (torch.float32, torch.bfloat16, torch.float32):
    narrow = [t.bfloat16() for t in given[:2]]
    _, dw = package.rmsnorm_backward(*narrow, given[2], given[3].bfloat16(), dw_dtype=dtype)
    assert dw.dtype == dw.to_local().dtype == dtype, (dw.dtype, dtype)
"""

PARTS["frozen norms and used streams"] = """
def train(rows, scale, frozen, norm):
    rows, scale = rows.detach().requires_grad_(), scale.detach().requires_grad_()
    norm(norm(rows, scale), frozen).sin().sum().backward()
    return rows.grad, scale.grad

dx, dw = train(split(x), everywhere(weight), everywhere(weight), package.rms_norm)
assert (dx.shape, dw.shape, dw.placements) == ((8, 8), (8,), (Partial("sum"),)), (dx, dw)
local = train(x, weight, weight, package.rms_norm)
assert torch.equal(dx.to_local(), local[0]) and torch.equal(dw.to_local(), local[1])

def stream_step(rows, residual, scale):
    leaves = [t.detach().requires_grad_() for t in (rows, residual, scale)]
    y, h = package.rms_norm(*leaves[::2], residual=leaves[1])
    (y.sin().sum() + h.cos().sum()).backward()
    return [leaf.grad for leaf in leaves]

for dtype in (torch.float32, torch.bfloat16):
    rows, scale = x.to(dtype), weight.to(dtype)
    found = stream_step(split(rows), split(stream), everywhere(scale))
    for one, two in zip(found, stream_step(rows, stream, scale), strict=True):
        assert one.dtype == two.dtype and torch.equal(one.to_local(), two)
    assert [g.placements for g in found] == [(Shard(0),), (Shard(0),), (Partial("sum"),)]
"""

PARTS["placements of every result"] = """
from types import SimpleNamespace
from normforge.frontends.dtensor import _rms_norm_backward

def given(*shape, dtype=torch.bfloat16):
    return SimpleNamespace(ndim=len(shape), dtype=dtype)

def placements(dresidual, need_dx=True, need_dw=True, weight=given(8)):
    x = given(4, 6, 8)
    found = _rms_norm_backward(x, x, x, weight, dresidual, None, 0.0, need_dx, need_dw, "")
    return [results for results, _ in found]

# What is not wanted, and the third result of a residual of x's dtype, is an empty tensor: whole.
for results in placements(given(4, 6, 8)):
    assert results[2] == Replicate(), results
rows = [results[0] for results in placements(None)]
assert rows == [Replicate(), Shard(0), Shard(1)], rows
wide = placements(given(4, 6, 8, dtype=torch.float32))
assert [results[2] for results in wide] == rows, wide
assert [results[1] for results in wide] == [Replicate(), Partial("sum"), Partial("sum")]
for wanted in ((True, False), (False, True)):
    for results, shard in zip(placements(None, *wanted), rows):
        assert results[0] == (shard if wanted[0] else Replicate())
        assert wanted[1] or results[1] == Replicate()
assert all(results[1] == Replicate() for results in placements(None, weight=None))
"""


PARTS["gated"] = """
from normforge import rms_norm_gated

local = [torch.randn(2, 3, 16).requires_grad_() for _ in range(2)]
scale = torch.randn(16).requires_grad_()
for norm in (rms_norm_gated, torch.compile(rms_norm_gated, backend="aot_eager")):
    for order in (True, False):
        rows = [DTensor.from_local(t.detach(), mesh, [Shard(1)]).requires_grad_() for t in local]
        weight = everywhere(scale.detach()).requires_grad_()
        y = norm(*rows, weight, norm_before_gate=order)
        assert y.placements == (Shard(1),), y.placements
        wanted = rms_norm_gated(*local, scale, norm_before_gate=order)
        torch.testing.assert_close(y.to_local(), wanted)
        dy = torch.randn(2, 3, 16)
        y.backward(DTensor.from_local(dy, mesh, [Shard(1)]))
        found = tuple(one.grad.to_local() for one in rows)
        torch.testing.assert_close(found, torch.autograd.grad(wanted, local, dy))
"""
PARTS["gradients that are added"] = """
from itertools import product

operator = package.ops.backward_of_sum
rows = {name: torch.randn(2, 4, 16) for name in ("dy", "dy2", "dy3", "x")}
scale, rows["rstd"] = torch.randn(16), torch.rand(2, 4, 1) + 1
for third, kind in product((True, False), (None, torch.float32, torch.float64)):
    local = dict(rows, **(dict() if third else dict(dy3=None)))
    residual = None if kind is None else torch.randn(2, 4, 16).to(kind)
    for dim in range(2):
        def on_mesh(t):
            return None if t is None else DTensor.from_local(t, mesh, [Shard(dim)])
        given = [on_mesh(t) for t in local.values()]
        options = (everywhere(scale), on_mesh(residual), 1.0, package.name)
        found = operator(*given, *options)
        wanted = operator(*local.values(), scale, residual, 1.0, package.name)
        assert found[0].placements == (Shard(dim),), found[0].placements
        assert found[1].placements == (Partial("sum"),), found[1].placements
        for one, right in zip(found, wanted):
            assert torch.equal(one.to_local(), right), (third, kind, dim)
    partial = DTensor.from_local(rows["dy"], mesh, [Partial("sum")])
    whole = [None if t is None else everywhere(t) for t in list(local.values())[1:]]
    dx, *_ = operator(partial, *whole, everywhere(scale), None, 1.0, package.name)
    assert not isinstance(dx.placements[0], Partial), dx.placements
"""


PARTS["added"] = """
from normforge import operators, rms_norm
from torch.utils._python_dispatch import TorchDispatchMode

local, other, scale = torch.randn(2, 4, 16), torch.randn(2, 4, 16), torch.randn(16)
x, r = (DTensor.from_local(one, mesh, [Shard(1)]).requires_grad_() for one in (local, other))
weight = everywhere(scale).requires_grad_()
seen = []

class Look(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, given=(), named=None):
        seen.append(function)
        return function(*given, **(named or dict()))

with Look():
    y = rms_norm(x, weight, add=r)
assert operators.rms_norm_and_add.v2 in seen and torch.ops.aten.add.Tensor not in seen
assert y.placements == (Shard(1),), y.placements
assert torch.equal(y.to_local(), rms_norm(local, scale, add=other))
dy = torch.randn(2, 4, 16)
y.backward(DTensor.from_local(dy, mesh, [Shard(1)]))
assert torch.equal(r.grad.to_local(), dy) and x.grad.placements == (Shard(1),)
compiled = torch.compile(rms_norm, backend="aot_eager")
assert torch.equal(compiled(x, weight, add=r).to_local(), y.to_local())
"""


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what went wrong in each part.

    One process takes them all, because importing DTensor takes longer.
    """
    program = f"PARTS = {PARTS!r}\n{PROGRAM}"
    return dict(map(json.loads, printed_by(program, tmp_path_factory.mktemp("dtensor"))))


@pytest.mark.parametrize("part", PARTS)
def test_dtensors_are_split_by_the_operators(wrong: dict[str, str], part: str) -> None:
    assert wrong[part] == ""


DTENSOR_LATEST = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from tests.support.entry_points import write_package

package = write_package(Path("{folder}") / "package")
norm, patched = package.RMSNorm(8), torch.nn.Sequential(torch.nn.RMSNorm(8))
assert package.patch(patched) == ["0"] and "torch.distributed.tensor" not in sys.modules
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor, init_device_mesh

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = init_device_mesh("cpu", (2,))
x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)])
for module in (norm, patched):
    step = torch.compile(distribute_module(module, mesh), backend="aot_eager", fullgraph=True)
    y = step(x)
    y.sum().backward()
    assert y.placements == (Shard(0),), y.placements
"""


def test_dtensor_may_be_imported_after_a_model_that_is_compiled(tmp_path: Path) -> None:
    printed_by(DTENSOR_LATEST, tmp_path)


MAIN_GRAD = """
import os
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from tests.support.entry_points import write_package

other = os.fork()
rank = 0 if other else 1
dist.init_process_group("gloo", init_method="file://{folder}/store", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
x, scale = torch.randn(4, 8), torch.randn(8)
norm = write_package(Path("{folder}") / f"package{rank}").RMSNorm(8, main_grad=True)
norm.weight.data, norm.weight.main_grad = scale, torch.ones(8)
norm(x).square().sum().backward()
wanted = norm.weight.main_grad
shards = distribute_tensor(x, mesh, [Shard(0)])
for placement in (Replicate(), Shard(0)):
    weight = norm.weight = torch.nn.Parameter(distribute_tensor(scale, mesh, [placement]))
    weight.main_grad = torch.ones_like(weight.data)
    norm(shards).square().sum().backward()
    assert weight.main_grad.placements == (placement,)
    torch.testing.assert_close(weight.main_grad.full_tensor(), wanted)
weight.main_grad = torch.ones(8)
try:
    norm(shards).sum().backward()
except TypeError as error:
    assert "main_grad must be a DTensor, as the weight is, got Tensor: make it" in str(error), error
    assert not other or os.waitpid(other, 0)[1] == 0
    print("done")
"""


def test_dw_of_all_ranks_is_added_to_a_main_grad_that_is_split_like_its_weight(
    tmp_path: Path,
) -> None:
    assert printed_by(MAIN_GRAD, tmp_path).count("done") == 2  # Gloo speaks as well
