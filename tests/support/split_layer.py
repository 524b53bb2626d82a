"""A layer of a model whose gradient does not depend on how many ranks share it. Child processes
import this module by name."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.training.layers import Layer, step_of
from benchmarks.training.tensor_parallel import split

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 16}
SIZES["num_key_value_heads"] = 2


def gradients(
    mesh: Any, model: str, sequence: bool, ways: tuple[str, ...]
) -> dict[str, list[list[list[float]]]]:
    """Return the gradient of a layer's rows under every way: those of this rank's tokens, if ranks
    split the sequence. mesh: None for one process."""
    torch.manual_seed(0)
    layer = Layer(model, 8, SIZES, "cpu").float()
    layer.turns = tuple(one.float() for one in layer.turns)
    x, dy = torch.randn(2, 8, 32), torch.randn(2, 8, 32)
    if mesh is not None and sequence:
        x, dy = (one.chunk(mesh.size(), 1)[mesh.get_local_rank()] for one in (x, dy))
    x = x.clone().requires_grad_()
    found = {}
    for way in ways:
        torch._dynamo.reset()
        prepare = None if mesh is None else partial(split, mesh=mesh, sequence=sequence)
        step_of(layer, way, x, dy.clone(), prepare)()
        assert x.grad is not None
        found[way] = x.grad.tolist()
    return found
