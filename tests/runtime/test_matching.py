"""Norms with `matches` on the CPU, where the formula serves: names, modules and compiled code."""

from __future__ import annotations

import copy
import pickle
from importlib.metadata import PackageNotFoundError

import pytest
import torch

import normforge
from generator.paths import GENERATED
from normforge import batch_invariant
from normforge.frontends import matching
from normforge.frontends.batch_invariant import BatchInvariantPackage
from normforge.frontends.invariant_forward import BatchInvariantForward, MatchingForward
from normforge.frontends.matching import form_of
from normforge.frontends.operators import Operators
from normforge.serve.kernels import source_of
from tests.support.entry_points import grads, leaf, same

NAMED = "vllm-triton3.7"


@pytest.mark.parametrize(
    ("version", "form"),
    [(f"3.{minor}", "in_turn" if minor < 8 else "in_pairs") for minor in range(5, 10)],
)
def test_version_of_triton_decides(
    version: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert form_of(f"vllm-triton{version}") == f"tiles_{form}"
    monkeypatch.setattr(matching, "version", lambda name: f"{version}.1+cu130")
    assert form_of("vllm") == f"tiles_{form}"


def test_tables_have_the_kernels_alone_that_may_serve() -> None:
    """Kernels that add in another order, or in that of Triton, are for other calls."""
    folder = GENERATED / "h200" / "rmsnorm_invariant_backward"
    source = source_of(folder, folder.name)
    whole = source(None).forward
    assert whole is not None and whole.tuned and whole.fallback
    invariant = BatchInvariantForward(source).table
    assert invariant is not None and (invariant.tuned, invariant.fallback) == (whole.tuned, ())
    for form in ("tiles_in_turn", "tiles_in_pairs"):
        table = MatchingForward(source, form).table
        assert table is not None and table.tuned == ()
        assert table.fallback == tuple(k for k in whole.fallback if k.config["form"] == form)
        assert 0 < len(table.fallback) < len(whole.fallback)


@pytest.mark.parametrize("version", ["3.4", "3.10", "4.0"])
def test_unknown_version_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=rf"Triton {version} adds, only at 3.5 to 3.9"):
        form_of(f"vllm-triton{version}")
    monkeypatch.setattr(matching, "version", lambda name: f"{version}.1")
    with pytest.raises(ValueError, match=rf"Triton {version}.1 adds, only at 3.5 to 3.9"):
        form_of("vllm")


@pytest.mark.parametrize("name", ["", "torch", "vllm-triton", "vllm-triton3", "vllm 3.7", 3])
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="matches must be like"):
        form_of(name)


def test_without_triton_its_version_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(matching, "version", version)
    with pytest.raises(RuntimeError, match="there is none: name the one that vLLM runs with"):
        form_of("vllm")
    assert form_of(NAMED)


@pytest.mark.parametrize(
    ("variable", "bad", "good"),
    [("TRITON_DEFAULT_FP_FUSION", "0", "1"), ("TRITON_FORCE_DISABLE_FP_FUSION", "true", "0")],
)
def test_triton_that_does_not_contract_is_refused(
    variable: str, bad: str, good: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matching, "version", lambda name: "3.9.0")
    monkeypatch.setenv(variable, good)
    assert form_of("vllm") == "tiles_in_pairs"
    monkeypatch.setenv(variable, bad)
    with pytest.raises(RuntimeError, match=rf"{variable}={bad}"):
        form_of("vllm")
    assert form_of(NAMED)  # of a process elsewhere


def test_function_and_module_have_the_gradients_of_the_package() -> None:
    x, weight = leaf(4, 64), leaf(64, seed=1)
    y = batch_invariant.rms_norm(x, weight, 1e-6, matches=NAMED)
    plain = batch_invariant.rms_norm(x, weight, 1e-6)
    assert same((y, *grads(y, x, weight)), (plain, *grads(plain, x, weight)))
    norm = batch_invariant.RMSNorm(64, 1e-6, matches=NAMED)
    norm.weight = torch.nn.Parameter(weight.detach())
    assert torch.equal(norm(x), plain)


@pytest.mark.parametrize("main_grad", [False, True])
def test_module_keeps_what_it_matches(main_grad: bool) -> None:
    norm = batch_invariant.RMSNorm(64, matches=NAMED, main_grad=main_grad)
    assert f"matches={NAMED!r}" in repr(norm)
    served = norm._norm()
    assert served is not batch_invariant.RMSNorm(64)._norm()
    for other in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert other._norm() is served
        assert other(torch.ones(2, 64)).shape == (2, 64)
    assert norm.state_dict().keys() == torch.nn.RMSNorm(64).state_dict().keys()


def test_norms_of_one_order_share_their_operators() -> None:
    of = {
        name: batch_invariant.RMSNorm(64, matches=f"vllm-triton{name}")._norm()
        for name in ("3.5", "3.7", "3.8")
    }
    assert of["3.5"] is of["3.7"] is not of["3.8"]
    names = {norm.operators.package for norm in of.values()}
    assert len(names) == 2 and batch_invariant.RMSNorm(64)._norm().operators.package not in names


def test_a_graph_may_ask_for_a_form_before_anybody_else() -> None:
    invariant = BatchInvariantPackage(GENERATED / "h200" / "rmsnorm_invariant_backward")
    x = torch.ones(2, 64)
    name = f"{invariant.name}+tiles_in_pairs"
    y, _ = invariant.operators.rms_norm.v2(x, None, 1e-6, 0.0, name)
    norm = invariant._norm.matching("vllm-triton3.8")
    assert norm.operators is Operators.served(name) and torch.equal(y, norm.rms_norm(x, None, 1e-6))


def test_a_package_that_is_loaded_again_serves_its_forms_as_well() -> None:
    """A graph that was compiled before asks for a form by its name alone."""
    folder = GENERATED / "h200" / "rmsnorm_invariant_backward"
    first = BatchInvariantPackage(folder, "of a test")
    form = "of a test+tiles_in_pairs"
    assert Operators.served(form) is first._norm.matching("vllm-triton3.8").operators
    again = BatchInvariantPackage(folder, "of a test")
    assert Operators.served(form) is again._norm.matching("vllm-triton3.8").operators
    assert first._norm.matching("vllm-triton3.8").operators is not Operators.served(form)


def test_module_refuses_what_vllm_does_not_have() -> None:
    with pytest.raises(ValueError, match="weight_offset must be 0"):
        batch_invariant.RMSNorm(64, weight_offset=1.0, matches=NAMED)
    norm = batch_invariant.RMSNorm(64, matches=NAMED)
    with pytest.raises(ValueError, match="no residual"):
        norm(torch.ones(2, 64), residual=torch.ones(2, 64))


def test_what_is_no_tensor_is_named_or_traced() -> None:
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor, got list"):
        batch_invariant.rms_norm([1.0], torch.ones(1), matches=NAMED)
    norm, x = batch_invariant.RMSNorm(64, matches=NAMED), torch.randn(4, 64)
    traced = torch.fx.symbolic_trace(torch.nn.Sequential(norm))
    assert torch.allclose(traced(x), norm(x), atol=1e-6)


def test_only_batch_invariant_norms_match_another() -> None:
    with pytest.raises(ValueError, match="needs batch-invariant kernels"):
        normforge.RMSNorm(64, matches=NAMED)
    norm = normforge.RMSNorm(64, batch_invariant=True, matches=NAMED)
    assert isinstance(norm, batch_invariant.RMSNorm)


def test_compiled_code_has_one_operator_for_it() -> None:
    norm, seen = batch_invariant.RMSNorm(64, matches=NAMED), []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    compiled = torch.compile(norm, backend=backend, fullgraph=True)
    x = torch.randn(4, 64)
    assert torch.equal(compiled(x), norm(x))
    assert norm._norm().operators.rms_norm in seen
