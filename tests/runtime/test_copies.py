"""Functions, and what keeps one, are copied and pickled by reference."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import generated.h200.layernorm_backward as h200_layernorm
import generated.h200.rmsnorm_backward as h200_rmsnorm
import normforge
import normforge.batch_invariant as invariant
import normforge.layernorm as layernorm
from normforge.api import Package
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
