"""Four processes that train small models of transformers whose norms `normforge.patch(model,
fuse=True)` serves, on four GPUs over NCCL or on the CPU over gloo.

`qwen3` and `qwen3_next` are sharded by FSDP2. In `qwen3_tensor`, FSDP2 shards over two ranks what
tensor parallelism splits over two others. Norms are whole on each rank there; those of queries and
keys see only its heads, so that their gradients are summed over the ranks, as by
`replicated_with_grad_allreduce` in transformers' plan. Qwen3-Next has no such variant: its linear
attention mixes the parts of all heads in two projections, and transformers' plan gathers their
results, so that its norm would see the same rows as under FSDP2 alone.

Qwen3-Next has dense MLPs here, and one layer of each kind of attention. Its gated norm stays
transformers' where no package has kernels for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.distributed as dist

from tests.support.patience import patience

RANKS, STEPS = 4, 4
MODELS = ("qwen3", "qwen3_tensor", "qwen3_next")
SETTINGS = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_NVLS_ENABLE": "0",  # which adds in the switch, in an order of its own
    "HF_HUB_OFFLINE": "1",  # the kernels of its hub are not what is tested
}


class Trained(TypedDict):
    """A training as one rank saw it: how many norms are served, and how many backwards of norms
    were; the losses of its batch; before the first step and after each, a digest of every whole
    weight, by its name."""

    norms: int
    backwards: int
    losses: list[str]
    weights: list[dict[str, str]]


def train_all(device: str, folder: Path) -> dict[str, list[Trained]]:
    """Train all models in four new processes: what each rank saw, by the model. device: "cuda" or
    "cpu"; folder: a new one, where they meet."""
    folder.mkdir()
    torch.multiprocessing.spawn(_run_rank, (device, folder), RANKS)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return {name: [seen[name] for seen in ranks] for name in MODELS}


def _run_rank(rank: int, device: str, folder: Path) -> None:
    os.environ |= SETTINGS
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    given: dict[str, Any] = {"backend": "gloo"}
    if device == "cuda":
        torch.cuda.set_device(rank)
        given = {"backend": "nccl", "device_id": torch.device("cuda", rank)}
    dist.init_process_group(
        **given,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=patience(120)),
    )
    seen = {}
    with warnings.catch_warnings():
        # PyTorch's kernels would pass these tests, too.
        warnings.filterwarnings("error", message=".*using (PyTorch's own|the formula)")
        for name in MODELS:
            seen[name] = _train(name, device, folder / f"{name} {rank}.yaml")
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def _train(name: str, device: str, calls: Path) -> Trained:
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.tensor import init_device_mesh

    import normforge
    from benchmarks.training.tensor_parallel import split
    from normforge.collected import read

    model, norms = _served(name, device)
    over = (2, 2) if name.endswith("tensor") else (RANKS, 1)
    mesh = init_device_mesh(device, over, mesh_dim_names=("data", "tensor"))
    if mesh["tensor"].size() > 1:
        for layer in model.model.layers:
            split(layer, mesh["tensor"], sequence=False)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh["data"])
    if device == "cpu":  # gloo has no average
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    # One by one: the weights belong to several meshes.
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
    generator = torch.Generator().manual_seed(mesh["data"].get_local_rank())
    tokens = 256 if device == "cuda" else 16
    ids = torch.randint(1, 128, (2, tokens), generator=generator).to(device)
    losses, weights = [], [dict(_digests(model))]
    recorder = normforge.collect(calls)
    for _ in range(STEPS):
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        if mesh["tensor"].size() > 1:
            _sum_gradients_of_heads(model, mesh["tensor"].get_group())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss).hex())
        weights.append(dict(_digests(model)))
    recorder.stop()
    counted = read(calls.read_text()).items()
    backwards = sum(times for (of, _), times in counted if of.endswith("backward"))
    return {"norms": norms, "backwards": backwards, "losses": losses, "weights": weights}


def _served(name: str, device: str) -> tuple[Any, int]:
    """A model with the same weights on each rank, in bf16, and how many of its norms are served.
    AssertionError if some are not, or layers or attention that the kernels here can fuse."""
    import normforge
    import normforge.rope

    head = 128 if device == "cuda" else 16  # with tuned kernels, as 1024 columns have
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4}
    sizes |= {"hidden_size": 8 * head, "intermediate_size": 8 * head, "head_dim": head}
    transformers: Any = import_module("transformers")
    if name == "qwen3_next":
        linear = {f"linear_num_{part}_heads": 4 for part in ("key", "value")}
        linear |= {f"linear_{part}_head_dim": head for part in ("key", "value")}
        kinds = ["linear_attention", "full_attention"]
        others: dict[str, Any] = {"layer_types": kinds, "mlp_only_layers": [0, 1]}
        config = transformers.Qwen3NextConfig(vocab_size=128, **sizes, **linear, **others)
    else:
        config = transformers.Qwen3Config(vocab_size=128, **sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="eager"
    )
    kinds = ["RMSNorm", "DecoderLayer"]
    if name != "qwen3_next" and (
        device == "cpu" or normforge.rope.explain(1 << 17, head, "bf16")["kernel"]
    ):
        kinds.append("Attention")
    wanted = {n for n, m in model.named_modules() if type(m).__name__.endswith(tuple(kinds))}
    served = normforge.patch(model, fuse=True)
    assert wanted <= set(served), f"not served: {sorted(wanted.difference(served))}"
    for one in wanted:
        assert "by Normforge" in model.get_submodule(one).extra_repr(), one
    return model.to(device), sum(one.endswith("norm") for one in served)


def _sum_gradients_of_heads(model: Any, group: dist.ProcessGroup) -> None:
    """Sum what each rank has of the gradients of its heads' norms, after FSDP2 has reduced it."""
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            dist.all_reduce(parameter.grad.to_local(), group=group)


def _digests(model: Any) -> Iterator[tuple[str, str]]:
    for name, parameter in model.named_parameters():
        whole = parameter.detach().full_tensor().cpu().contiguous()
        assert whole.isfinite().all(), name
        yield name, hashlib.sha256(whole.view(torch.uint8).numpy().tobytes()).hexdigest()
