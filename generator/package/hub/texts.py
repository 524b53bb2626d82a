"""The texts of an exported repository that no package has."""

INIT = """
from . import layers  # for kernelize; it needs what is above

__all__ += ["layers"]
"""
"""The end of the package's __init__.py."""

LAYERS = '''\
"""The layers that `kernelize` can put in the place of a model's own."""

import torch

from . import rms_norm


class RMSNorm(torch.nn.Module):
    """xhat * weight, computed in fp32 and rounded once to the dtype of the rows.

    Takes the place of a norm of one dimension that multiplies by its weight, as Llama's: not of one
    that adds 1 to it, as Gemma's. The module that it serves has the weight, and its eps as
    variance_epsilon or eps.
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        # hasattr takes 1 us where a module lacks the attribute.
        eps = self.variance_epsilon if "variance_epsilon" in self.__dict__ else self.eps
        if self.weight is not None and self.weight.dim() != 1:
            raise ValueError(
                f"this RMSNorm normalises one dimension, and the weight has {self.weight.dim()}"
            )
        return rms_norm(hidden_states, self.weight, eps)
'''

CARD = """\
---
library_name: kernels
license: apache-2.0
tags:
- kernel
---

# {name}

RMSNorm for training, forward and backward, by CUDA kernels that Normforge tuned for one GPU:
{title}.

{bits}

| | |
|---|---|
| GPU | machine code for {arch}; `get_kernel` refuses another compute capability |
| tuned shapes | {shapes} |
| kernels | {kernels}, among them fallback kernels for other shapes |
| dtypes | bf16, fp16, fp32; the weight in the dtype of the rows or fp32 |
| needs | Linux, PyTorch 2.9 or newer with CUDA, and nothing else |

## Load it

```python
from kernels import get_kernel

norms = get_kernel("OWNER/{name}", revision="main", trust_remote_code=True)
y = norms.rms_norm(x, weight, 1e-6)  # differentiable; takes no normalized_shape
norm = norms.RMSNorm(4096, eps=1e-6)  # a torch.nn.RMSNorm
print(norms.explain(4096, 4096, "bf16"))  # which kernel serves a shape, and how it was checked
```

A copy on the disk is loaded by `get_local_kernel(Path("FOLDER"))`. A repository with a branch `v1`
can be asked for `version=1` instead of a revision. `trust_remote_code` is for owners that
`kernels` does not trust by itself.

## Put it into a model

```python
from kernels import LayerRepository, Mode, kernelize, use_kernel_mapping

layer = LayerRepository(
    "OWNER/{name}", layer_name="RMSNorm", revision="main", trust_remote_code=True
)
mode = Mode.TRAINING | Mode.TORCH_COMPILE  # serves Mode.TRAINING and inference as well
with use_kernel_mapping({{"RMSNorm": {{"cuda": {{mode: layer}}}}}}):
    model = kernelize(model, mode=mode, device="cuda")
```

It serves the modules whose class is marked with `use_kernel_forward_from_hub("RMSNorm")`, as many
of Hugging Face's are. A class of your own gets the mark by
`replace_kernel_forward_from_hub(MyRMSNorm, "RMSNorm")`.

The layer computes `xhat * weight` in fp32 and rounds once, to the dtype of the rows. Llama's own
code rounds `xhat` before the product as well, and an fp32 weight makes its result fp32. A norm that
adds 1 to its weight, as Gemma's, must not be mapped to it.

## Licence

Apache-2.0, in the file LICENSE. The sources of the tuned kernels are in `build/torch-cuda/kernels`.
"""
"""The model card."""

VERIFIED = """\
The same inputs give the same bits in every run: no kernel's result depends on the order in which
its threads happen to run."""
PREDICTED = """\
**{unverified}** They are written so that no result depends on the order in which threads happen to
run, and they repeated their bits on an emulator; on the GPU this is not verified."""
"""The card's text about the bits of predicted kernels."""
