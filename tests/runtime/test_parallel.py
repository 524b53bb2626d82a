"""Norms in models that PyTorch wraps or exports: DDP, FSDP2, torch.export. Exporters that know
PyTorch's operators alone get what the operators here are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import normforge
from normforge.layernorm import LayerNorm
from tests.support.fresh import INDUCTOR, printed_by

START = """
from copy import deepcopy
from pathlib import Path
import torch
import torch.distributed as dist
from tests.support.entry_points import write_package

package = write_package(Path("{folder}"))

class Block(torch.nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.linear = norm, torch.nn.Linear(16, 16)

    def forward(self, x):
        return x + self.linear(self.norm(x))

def build(norm=package.RMSNorm):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Block(norm(16, eps=1e-6)) for _ in range(2)))

def gradients(model, x):
    model(x).square().sum().backward()
    return [p.grad for p in model.parameters()]
"""

WRAPPED = (
    START
    + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = torch.randn(8, 16)
plain = build(torch.nn.RMSNorm)
assert package.patch(plain) == ["0.norm", "1.norm"]
for model in (build(), plain):
    wanted = gradients(deepcopy(model), x)
    replicated = DistributedDataParallel(deepcopy(model))
    assert all(map(torch.equal, gradients(replicated, x), wanted)), "DDP"
    mesh = init_device_mesh("cpu", (1,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    found = [gradient.full_tensor() for gradient in gradients(model, x)]
    assert all(map(torch.equal, found, wanted)), "FSDP2"
dist.destroy_process_group()
"""
)

EXPORTED = (
    START
    + """
x = torch.randn(8, 16)
model = build()
program = torch.export.export(model, (x,))
norm = str(package.operators.rms_norm.v2)
assert [str(n.target) for n in program.graph.nodes].count(norm) == 2, program.graph
torch.export.save(program, "{folder}/model.pt2")
torch.save((x, model(x)), "{folder}/results.pt")
"""
)

LOADED = (
    START
    + """
x, wanted = torch.load("{folder}/results.pt")
assert torch.equal(torch.export.load("{folder}/model.pt2").module()(x), wanted)
"""
)


def test_gradients_under_ddp_and_fsdp_are_those_of_the_model_alone(tmp_path: Path) -> None:
    printed_by(WRAPPED, tmp_path / "package")


def test_an_exported_model_runs_in_another_process(tmp_path: Path) -> None:
    for script in (EXPORTED, LOADED):
        printed_by(script, tmp_path / "package", imported=INDUCTOR)


# ---- Exporters -----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = normforge.RMSNorm(16, weight_offset=1.0)
        self.second = LayerNorm(16)
        self.third = normforge.batch_invariant.RMSNorm(16)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y, h = self.first(x, residual)
        y, h = self.second(y, h)
        z: torch.Tensor = self.first(self.third(y + h), add=h)
        return z


@pytest.fixture
def block() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return Block(), (torch.randn(4, 16), torch.randn(4, 16))


def namespaces(program: torch.export.ExportedProgram) -> set[str]:
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    return {target.namespace for target in called if isinstance(target, torch._ops.OpOverload)}


def test_operators_are_decomposed_by_who_asks(block: Any) -> None:
    model, given = block
    program = torch.export.export(model, given)
    assert namespaces(program.run_decompositions()) == {"normforge", "aten"}
    assert any("rms_norm_and_add" in str(node.target) for node in program.graph.nodes)
    table: Any = torch.export.default_decompositions()
    known = torch._decomp.decomposition_table.items()
    ours = {operator: made for operator, made in known if operator.namespace == "normforge"}
    assert len(ours) == 4
    table.update(ours)
    found = program.run_decompositions(table)
    assert namespaces(found) == {"aten"}
    torch.testing.assert_close(found.module()(*given), model(*given))


@pytest.mark.filterwarnings("ignore")
def test_a_model_is_exported_to_onnx(block: Any) -> None:
    pytest.importorskip("onnxscript", reason="ONNX's exporter needs onnxscript")
    reference = pytest.importorskip("onnx.reference")
    model, given = block
    exported = torch.onnx.export(model, given, dynamo=True, verbose=False).model_proto
    names = [value.name for value in exported.graph.input]
    values = {name: x.numpy() for name, x in zip(names, given, strict=True)}
    (found,) = reference.ReferenceEvaluator(exported).run(None, values)
    torch.testing.assert_close(torch.from_numpy(found), model(*given))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("norm", "tensors"),
    [
        (normforge.RMSNorm(16), 1),
        (normforge.RMSNorm(16), 2),
        (LayerNorm(16), 1),
        (LayerNorm(16), 2),
        (normforge.RMSNormGated(16), 2),
        (normforge.RMSNormGated(16, group_size=8, norm_before_gate=False), 2),
    ],
)
def test_a_norm_alone_is_exported(norm: torch.nn.Module, tensors: int, strict: bool) -> None:
    """PyTorch 2.9's strict way refuses modules with attributes that are objects of others."""
    given = tuple(torch.randn(2, 3, 16) for _ in range(tensors))
    exported = torch.export.export(norm, given, strict=strict).module()
    torch.testing.assert_close(exported(*given), norm(*given))
