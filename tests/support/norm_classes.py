"""RMSNorm as model code writes it out: the forwards of Hugging Face's classes, and of Meta's."""

from __future__ import annotations

import torch
from torch import nn


class LlamaRMSNorm(nn.Module):
    """The norm of Llama, Mistral, Qwen and DeepSeek: xhat is rounded before the product."""

    def __init__(self, width: int = 16, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class T5LayerNorm(LlamaRMSNorm):
    """The product is that of the narrow rows with a wide rstd."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


class GemmaRMSNorm(LlamaRMSNorm):
    """The weight is stored minus one, and nothing is rounded early."""

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self._norm(x.float())
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)


class MetaRMSNorm(GemmaRMSNorm):
    """The norm of Llama 4 and of Meta's own code: the weight stands on the right."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x.float()).type_as(x) * self.weight


class Olmo2RMSNorm(LlamaRMSNorm):
    """The norm of OLMo 2: xhat is rounded after the product."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return (self.weight * hidden_states).to(input_dtype)


class L2Norm(GemmaRMSNorm):
    """The norm of Llama 4 without a weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x.float()).type_as(x)


NORM_CLASSES = (LlamaRMSNorm, T5LayerNorm, GemmaRMSNorm, MetaRMSNorm, Olmo2RMSNorm, L2Norm)
