"""An existing model in the style of Hugging Face, in two ways, with no change to its file.

    PYTHONPATH=. python examples/existing_model.py

1. Models that use torch.nn.RMSNorm: `install()` routes the backward of PyTorch's own operator.
2. Models with a norm class of their own (LlamaRMSNorm, Gemma's with 1 + weight): their instances
   are given another forward. Parameters, names and state dicts stay as they are.
"""

from __future__ import annotations

import types

import torch
from torch import nn

from generated.h200.rmsnorm_backward import installed, rms_norm


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


def adopt(model: nn.Module) -> int:
    """Give every norm of the known classes another forward; how many there were."""
    found = 0
    for module in model.modules():
        name = type(module).__name__
        if not name.endswith("RMSNorm") or isinstance(module, nn.RMSNorm):
            continue
        eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
        offset = 1.0 if name.startswith("Gemma") else 0.0

        def forward(
            self: nn.Module, x: torch.Tensor, eps: float | None = eps, offset: float = offset
        ) -> torch.Tensor:
            return rms_norm(x, self.weight, eps, weight_offset=offset)

        module.forward = types.MethodType(forward, module)
        found += 1
    return found


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).float().square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def difference(one: list[torch.Tensor], two: list[torch.Tensor]) -> float:
    return max(
        float((a.float() - b.float()).norm() / b.float().norm())
        for a, b in zip(one, two, strict=True)
    )


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    x = torch.randn(8, 128, 256, device=device, dtype=dtype)

    model = nn.Sequential(nn.RMSNorm(256, 1e-6), nn.Linear(256, 256), nn.RMSNorm(256, 1e-6))
    model = model.to(device, dtype)
    theirs = gradients(model, x)
    with installed():  # or install() once, for the whole program
        ours = gradients(model, x)
    print(f"torch.nn.RMSNorm, routed: gradients differ by {difference(ours, theirs):.1e}")

    model = nn.Sequential(LlamaRMSNorm(256), nn.Linear(256, 256), GemmaRMSNorm(256))
    model = model.to(device, dtype)
    theirs = gradients(model, x)
    count = adopt(model)
    print(
        f"{count} norms adopted: gradients differ by {difference(gradients(model, x), theirs):.1e}"
    )


if __name__ == "__main__":
    main()
