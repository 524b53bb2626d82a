"""Functions, and what keeps one, are copied and pickled by reference; modules that are changed,
wrapped or patched after they were built work on."""

from __future__ import annotations

import copy
import functools
import importlib
import io
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrize
from torch import nn
from torch.optim.swa_utils import AveragedModel

import generated.h200.layernorm_backward as h200_layernorm
import generated.h200.rmsnorm_backward as h200_rmsnorm
import normforge
import normforge.batch_invariant as invariant
import normforge.layernorm as layernorm
from normforge.api import Package
from normforge.frontends.layer_norm import LayerNormPackage
from tests.support.entry_points import Swallowed, randn, write_layer_norm_package
from tests.support.fresh import printed_by

MODULES: list[Any] = [normforge, invariant, layernorm, h200_rmsnorm, h200_layernorm]
FUNCTIONS = [
    function
    for module in MODULES
    for name in module.__all__
    if callable(function := getattr(module, name)) and not isinstance(function, type)
] + [invariant.RMSNorm(8)._package_norm.matching("vllm-triton3.7").rms_norm]


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_of_a_function_is_the_function(function: Any, copied: Any) -> None:
    assert copied(function) == function
    bound = functools.partial(function, eps=1e-5)
    assert (copied(bound).func, copied(bound).keywords) == (function, {"eps": 1e-5})


def test_most_names_are_functions() -> None:
    assert len(FUNCTIONS) > 50


class Keeping(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(8))
        self.norm = normforge.rms_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(x, self.scale)
        return y


def test_a_module_that_keeps_a_function_can_be_copied() -> None:
    module, x = Keeping(), torch.randn(3, 8)
    for other in (copy.deepcopy(module), AveragedModel(module), pickled(module)):
        assert torch.equal(other(x), module(x))


def test_another_process_gets_its_own_functions(tmp_path: Path) -> None:
    file = tmp_path / "functions"
    file.write_bytes(pickle.dumps(FUNCTIONS))
    code = (
        f"import pickle, normforge; found = pickle.load(open({str(file)!r}, 'rb')); "
        "assert normforge.rms_norm in found and normforge.install in found"
    )
    printed_by(code)


@pytest.mark.parametrize("name", normforge._MODULES)
def test_functions_of_one_module_bring_with_them_what_finds_them(name: str, tmp_path: Path) -> None:
    """A process that has the generator imports no package with the library."""
    module = importlib.import_module(f"normforge.{name}")
    found = {n: f for n in module.__all__ if callable(f := getattr(module, n))}
    (tmp_path / "functions").write_bytes(pickle.dumps(found))
    code = f"""
import generator, importlib, pickle, sys
assert not any(name.startswith("normforge") for name in sys.modules)
found = pickle.load(open("{{folder}}/functions", "rb"))
module = importlib.import_module("normforge.{name}")
assert found == {{name: getattr(module, name) for name in found}} != {{}}
"""
    printed_by(code, tmp_path)


class NoNorm(torch.nn.RMSNorm):
    """A norm of a model, of which a package serves some."""


def patched() -> torch.nn.Module:
    model = torch.nn.Sequential(
        torch.nn.RMSNorm(8), NoNorm(8, eps=1e-3), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)
    )
    assert normforge.patch(model) == ["0", "1"] and layernorm.patch(model) == ["2"]
    return model


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_value(value: Any) -> Any:
    cloudpickle = pytest.importorskip("cloudpickle")
    return pickle.loads(cloudpickle.dumps(value))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved, by_value])
def test_a_patched_model_is_copied_as_a_patched_model(copied: Any) -> None:
    model, x = patched(), torch.randn(3, 8)
    other = copied(model)
    assert torch.equal(other(x), model(x))
    assert [type(module) for module in other] == [type(module) for module in model]
    assert "by Normforge" in repr(other[0]) and other[0].weight is not model[0].weight
    assert normforge.unpatch(other) == ["0", "1"] and layernorm.unpatch(other) == ["2"]
    assert type(other[1]) is NoNorm and torch.equal(pickled(other)(x), other(x))


@pytest.mark.parametrize("value", [normforge.rms_norm, normforge.RMSNorm, layernorm.layer_norm])
def test_cloudpickle_takes_names_by_reference(value: Any) -> None:
    assert by_value(value) == value


def test_another_process_reads_a_patched_model(tmp_path: Path) -> None:
    file = tmp_path / "model"
    model = torch.nn.Sequential(torch.nn.RMSNorm(8))
    normforge.patch(model)
    torch.save(model, file)
    code = (
        f"import torch; model = torch.load({str(file)!r}, weights_only=False); "
        "assert 'by Normforge' in repr(model); model(torch.randn(3, 8)).sum().backward()"
    )
    printed_by(code)


def test_a_copy_of_a_model_has_no_main_grad() -> None:
    """docs/adopting.md says so."""
    norm = normforge.RMSNorm(8, main_grad=True)
    norm.weight.main_grad = torch.zeros(8)
    other = copy.deepcopy(norm)
    assert not hasattr(other.weight, "main_grad")
    with pytest.raises(RuntimeError, match="let the trainer make its buffers"):
        other(torch.randn(3, 8)).sum().backward()


def test_functions_that_no_module_has_are_not_pickled(package: Package) -> None:
    with pytest.raises(pickle.PicklingError, match="no module has the functions of"):
        pickle.dumps(package.rms_norm)
    assert copy.deepcopy(package.rms_norm) == package.rms_norm
    assert copy.deepcopy(package.install) == package.install


# ---- Modules that are changed after they were built ----------------------------------------------


class WrittenOutRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-4

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        square = hidden_states.square().mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(square + self.eps))


@pytest.fixture(scope="module")
def layer_package(tmp_path_factory: pytest.TempPathFactory) -> LayerNormPackage:
    return write_layer_norm_package(tmp_path_factory.mktemp("layer_package"))


def test_bias_that_was_given_later_stays_where_parameters_are_wrapped(package: Package) -> None:
    norm = package.RMSNorm(16)
    norm.bias = nn.Parameter(torch.ones(16))
    nothing = torch.zeros(2, 16)
    assert torch.equal(norm(nothing), torch.ones(2, 16))
    replica = norm._replicate_for_data_parallel()  # its parameters are plain attributes
    replica.weight, replica.bias = norm.weight.detach(), norm.bias.detach()
    assert torch.equal(replica(nothing), torch.ones(2, 16))
    torch.nn.utils.parametrize.register_parametrization(norm, "bias", nn.Identity())
    assert torch.equal(norm(nothing), torch.ones(2, 16))


def test_main_grad_may_be_set_later(package: Package) -> None:
    norm = package.RMSNorm(16)
    norm.main_grad, norm.weight.main_grad = True, torch.zeros(16)
    norm(randn(4, 16)).sum().backward()
    assert norm.weight.main_grad.abs().sum() > 0 and norm.weight.grad is None


@pytest.mark.parametrize("wanted", [False, True])
def test_main_grad_without_a_gradient_works_under_transforms(
    package: Package, wanted: bool
) -> None:
    norm = package.RMSNorm(16, main_grad=True).requires_grad_(wanted)
    x = randn(3, 4, 16)
    if wanted:
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.func.vmap(norm)(x)
    else:
        assert torch.allclose(torch.func.vmap(norm)(x), norm(x))


def test_main_grads_dummy_is_no_nan_where_that_is_looked_for(package: Package) -> None:
    norm = package.RMSNorm(16, main_grad=True)
    norm.weight.main_grad, norm.weight.grad_added_to_main_grad = torch.zeros(16), False
    torch.use_deterministic_algorithms(True)  # new memory is NaN
    try:
        with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
            norm(randn(4, 16)).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert norm.weight.grad_added_to_main_grad


def test_main_grads_dummy_costs_nothing_elsewhere(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = package.RMSNorm(16, main_grad=True)
    norm.weight.main_grad, norm.weight.grad_added_to_main_grad = torch.zeros(16), False
    monkeypatch.setattr(torch, "zeros_like", lambda *_: pytest.fail("the dummy was filled"))
    norm(randn(4, 16)).sum().backward()
    assert norm.weight.grad_added_to_main_grad


def test_main_grad_norms_can_be_traced_and_frozen(package: Package) -> None:
    norm, x = package.RMSNorm(16, main_grad=True), randn(4, 16)
    assert torch.allclose(torch.jit.trace(norm, x)(x), norm(x))
    norm.requires_grad_(False)
    wanted = torch.func.grad(lambda t: package.RMSNorm(16)(t).sum())(x)
    assert torch.allclose(torch.func.grad(lambda t: norm(t).sum())(x), wanted)


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_compiled_norms_take_jagged_tensors(
    package: Package, layer_package: LayerNormPackage, kind: str
) -> None:
    ours = package.RMSNorm(16) if kind == "RMSNorm" else layer_package.LayerNorm(16)
    rows = [randn(2, 16, seed=1), randn(5, 16, seed=2)]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged)
    y = torch.compile(ours, backend="aot_eager", fullgraph=True)(x)
    for found, row in zip(y.unbind(), rows, strict=True):
        assert torch.allclose(found, ours(row), atol=1e-6)


def test_gradient_that_nobody_computed_leaves_the_weight_without_one(
    layer_package: LayerNormPackage,
) -> None:
    """RMSNorm's test is in test_native_node.py."""
    norm = layer_package.LayerNorm(16)
    Swallowed.apply(norm(randn(4, 16))).sum().backward()
    assert norm.weight.grad is None


@pytest.mark.parametrize("kind", ["RMSNorm", "main_grad", "LayerNorm", "operator"])
def test_sum_of_tensors_without_gradients_wants_none(
    package: Package, layer_package: LayerNormPackage, kind: str
) -> None:
    x, residual = randn(4, 16), randn(4, 16, seed=1)
    weight = torch.ones(16, requires_grad=True)
    if kind == "operator":
        y, _, stream = package.operators.add_rms_norm(x, residual, weight, None, 0.0, package.name)
    elif kind == "LayerNorm":
        y, stream = layer_package.LayerNorm(16)(x, residual)
    else:
        norm = package.RMSNorm(16, main_grad=kind == "main_grad")
        norm.weight.main_grad = torch.zeros(16)
        y, stream = norm(x, residual)
    assert y.requires_grad and not stream.requires_grad
    y.sum().backward()


def test_patched_norms_take_their_argument_by_its_name(
    package: Package, layer_package: LayerNormPackage
) -> None:
    model, x = nn.Sequential(WrittenOutRMSNorm(), nn.LayerNorm(16)), randn(4, 16)
    wanted = model[0](hidden_states=x), model[1](input=x)
    assert package.patch(model) == ["0"] and layer_package.patch(model) == ["1"]
    found = model[0](hidden_states=x), model[1](input=x)
    assert all(map(torch.allclose, found, wanted))
    assert torch.allclose(layer_package.LayerNorm(16)(input=x), wanted[1], atol=1e-6)


def test_patched_norms_have_the_signature_of_their_class(package: Package) -> None:
    model, x = nn.Sequential(WrittenOutRMSNorm(), nn.RMSNorm(16)), randn(4, 16)
    assert package.patch(model) == ["0", "1"]
    assert torch.allclose(torch.fx.symbolic_trace(model[1])(x), model[1](x))
    with pytest.raises(TypeError, match="nonsense"):
        model[0](nonsense=x)
    model[0].__class__ = type("OfAWrapperRMSNorm", (type(model[0]),), {})
    assert package.patch(model, "llama") == ["0", "1"], "as the last time says"


def test_unpatch_says_what_it_cannot_undo(
    package: Package, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(WrittenOutRMSNorm(), WrittenOutRMSNorm())
    assert package.patch(model) == ["0", "1"]
    torch.nn.utils.parametrize.register_parametrization(model[1], "weight", nn.Identity())
    assert package.unpatch(model) == ["0"]
    (said,) = (record.getMessage() for record in caplog.records if record.levelno > logging.INFO)
    assert said.startswith("unpatch leaves 1 as it is")


def test_repr_tells_batch_invariant_norms() -> None:
    from generated.h200 import rmsnorm_backward, rmsnorm_invariant_backward

    assert "batch_invariant=True" in repr(rmsnorm_invariant_backward.RMSNorm(4096))
    assert "batch_invariant" not in repr(rmsnorm_backward.RMSNorm(4096))
