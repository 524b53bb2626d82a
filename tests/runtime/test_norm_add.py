"""`rms_norm(x, w, add=r)`: on the CPU, with and without what stands in for its kernel."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import normforge
from generator.paths import GENERATED
from normforge.api import Package
from normforge.frontends.norm_add import NormAddPackage, NormAndAdd
from normforge.operations import RMSNORM_ADD_FORWARD
from normforge.serve.collect import Recorder, collecting
from tests.support.entry_points import grads, leaf, write_package
from tests.support.norm_add import Kernels

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
N = 16


@pytest.fixture
def served(tmp_path: Path) -> Package:
    return write_package(tmp_path / "package")


@pytest.fixture
def kernels(served: Package, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels(served, monkeypatch)


def drawn(*shape: int, dtype: torch.dtype = FP32) -> list[torch.Tensor]:
    """x, weight and r."""
    rows = [leaf(*shape, N, dtype=dtype, seed=seed) for seed in (0, 1)]
    return [rows[0], leaf(N, dtype=dtype, seed=2), rows[1]]


def eager(x: Any, weight: Any, r: Any, eps: float | None = 1e-6, offset: float = 0.0) -> Any:
    scale = None if weight is None else weight + offset
    return r + functional.rms_norm(x, x.shape[-1:], scale, eps)


def results(norm: Callable[..., Any], given: list[torch.Tensor]) -> list[torch.Tensor]:
    y = norm(*given)
    return [y, *grads(y, *given)]


def check(found: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def both(package: Package) -> Callable[..., Any]:
    return lambda x, weight, r, eps=1e-6, offset=0.0: package.rms_norm(
        x, weight, eps, add=r, weight_offset=offset
    )


# ---- Results and gradients -----------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, FP64])
@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("with_kernels", [False, True])
def test_results_and_gradients_are_those_of_float64(
    served: Package, monkeypatch: pytest.MonkeyPatch, with_kernels: bool, how: str,
    dtype: torch.dtype, eps: float | None, offset: float,
) -> None:  # fmt: skip
    kernels = Kernels(served, monkeypatch) if with_kernels else None
    norm = both(served)
    if how == "compiled":
        torch._dynamo.reset()
        norm = torch.compile(norm, backend="aot_eager", fullgraph=True)
    given = drawn(3, 5, dtype=dtype)
    found = results(lambda *leaves: norm(*leaves, eps, offset), given)
    wide = [one.detach().double().requires_grad_() for one in given]
    eps = eps if eps is not None or dtype == FP64 else torch.finfo(FP32).eps
    wanted = results(lambda *leaves: eager(*leaves, eps, offset), wide)
    tolerance = 4 * torch.finfo(dtype).eps
    for one, exact, like in zip(found, wanted, [given[0], *given], strict=True):
        assert (one.dtype, one.shape) == (dtype, like.shape)
        torch.testing.assert_close(one.double(), exact, rtol=tolerance, atol=16 * tolerance)
    if kernels is not None:
        assert kernels.calls == [] if dtype == FP64 else [offset]


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_one_rounding_is_less_than_pytorchs_two(
    served: Package, kernels: Kernels, dtype: torch.dtype
) -> None:
    x, weight, r = (one.detach() for one in drawn(64, 64, dtype=dtype))
    found, twice = both(served)(x, weight, r), eager(x, weight, r)
    assert len(kernels.calls) == 1
    kernels.why = "another length of rows"
    after = both(served)(x, weight, r)  # as accurate as PyTorch
    assert len(kernels.calls) == 1
    exact = eager(x.double(), weight.double(), r.double())
    errors = [(one.double() - exact).norm() for one in (found, after, twice)]
    assert errors[0] < 0.9 * errors[2]
    assert errors[1] <= 1.01 * errors[2]


def test_gradients_are_checked_by_finite_differences(served: Package) -> None:
    given = drawn(2, 3, dtype=FP64)
    assert torch.autograd.gradcheck(both(served), given)
    assert torch.autograd.gradgradcheck(both(served), given)


def test_the_gradient_of_what_is_added_is_that_of_the_sum_itself(
    served: Package, kernels: Kernels
) -> None:
    x, weight, r = drawn(4)
    y = both(served)(x, weight, r)
    dy = torch.randn_like(y)
    (dr,) = torch.autograd.grad(y, r, dy)
    assert dr is dy


WANTED = {"x": (0,), "the weight": (1,), "r": (2,), "x and r": (0, 2), "nothing": ()}


@pytest.mark.parametrize("which", WANTED)
def test_only_gradients_that_are_wanted_are_there(
    served: Package, kernels: Kernels, which: str
) -> None:
    given = drawn(4)
    for i, one in enumerate(given):
        one.requires_grad_(i in WANTED[which])
    y, wanted = both(served)(*given), eager(*given)
    assert len(kernels.calls) == 1
    assert y.requires_grad == bool(WANTED[which])
    if y.requires_grad:
        leaves = [given[i] for i in WANTED[which]]
        check(grads(y, *leaves), grads(wanted, *leaves))


def test_no_weight_is_ones(served: Package, kernels: Kernels) -> None:
    x, _, r = drawn(4)
    for offset in (0.0, 1.0):
        y = served.rms_norm(x, None, 1e-6, add=r, weight_offset=offset)
        wanted = r + (1 + offset) * functional.rms_norm(x, (N,), None, 1e-6)
        check([y, *grads(y, x, r)], [wanted, *grads(wanted, x, r)])
    assert kernels.calls == [0.0, 1.0]


def test_weights_of_heads_and_a_bias_are_the_norms(served: Package, kernels: Kernels) -> None:
    x, r = leaf(2, 3, N), leaf(2, 3, N, seed=1)
    heads, bias = leaf(3, N, seed=2), leaf(N, seed=3)
    found = served.rms_norm(x, heads, 1e-6, add=r, bias=bias)
    wanted = r + served.rms_norm(x, heads, 1e-6, bias=bias)
    given = (x, heads, r, bias)
    check([found, *grads(found, *given)], [wanted, *grads(wanted, *given)])
    assert torch.equal(served.rms_norm(x, heads, add=r), r + served.rms_norm(x, heads))
    assert kernels.calls == []


def test_an_fp64_weight_and_a_number_as_eps_are_taken(served: Package, kernels: Kernels) -> None:
    x, weight, r = drawn(4, dtype=BF16)
    y = served.rms_norm(x, weight.double(), torch.tensor(1e-6), add=r)
    assert torch.equal(y, both(served)(x, weight.float(), r)) and len(kernels.calls) == 2


def test_the_forward_alone_gives_what_its_backward_takes(
    served: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, r = (one.detach() for one in drawn(4))
    y, rstd = served.rmsnorm_forward(x, weight, 1e-6, add=r)
    kernels = Kernels(served, monkeypatch)
    again = served.rmsnorm_forward(x, weight, 1e-6, add=r)
    assert kernels.calls == [0.0]
    check([*again], [y, rstd])
    check([rstd], [served.rmsnorm_forward(x, weight, 1e-6)[1]])
    check([y], [eager(x, weight, r)])


@pytest.mark.parametrize("eps", [None, 0.0, 1e-6, 0.5])
def test_a_package_of_the_forward_alone_takes_any_eps(eps: float | None) -> None:
    """None is PyTorch's: the eps of fp32. Rows are small, so that each of them shows."""
    package = NormAddPackage(GENERATED / "h200" / "rmsnorm_add_forward")
    x, weight, r = (one.detach() for one in drawn(4))
    x = x * 1e-4
    y, rstd = package.rmsnorm_forward(x, weight, eps, add=r)
    number = torch.finfo(FP32).eps if eps is None else eps
    check([y], [eager(x, weight, r, number)])
    check([rstd], [(x.square().mean(-1, keepdim=True) + number).rsqrt()])


def test_tensors_of_inference_mode_take_part(served: Package, kernels: Kernels) -> None:
    x, weight, r = drawn(4)
    with torch.inference_mode():
        rows = x * 1
        check([both(served)(rows, weight, r)], [eager(rows, weight, r)])
    y = both(served)(rows, weight, r)
    check(grads(y, weight, r), grads(eager(rows.clone(), weight, r), weight, r))


# ---- What does not fit ---------------------------------------------------------------------------

X = torch.ones(4, N)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another shape": ({"add": torch.ones(N)}, "add must have x's shape (4, 16), got (16,)"),
    "another dtype": ({"add": X.bfloat16()}, "add must have x's dtype torch.float32, got torch.bf"),
    "no tensor": ({"add": 1.0}, "add must be a torch.Tensor, got float"),
    "another device": ({"add": X.to("meta")}, "add is on meta and x on cpu"),
    "a residual, too": (
        {"add": X, "residual": X},
        "residual is added before the norm and add behind it: give one of them",
    ),
    "another dtype of y": (
        {"add": X, "out_dtype": BF16},
        "y has the dtype of x and add: leave out_dtype and residual_dtype out",
    ),
    "a weight of other rows": ({"add": X, "weight": torch.ones(3)}, "x of shape (4, 16) has rows"),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("with_kernels", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_one_sentence(
    served: Package, monkeypatch: pytest.MonkeyPatch, name: str, with_kernels: bool, compiled: bool
) -> None:
    if with_kernels:
        Kernels(served, monkeypatch)
    named, said = WRONG[name]
    norm: Any = lambda x: served.rms_norm(x, **named)  # noqa: E731
    kinds: tuple[type[Exception], ...] = (TypeError, ValueError)
    if compiled:
        norm, kinds = torch.compile(norm, backend="eager"), (Exception,)
    with pytest.raises(kinds, match=re.escape(said)) as error:
        norm(X)
    if not compiled:
        assert "\n" not in str(error.value)
        with pytest.raises((TypeError, ValueError), match=re.escape(said)):
            served.RMSNorm(N)(
                X, **{k: v for k, v in named.items() if k in ("add", "residual")}
            ) if (not {"weight", "out_dtype"} & named.keys()) else norm(X)


# ---- Modules -------------------------------------------------------------------------------------

MODULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "offset": {"weight_offset": 1.0},
    "without a weight": {"elementwise_affine": False},
    "bias": {"bias": True},
}


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("name", MODULES)
def test_a_module_adds(served: Package, kernels: Kernels, name: str, dims: int) -> None:
    shape = (4, N)[-dims:]
    norm = served.RMSNorm(shape, eps=1e-6, **MODULES[name])
    with torch.no_grad():
        for i, parameter in enumerate(norm.parameters()):
            parameter.copy_(leaf(*shape, seed=5 + i))
    x, r = leaf(2, 4, N), leaf(2, 4, N, seed=1)
    given = [x, r, *norm.parameters()]
    found, wanted = norm(x, add=r), r + norm(x)
    check([found, *grads(found, *given)], [wanted, *grads(wanted, *given)])
    assert len(kernels.calls) == (name != "bias")
    assert torch.equal(copy.deepcopy(norm)(x, add=r), found)
    alone = torch.fx.symbolic_trace(norm, concrete_args={"residual": None, "add": None})
    check([alone(x)], [norm(x)])


def test_a_main_grad_gets_its_gradient(served: Package, kernels: Kernels) -> None:
    norm = served.RMSNorm(N, eps=1e-6, main_grad=True)
    norm.weight.main_grad = torch.zeros(N)
    x, weight, r = drawn(4)
    with torch.no_grad():
        norm.weight.copy_(weight)
    y, wanted = norm(x, add=r), eager(x, weight, r)
    dy = torch.randn_like(y)
    y.backward(dy)
    dx, dw, dr = torch.autograd.grad(wanted, (x, weight, r), dy)
    assert x.grad is not None and r.grad is not None
    check([y, x.grad, norm.weight.main_grad, r.grad], [wanted, dx, dw, dr])


def test_batch_invariant_norms_add_behind_their_kernel() -> None:
    norm = normforge.RMSNorm(N, batch_invariant=True)
    x, _, r = drawn(4)
    assert torch.equal(norm(x, add=r), r + norm(x))
    y, rstd = normforge.batch_invariant.rmsnorm_forward(x, norm.weight, add=r)
    assert torch.equal(y, norm(x, add=r)) and rstd.shape == (4, 1)


def test_the_library_looks_for_its_packages() -> None:
    """Without one, PyTorch adds; and there is no GPU here."""
    x, weight, r = drawn(4)
    assert torch.equal(normforge.rms_norm(x, weight, add=r), r + normforge.rms_norm(x, weight))
    served = normforge.explain.__self__._norm.added
    assert served.server.operation is RMSNORM_ADD_FORWARD


# ---- What sees the operators ---------------------------------------------------------------------


def test_a_graph_has_one_operator_forward_and_that_of_the_norm_backward(
    served: Package, kernels: Kernels
) -> None:
    graphs: list[list[str]] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if "function" in node.op])
        return graph

    def compiler(graph: torch.fx.GraphModule, given: Any) -> Any:
        return make_boxed_func(note(graph, given))

    norm = torch.compile(both(served), backend=aot_autograd(fw_compiler=compiler), fullgraph=True)
    check(results(norm, drawn(4)), results(eager, drawn(4)))
    ours = [[name for name in graph if name.startswith("normforge")] for graph in graphs]
    assert ours == [["normforge.rms_norm_and_add.v2"], ["normforge.rms_norm_backward.v2"]]
    assert not [name for name in graphs[0] if "aten.add" in name]


def test_inductor_compiles_it_with_any_number_of_rows(served: Package, kernels: Kernels) -> None:
    norm = torch.compile(both(served), fullgraph=True, dynamic=True)
    for rows in (3, 5, 8):
        check(results(norm, drawn(rows)), results(eager, drawn(rows)))
    assert len(kernels.calls) == 3


@pytest.mark.parametrize("with_kernels", [False, True])
def test_the_operator_passes_opcheck(
    served: Package, monkeypatch: pytest.MonkeyPatch, with_kernels: bool
) -> None:
    if with_kernels:
        Kernels(served, monkeypatch)
    x, weight, r = drawn(3)
    for scale in (weight, None):
        torch.library.opcheck(served.ops.rms_norm_and_add, (x, r, scale, 1e-6, 1.0, served.name))


def test_second_derivatives_are_those_of_pytorch(served: Package, kernels: Kernels) -> None:
    given, second = drawn(3), []
    for norm in (both(served), eager):
        first = torch.autograd.grad(norm(*given).square().sum(), given, create_graph=True)
        second.append(grads(sum(one.square().sum() for one in first), *given))
    check(*second, tolerance=1e-3)
    batch = torch.randn(2, 3, N)
    for one, other in zip(
        *(
            torch.autograd.grad(norm(*given), given, batch, is_grads_batched=True)
            for norm in (both(served), eager)
        ),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_transforms_and_forward_mode_see_pytorchs_operators(
    served: Package, kernels: Kernels
) -> None:
    given = [one.detach() for one in drawn(3)]

    def loss(norm: Any) -> Any:
        return lambda *leaves: norm(*leaves).square().sum()

    for over in (torch.func.grad, torch.func.jacfwd):
        check(*([over(loss(norm), argnums=(0, 1, 2))(*given)] for norm in (both(served), eager)))
    vmapped = torch.func.vmap(both(served), in_dims=(0, None, 0))(*given)
    check([vmapped], [eager(*given)])
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(one, torch.ones_like(one)) for one in given]
        tangents = [forward_ad.unpack_dual(norm(*duals)).tangent for norm in (both(served), eager)]
    check(*([one] for one in tangents), tolerance=1e-4)
    assert kernels.calls == []

    def norm_of(x: Any, weight: Any, r: Any) -> Any:
        return served.rms_norm(x, weight, 1e-6, add=r)

    for traced in (
        make_fx(norm_of)(*given),
        torch.jit.trace(norm_of, given, check_trace=False),
        torch.fx.symbolic_trace(norm_of),
    ):
        check([traced(*given)], [eager(*given)])


class Modules(torch.nn.Module):
    def __init__(self, package: Package) -> None:
        super().__init__()
        self.norm = package.RMSNorm(N, eps=1e-6)

    def forward(self, x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(x, add=r)
        return y


@pytest.mark.parametrize("strict", [False, True])
def test_a_program_is_exported(served: Package, kernels: Kernels, strict: bool) -> None:
    model, (x, _, r) = Modules(served), (one.detach() for one in drawn(4))
    program = torch.export.export(model, (x, r), strict=strict)
    check([program.module()(x, r)], [model(x, r)])


def test_autocast_checkpoints_and_modes_change_nothing(
    served: Package, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = drawn(4)
    wanted = results(both(served), given)
    with torch.autocast("cpu", dtype=BF16):
        check(results(both(served), given), wanted)
    for reentrant in (False, True):
        again = checkpoint(both(served), *given, use_reentrant=reentrant)
        leaves = grads(again, *given) if not reentrant else wanted[1:]
        check([again, *leaves], wanted)
    with torch.device("cpu"):  # a mode that sees functions
        check(results(both(served), given), wanted)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(one) for one in given]
        assert both(served)(*fakes).shape == given[0].shape
    monkeypatch.undo()  # the kernels that are made up serve tensors of every device
    meta = [torch.empty_like(one, device="meta") for one in given]
    assert normforge.rms_norm(*meta[:2], add=meta[2]).device.type == "meta"


def test_calls_are_counted_for_the_tuner(
    served: Package, kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path / "shapes.yaml")
    monkeypatch.setattr(collecting, "recorder", recorder)
    given = drawn(6, dtype=BF16)
    both(served)(*given, 1e-6, 1.0)
    monkeypatch.setattr(NormAndAdd, "may_serve", lambda _, x: False)
    both(served)(*given)
    recorder.stop()
    said = (tmp_path / "shapes.yaml").read_text()
    assert said.endswith("rmsnorm_add_forward:\n    6x16:bf16: 1\n    6x16:bf16+offset: 1\n")
