"""A layer of `benchmarks.training.layers` on several GPUs: matrix products split by tensor
parallelism, and with sequence parallelism the tokens that norms see, too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from generator.disk import read_json

SPLIT = ("llama", "qwen3")
"""The models whose layers `split` knows."""
COLUMNS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)
ROWS = ("self_attn.o_proj", "mlp.down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")


def split(layer: torch.nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
    """Split a decoder layer of transformers whose norms stand before attention and MLP. sequence:
    give each rank its tokens of what is between the products."""
    rows: dict[str, Any] = {"output_layouts": Shard(1)} if sequence else {}
    plan: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS}
    plan |= {name: RowwiseParallel(**rows) for name in ROWS}
    if sequence:
        whole, part = Replicate(), Shard(1)
        plan |= {name: SequenceParallel(use_local_output=True) for name in NORMS}
        plan["mlp"] = PrepareModuleInput(input_layouts=part, desired_input_layouts=whole)
        plan["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": part},
            desired_input_kwarg_layouts={"hidden_states": whole},
        )
    parallelize_module(layer, mesh, plan)


def on_ranks(count: int, device: str, run: Callable[[DeviceMesh], Any]) -> Any:
    """Run a function, which pickle must know by name, in a new process for each rank, of NCCL on
    GPUs and of gloo on the CPU. Returns what rank 0's returned, as JSON has it."""
    with TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_run_rank, (count, device, Path(folder), run), count)
        return read_json(Path(folder) / "found.json")


def _run_rank(rank: int, count: int, device: str, folder: Path, run: Any) -> None:
    given: dict[str, Any] = {"backend": "gloo"}
    if device == "cuda":
        torch.cuda.set_device(rank)
        given = {"backend": "nccl", "device_id": torch.device("cuda", rank)}
    store = f"file://{folder}/store"
    dist.init_process_group(**given, init_method=store, rank=rank, world_size=count)
    found = run(init_device_mesh(device, (count,)))
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
