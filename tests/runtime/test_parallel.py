"""Norms in models that PyTorch wraps or exports: DDP, FSDP2, torch.export."""

from __future__ import annotations

from pathlib import Path

from tests.support.fresh import printed_by

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
norm = str(package.operators.rms_norm.v1)
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
        printed_by(script, tmp_path / "package")
