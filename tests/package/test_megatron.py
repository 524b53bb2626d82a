"""A GPT of the Megatron-Core that is installed, on the CPU, with norms that were patched."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from generator.paths import REPOSITORY

PROGRAM = """
import contextlib
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_config import TransformerConfig
from normforge import patch

# Where Megatron takes for granted that there is a GPU.
torch.cuda.current_device = lambda: "cpu"
CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
config = TransformerConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    normalization="RMSNorm",
    qk_layernorm=True,
    use_cpu_initialization=True,
    persist_layer_norm=False,
    bias_dropout_fusion=False,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)
torch.manual_seed(0)
spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
model = GPTModel(config, spec, vocab_size=128, max_sequence_length=32)
tokens, places = torch.randint(0, 128, (2, 16)), torch.arange(16).expand(2, 16)
hidden = ~torch.ones(2, 1, 16, 16, dtype=torch.bool).tril()

def step():
    model.zero_grad()
    loss = model(tokens, places, hidden, labels=tokens).mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

plain, names = step(), patch(model)
assert len(names) == 2 * 4 + 1, names  # before attention, of queries, of keys, before the MLP; last
assert "decoder.final_layernorm" in names
for ours, theirs in zip(step(), plain, strict=True):
    torch.testing.assert_close(ours, theirs)
print("done")
"""


def test_patch_serves_all_norms_of_a_gpt() -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path]),
        "NORMFORGE_GPU": "h200",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout.strip() == "done", done.stderr[-3000:]
