"""A plain PyTorch training loop: RMSNorm with the residual stream through it, compiled or not.

    PYTHONPATH=. python examples/plain_pytorch.py [--compile]

RMSNorm takes the arguments and the state dict of torch.nn.RMSNorm. Called with a second tensor it
adds that first and returns the sum too; its backward then adds the gradient of the residual stream
to its own: inside the kernel where one was tuned for that (bf16 rows of every tuned length), and
after it elsewhere.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from normforge import RMSNorm


class PlainNorm(nn.RMSNorm):
    """What RMSNorm computes, by PyTorch: only here to compare with."""

    def forward(self, x: torch.Tensor, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stream = x + stream
        return super().forward(stream), stream


class Block(nn.Module):
    def __init__(self, width: int, norm: type[nn.RMSNorm]) -> None:
        super().__init__()
        self.norm = norm(width, eps=1e-6)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, stream = self.norm(x, stream)
        return self.down(nn.functional.silu(self.up(y))), stream


class Model(nn.Module):
    def __init__(self, norm: type[nn.RMSNorm], width: int = 256, tokens: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, norm) for _ in range(2))
        self.norm = norm(width, eps=1e-6)
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        stream = torch.zeros_like(x)
        for block in self.blocks:
            x, stream = block(x, stream)
        y, _ = self.norm(x, stream)
        return self.head(y)


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def main() -> dict[str, float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    model = Model(RMSNorm).to(device, dtype)
    plain = Model(PlainNorm).to(device, dtype)
    plain.load_state_dict(model.state_dict())
    ids = torch.randint(0, 64, (8, 33), device=device)
    next_token_loss(plain(ids[:, :-1]), ids).backward()

    forward = torch.compile(model, fullgraph=True) if options.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, error = [], 0.0
    for step in range(10):
        loss = next_token_loss(forward(ids[:, :-1]), ids)
        loss.backward()
        if step == 0:
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                distance = (ours.grad.float() - theirs.grad.float()).norm()
                error = max(error, float(distance / theirs.grad.float().norm()))
            print(f"gradients of the first step differ by {error:.1e} from PyTorch's")
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step}: loss {losses[-1]:.4f}")
    return {"error": error, "first loss": losses[0], "last loss": losses[-1]}


if __name__ == "__main__":
    main()
