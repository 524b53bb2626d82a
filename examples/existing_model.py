"""An existing model in the style of Hugging Face, in two ways, with no change to its file.

    PYTHONPATH=. python examples/existing_model.py

1. Models that use torch.nn.RMSNorm: `install()` routes the backward of PyTorch's own operator
   (here `installed()`, the same for one block).
2. Models with a norm class of their own (LlamaRMSNorm, Gemma's with 1 + weight): `patch(model)`.
   Parameters, names and state dicts stay as they are, and `unpatch(model)` takes it back.
"""

from __future__ import annotations

import torch
from torch import nn

from normforge import installed, patch


class LlamaRMSNorm(nn.Module):
    """As a model's file has it."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        dtype = hidden_states.dtype
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(dtype)


class GemmaRMSNorm(nn.Module):
    """The same with a weight that is stored minus one."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


def results(model: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """y and the gradients of the parameters."""
    model.zero_grad()
    y = model(x)
    y.backward(dy)
    return [y.detach(), *(p.grad for p in model.parameters())]


def difference(one: list[torch.Tensor], two: list[torch.Tensor]) -> float:
    return max(
        float((a.float() - b.float()).norm() / b.float().norm())
        for a, b in zip(one, two, strict=True)
    )


def main() -> dict[str, float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    x, dy = torch.randn(2, 8, 128, 256, device=device, dtype=dtype)

    model = nn.Sequential(nn.RMSNorm(256, 1e-6), nn.Linear(256, 256), nn.RMSNorm(256, 1e-6))
    model = model.to(device, dtype)
    theirs = results(model, x, dy)
    with installed():  # or install() once, for the whole program
        routed = difference(results(model, x, dy), theirs)
    print(f"torch.nn.RMSNorm, routed: results differ by {routed:.1e}")

    model = nn.Sequential(LlamaRMSNorm(256), nn.Linear(256, 256), GemmaRMSNorm(256))
    model = model.to(device, dtype)
    theirs = results(model, x, dy)
    count = len(patch(model))
    adopted = difference(results(model, x, dy), theirs)
    print(f"{count} norms adopted: results differ by {adopted:.1e}")
    return {"routed": routed, "adopted norms": count, "adopted": adopted}


if __name__ == "__main__":
    main()
