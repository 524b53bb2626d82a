"""`python -m benchmarks.training.layers`: its layers run under every way, and its summary."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.training import layers
from benchmarks.training.layers import WAYS, Layer, report, step_of, summary

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
    layer.turns = tuple(one.float() for one in layer.turns)
    x, dy = torch.randn(2, 8, 32, requires_grad=True), torch.randn(2, 8, 32)
    (wanted,) = torch.autograd.grad(layer(x), x, dy)
    for way in WAYS:
        torch._dynamo.reset()
        step_of(layer, way, x, dy)()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, wanted, rtol=1e-4, atol=1e-4)
