"""`patch` of LayerNorm's package."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from normforge.api import Package
from normforge.frontends.layer_norm import LayerNormPackage
from tests.support.entry_points import (
    filled,
    grads,
    leaf,
    same,
    write_layer_norm_package,
    write_package,
)
from tests.support.foreign_norms import made


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> LayerNormPackage:
    return write_layer_norm_package(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def rms_package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return write_package(tmp_path_factory.mktemp("rms"))


class WideLayerNorm(nn.LayerNorm):
    """The norm of models that keep their norms in fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float()).type_as(x)


class ScaledLayerNorm(nn.LayerNorm):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.ones(()))


class Centred(nn.LayerNorm):
    pass


class CohereLayerNorm(nn.Module):
    """A norm as Hugging Face's Cohere has it, and with a bias where it is asked for."""

    def __init__(
        self, width: int, eps: float = 1e-5, bias: bool = True, elementwise_affine: bool = True
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        if bias and elementwise_affine:
            self.bias = nn.Parameter(torch.zeros(width))
        self.variance_epsilon = eps
        self.normalized_shape = width  # unlike PyTorch's, no tuple

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        wide = hidden_states.to(torch.float32)
        mean = wide.mean(-1, keepdim=True)
        variance = (wide - mean).pow(2).mean(-1, keepdim=True)
        y = self.weight.float() * ((wide - mean) * torch.rsqrt(variance + self.variance_epsilon))
        if hasattr(self, "bias"):
            y = y + self.bias.float()
        return y.to(hidden_states.dtype)


def nodes_of(y: torch.Tensor) -> str:
    return type(y.grad_fn).__name__


@pytest.mark.parametrize("affine", [{}, {"bias": False}, {"elementwise_affine": False}])
@pytest.mark.parametrize("kind", [nn.LayerNorm, WideLayerNorm, Centred, CohereLayerNorm])
def test_norms_are_served_and_given_back(
    package: LayerNormPackage, kind: Any, affine: dict[str, bool]
) -> None:
    model = filled(nn.Sequential(kind(16, **affine), nn.Linear(16, 16), kind(16, 1e-3, **affine)))
    before, names = copy.deepcopy(model), list(model.state_dict())
    x = leaf(4, 16)
    wanted = [model(x), *grads(model(x), x, *model.parameters())]
    assert package.patch(model) == ["0", "2"] == package.patch(model)
    assert nodes_of(model(x)) == "EagerLayerNormBackward"
    found = [model(x), *grads(model(x), x, *model.parameters())]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert all(isinstance(model[i], kind) for i in (0, 2))
    assert type(model[0]) is type(model[2])
    assert list(model.state_dict()) == names
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    torch.compiler.reset()  # all of these models share the code of one forward
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert same(grads(compiled(x), x), grads(model(x), x))
    assert package.unpatch(model) == ["0", "2"]
    assert [type(m) for m in model.modules()] == [type(m) for m in before.modules()]
    assert torch.equal(model(x), wanted[0])
    assert package.unpatch(model) == []


def test_packages_of_both_norms_patch_one_model(
    package: LayerNormPackage, rms_package: Package, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.LayerNorm(16), nn.RMSNorm(16))
    assert package.patch(model) == ["0"]
    assert rms_package.patch(model) == ["1"]
    assert rms_package.patch(CohereLayerNorm(16)) == []
    assert "; normforge.layernorm.patch serves LayerNorms over one dimension" in caplog.text
    assert package.patch(model) == ["0"]
    assert nodes_of(model(leaf(4, 16))) == "EagerNormBackward"
    assert nodes_of(model[0](leaf(4, 16))) == "EagerLayerNormBackward"
    assert rms_package.unpatch(model) == ["1"]
    assert type(model[0]) is not nn.LayerNorm
    assert package.unpatch(model) == ["0"]
    with torch.device("meta"):
        empty = nn.Sequential(nn.LayerNorm(16), WideLayerNorm(16))
    assert package.patch(empty) == ["0", "1"]


def plain(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.LayerNorm.forward(norm, x)


def with_scales(norm: Any, x: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, norm.normalized_shape, *scales, norm.eps)


def of_images(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """Take four dimensions for channels before rows and columns."""
    if x.dim() != 4:
        return plain(norm, x)
    return plain(norm, x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def with_detached_statistics(norm: Any, x: torch.Tensor) -> torch.Tensor:
    variance, mean = torch.var_mean(x.detach(), -1, correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + norm.eps) * norm.weight + norm.bias


def of_cohere(change: Callable[[Any, torch.Tensor], torch.Tensor]) -> type:
    return made(CohereLayerNorm, "OtherCohereLayerNorm", change)


OTHERS: dict[str, Any] = {
    "Double": lambda norm, x: 2 * plain(norm, x),
    "Offset": lambda norm, x: with_scales(norm, x, 1 + norm.weight, norm.bias),
    "Float": lambda norm, x: with_scales(norm, x.float(), norm.weight.float(), norm.bias.float()),
    "Image": of_images,
    "Detached": with_detached_statistics,
    "Frozen": lambda norm, x: with_scales(norm, x, norm.weight, norm.bias.detach()),
    "Clamped": lambda norm, x: plain(norm, x.clamp(-100, 100)),
    "Narrowed": lambda norm, x: plain(norm, x.to(norm.weight.dtype)),
    "OtherInEvaluation": lambda norm, x: plain(norm, x) * (2 - norm.training),
}
KINDS = [
    ScaledLayerNorm,
    *(made(nn.LayerNorm, f"{name}LayerNorm", of) for name, of in OTHERS.items()),
    of_cohere(lambda norm, x: x * torch.rsqrt(x.var(-1, keepdim=True) + norm.variance_epsilon)),
    of_cohere(lambda norm, x: CohereLayerNorm.forward(norm, x.float())),
    of_cohere(lambda norm, x: CohereLayerNorm.forward(norm, x) * (1 + norm.variance_epsilon * 1e3)),
    of_cohere(lambda norm, x: CohereLayerNorm.forward(norm, x) + norm.weight),
]


def test_an_eps_that_is_a_tensor_may_change_and_is_left_alone(package: LayerNormPackage) -> None:
    changing: Any = WideLayerNorm(16)
    changing.eps = torch.tensor(1e-5)
    assert package.patch(changing) == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_computes_anything_else_is_left_alone(
    package: LayerNormPackage, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    others = [kind(16), nn.LayerNorm((4, 16)), nn.RMSNorm(16), package.LayerNorm(16)]
    kinds = [type(one) for one in others]
    assert package.patch(nn.Sequential(*others, WideLayerNorm(16))) == ["4"]
    assert [type(one) for one in others] == kinds
    assert not caplog.records
    assert package.patch(nn.Sequential(kind(16), nn.RMSNorm(16))) == []
    assert caplog.records[-1].levelname == "WARNING"
    assert "; normforge.rmsnorm.patch serves RMSNorms" in caplog.text
    assert package.patch(nn.LayerNorm((4, 4))) == []
    assert "; normforge.layernorm" not in caplog.text
