"""`python -m benchmarks.training.layers`: its layers run under every way, and its summary."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.training import layers
from benchmarks.training.fp8_linear import BlockLinear, multiply_in_fp8
from benchmarks.training.layers import WAYS, Layer, report, step_of
from benchmarks.training.step_kernels import summary
from benchmarks.training.tensor_parallel import on_ranks
from normforge.frontends.graph_pass import route
from normforge.frontends.quantized import QuantizedFunctions
from tests.support.block_product import scaled_mm
from tests.support.entry_points import write_package
from tests.support.split_layer import gradients

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def test_products_and_attention_are_left_out() -> None:
    names = {
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN": 700.0,
        "sm90_xmma_gemm_bf16bf16_bf16f32": 300.0,
        "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>": 60.0,
        "void pytorch_flash::flash_bwd_kernel": 40.0,
        "triton_poi_fused_add_0": 30.0,
        "rmsnorm_backward": 50.0,
    }
    one = [*names.items(), ("rmsnorm_backward", 20.0)]
    whole, others, by_name = summary([one, one, one[:4]])
    assert (whole, others) == pytest.approx((1.2, 0.1))
    assert by_name == []  # of the last step
    assert summary([one])[2] == [
        ("rmsnorm_backward", pytest.approx(0.07), 2),
        ("triton_poi_fused_add_0", pytest.approx(0.03), 1),
    ]
    said = report("qwen3", "fused", [one])
    assert said.splitlines()[0] == (
        "qwen3, fused: 1.200 ms, of them 0.100 beside products and attention"
    )
    assert len(said.splitlines()) == 3


def test_what_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for given in (["--models", "gpt2"], ["--ways", "slowly"]):
        with pytest.raises(SystemExit, match="2"):
            layers.main(given)
    assert capsys.readouterr().err.count("unknown model or way") == 2
    with pytest.raises(SystemExit, match="2"):
        layers.main(["--models", "olmo2", "--ranks", "2"])
    assert "--ranks splits llama, qwen3 alone" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        layers.main(["--models", "llama", "--ranks", "1000"])
    assert "this needs 1000 GPUs" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("model", layers.MODELS)
def test_layers_have_the_gradients_of_eager_code_under_every_way(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    sizes = SIZES | ({} if model == "olmo2" else {"head_dim": 16})
    layer = Layer(model, 8, sizes, "cpu").float()
    if isinstance(layer.turns, tuple):  # and no complex numbers
        layer.turns = tuple(one.float() for one in layer.turns)
    x, dy = torch.randn(2, 8, 32, requires_grad=True), torch.randn(2, 8, 32)
    (wanted,) = torch.autograd.grad(layer(x), x, dy)
    for way in WAYS:
        torch._dynamo.reset()
        step_of(layer, way, x, dy)()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "sequence"), [("llama", False), ("qwen3", True)])
def test_a_layer_that_two_ranks_share_has_the_gradients_of_the_whole(
    model: str, sequence: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    ways = ("eager_fused", "both")
    wanted = torch.tensor(gradients(None, model, False, ("eager",))["eager"])
    if sequence:
        wanted = wanted.chunk(2, 1)[0]
    given = {"model": model, "sequence": sequence, "ways": ways}
    found = on_ranks(2, "cpu", partial(gradients, **given))
    for way in ways:
        torch.testing.assert_close(torch.tensor(found[way]), wanted, rtol=1e-4, atol=1e-4)


def test_linear_layers_multiply_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    torch.manual_seed(0)
    one = torch.nn.Sequential(torch.nn.Linear(256, 384, bias=False)).bfloat16()
    other = multiply_in_fp8(deepcopy(one))
    assert isinstance(other[0], BlockLinear)
    x = torch.randn(2, 5, 256).bfloat16().requires_grad_()
    dy = torch.randn(2, 5, 384).bfloat16()
    found, wanted = (
        [y := layer(x), *torch.autograd.grad(y, [x, layer[0].weight], dy)] for layer in (other, one)
    )
    for narrow, wide, most in zip(found, wanted, (0.04, 0.04, 0.001), strict=True):
        error = (narrow - wide).float().norm() / wide.float().norm()
        assert narrow.shape == wide.shape and error <= most
    assert float((found[0] - wanted[0]).float().norm()) > 0  # in FP8


def test_norms_of_a_layer_in_fp8_quantize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels do what the recipe does before its products."""
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(QuantizedFunctions, "have_kernels", lambda *_, **__: True)
    package = write_package(tmp_path / "package")
    package.ops.quantized = "normforge.quantized_packages"
    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 256, bias=False)
    linear = multiply_in_fp8(torch.nn.Sequential(layer.bfloat16()))

    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        x, w = (one.detach().requires_grad_() for one in (x, w))
        h = x + linear(x)
        y = h + linear(package.rms_norm(h, w))
        return torch.autograd.grad(y, (x, w), torch.ones_like(y))

    traced = make_fx(step)(torch.randn(6, 256).bfloat16(), torch.rand(256).bfloat16())
    graph = route(traced, package.ops).graph
    found = [str(node.target) for node in graph.nodes if "quantized" in str(node.target)]
    assert [one.split(".")[1] for one in found] == [
        "add_rms_norm_quantized",
        "rms_norm_backward_quantized",
    ]
