"""Somebody new has the requirements, clones, installs, imports elsewhere, patches a model of
transformers, tunes for every GPU there is a name for, and reads report and explanation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from generator.paths import REPOSITORY
from generator.target import load_targets
from tests.support.patience import patience

PATCHING = """
import normforge, torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    hidden_size=64, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1,
    num_hidden_layers=2, vocab_size=32,
)
torch.manual_seed(0)
model, ids = LlamaForCausalLM(config), torch.arange(12).view(2, 6)

def gradients():
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(weight.grad.clone() for weight in model.parameters())]

wanted = gradients()
names = normforge.patch(model)
assert len(names) == 5, names
assert all("by Normforge" in repr(model.get_submodule(name)) for name in names)
for one, other in zip(gradients(), wanted, strict=True):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
torch.save(model.state_dict(), "model.pt")
again = LlamaForCausalLM(config)
again.load_state_dict(torch.load("model.pt"))
normforge.patch(again)
assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
assert sorted(normforge.unpatch(model)) == sorted(names)
print("served from", normforge.__file__)
"""
TRAINING = """
import torch
from rmsnorm_backward import RMSNorm

norm, x = RMSNorm(256), torch.randn(64, 256, requires_grad=True)
norm(x).sum().backward()
assert norm.weight.grad.isfinite().all() and x.grad.isfinite().all()
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh clone of the last commit."""
    if not (REPOSITORY / ".git").exists():
        pytest.skip("needs a git checkout")
    there = tmp_path_factory.mktemp("newcomer") / "clone"
    said(["git", "clone", "-q", "--depth", "1", f"file://{REPOSITORY}", str(there)], REPOSITORY)
    return there


def said(line: list[str], folder: Path, *paths: Path) -> str:
    """Run a command in a folder, with these folders before all others for imports; what it
    printed."""
    environment = {key: value for key, value in os.environ.items() if key != "NORMFORGE_GPU"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    done = subprocess.run(
        line, cwd=folder, env=environment, capture_output=True, text=True, timeout=patience(300)
    )
    assert done.returncode == 0, f"{line}: {done.stdout[-1000:]}{done.stderr[-3000:]}"
    return done.stdout


def test_an_installed_library_patches_a_model_in_another_folder(
    clone: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    site = tmp_path / "site"
    options = "--quiet --no-index --no-deps --no-build-isolation --no-cache-dir"
    pip = [sys.executable, "-m", "pip", "install", *options.split()]
    said([*pip, "--target", str(site), str(clone)], tmp_path)
    assert f"served from {site}" in said([sys.executable, "-c", PATCHING], tmp_path, site)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", load_targets())
def test_a_clone_tunes_for_every_gpu(clone: Path, tmp_path: Path, gpu: str) -> None:
    tune = [sys.executable, str(clone / "tune.py")]
    shape, out = "64x256:bf16", tmp_path / "out"
    found = said(
        [*tune, *f"--gpu {gpu} --shapes {shape} --trials 1 --fallbacks none --out {out}".split()],
        tmp_path,
    )
    assert "predicted" in found and f"Package: {out}" in found
    said([sys.executable, "-c", TRAINING], tmp_path, out, clone)
    said([*tune, "report", "--out", str(out)], tmp_path)
    (page,) = out.glob("report_*.html")
    assert shape in page.read_text()
    assert shape in said([*tune, "explain", "--out", str(out), "--shape", shape], tmp_path)
