"""A plain PyTorch training loop: RMSNorm with the residual stream through it, compiled or not.

    PYTHONPATH=. python examples/plain_pytorch.py [--compile]

RMSNorm takes the arguments and the state dict of torch.nn.RMSNorm. Called with a second tensor it
adds that first and returns the sum too, so that the gradient of the residual stream is added inside
the kernel.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from generated.h200.rmsnorm_backward import RMSNorm


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = RMSNorm(width, eps=1e-6)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, stream = self.norm(x, stream)
        return self.down(nn.functional.silu(self.up(y))), stream


class Model(nn.Module):
    def __init__(self, width: int = 256, layers: int = 2, tokens: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        stream = torch.zeros_like(x)
        for block in self.blocks:
            x, stream = block(x, stream)
        y, _ = self.norm(x, stream)
        return self.head(y)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Model().to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    forward = torch.compile(model, fullgraph=True) if options.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 64, (8, 33), device=device)
    for step in range(10):
        logits = forward(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
