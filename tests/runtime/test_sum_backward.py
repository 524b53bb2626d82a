"""The operator of RMSNorm's backward of a sum of gradients: what it gives to kernels, what serves
other calls, and what tracers see of it."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from normforge.api import Package
from normforge.frontends.sum_backward import SumBackward, SumBackwardPackage
from normforge.operations import GRADIENTS, RMSNORM_SUM_BACKWARDS
from normforge.operations.formula import evaluate
from normforge.serve.collect import Recorder, collecting
from tests.support.entry_points import write_package
from tests.support.fake_driver import (
    SPEC,
    ComputingDriver,
    FakeDevice,
    at_address,
    entry,
    row_server,
    rows_at,
    stand_in,
    use_row_servers,
)
from tests.support.packages import emit_first

M, N = 24, 16
SHAPE = (4, 6, N)
COUNTS = pytest.mark.parametrize("count", RMSNORM_SUM_BACKWARDS)
WEIGHTS = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Device(ComputingDriver):
    """Computes the operations from the arguments of their kernel. calls: of which it did;
    weight: the dtype that the kernel reads the weight in."""

    weight = torch.bfloat16

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def compute(self, function: str, args: Any) -> None:
        self.calls.append(function)
        (operation,) = (o for o in RMSNORM_SUM_BACKWARDS.values() if o.name == function)
        names = ["x", *GRADIENTS[: operation.incoming]]
        given: dict[str, Any] = {
            name: torch.stack(
                rows_at(args, name, torch.bfloat16, getattr(args, f"{name}_gap", 0))
            ).clone()
            for name in names
        }
        if args.dresidual:
            kind = torch.float32 if args.dresidual_out else torch.bfloat16
            given["dresidual"] = torch.stack(rows_at(args, "dresidual", kind)).clone()
        given["rstd"] = at_address(args.rstd, args.rows)[:, None]
        given["weight"] = at_address(args.weight, args.columns, self.weight)
        found = evaluate(operation, given, offset=args.weight_offset)
        at_address(args.dx, args.rows * args.columns, torch.bfloat16).copy_(found["dx"].flatten())
        if args.dresidual_out:
            third = at_address(args.dresidual_out, args.rows * args.columns)
            third.copy_(found["dx"].flatten())
        at_address(args.dw, args.columns, self.weight).copy_(found["dw"])


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Device:
    stand_in(monkeypatch, made := Device())
    return made


@pytest.fixture
def package(
    driver: Device, device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Package:
    """One with kernels of rows of M x N in bf16 with a weight of bf16 or fp32, with a residual of
    either and without, which take CPU tensors."""
    use_row_servers(monkeypatch, device)
    package = write_package(tmp_path / "package")
    package.add_gradients_by(lambda operation: "none")
    for count, operation in RMSNORM_SUM_BACKWARDS.items():
        spec = replace(SPEC, operation=operation.name, N=N, partial_columns=N, partial_stride=N)
        kernels = [
            entry(M, replace(spec, weight_dtype=weight, residual=residual))
            for weight in WEIGHTS
            for residual in ("", "bf16", "fp32")
        ]
        server = row_server(operation, *kernels)
        server.by_kernel = lambda t, offset, server=server: server._by_kernel(t["x"], t, offset)
        package.ops.sum_backward._servers[count] = server
    on_gpu = staticmethod(lambda x: x.dtype == torch.bfloat16 and x.numel() > 0)
    monkeypatch.setattr(SumBackward, "may_serve", on_gpu)
    return package


def rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def call(count: int, **change: Any) -> dict[str, Any]:
    """The tensors of a call by name; the rest of the gradients is None."""
    given: dict[str, Any] = {name: rows(*SHAPE, seed=i) for i, name in enumerate(GRADIENTS)}
    given |= dict.fromkeys(GRADIENTS[count:])
    x = change.get("x", rows(*SHAPE, seed=5))
    given |= {"x": x, "rstd": torch.rsqrt(x.float().square().mean(-1, keepdim=True))}
    return given | {"weight": rows(N, seed=6), "dresidual": None} | change


def check(package: Package, given: dict[str, Any], offset: float = 0.0) -> tuple[Any, ...]:
    """Assert that a call gives the gradients in the dtypes of x and the weight."""
    results = package.ops.backward_of_sum(*given.values(), offset, package.name)
    wide: dict[str, Any] = {n: None if t is None else t.double() for n, t in given.items()}
    total = reduce(add, [one for name in GRADIENTS if (one := wide.pop(name)) is not None])
    others: dict[str, Any] = {"weight_offset": offset, "dresidual": wide.pop("dresidual")}
    wanted = package.rmsnorm_backward(total, *wide.values(), **others)
    for found, like, right in zip(results, (given["x"], given["weight"]), wanted, strict=False):
        assert (found.dtype, found.shape) == (like.dtype, like.shape)
        assert found.is_contiguous()
        torch.testing.assert_close(found.double(), right, atol=0.05, rtol=0.02)
    return results


# ---- By kernels ----------------------------------------------------------------------------------


@COUNTS
@pytest.mark.parametrize("residual", [False, True])
def test_a_kernel_adds(package: Package, driver: Device, count: int, residual: bool) -> None:
    given = call(count, **({"dresidual": rows(*SHAPE, seed=8)} if residual else {}))
    for _ in range(2):  # the second is known
        check(package, given)
    assert driver.calls == [RMSNORM_SUM_BACKWARDS[count].name] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_third_result_is_dx_in_the_dtype_of_a_wider_residual(
    package: Package, driver: Device, dtype: torch.dtype
) -> None:
    dx, _, third = check(package, call(2, dresidual=rows(*SHAPE, seed=8, dtype=dtype)))
    assert third.dtype == dtype and torch.equal(third.bfloat16(), dx)
    assert not torch.equal(third, dx.to(dtype))
    assert len(driver.calls) == (dtype == torch.float32)  # no kernel adds the other


def test_a_kernel_reads_every_gradient_as_it_lies(package: Package, driver: Device) -> None:
    wide = rows(*SHAPE[:-1], 3 * N, seed=7)
    given = call(3, dy2=wide[..., N : 2 * N], dy3=rows(1, *SHAPE[1:]).expand(SHAPE))
    check(package, given)
    seen = driver.launches[0].arguments
    assert (seen.dy_stride, seen.dy2_stride, seen.dy2) == (N, 3 * N, given["dy2"].data_ptr())


@pytest.mark.parametrize("weight", WEIGHTS)
def test_dw_of_a_weight_that_an_offset_made_wide_has_the_weights_dtype(
    package: Package, driver: Device, weight: str
) -> None:
    """There is no kernel that adds the offset, so that one of an fp32 weight takes the sum."""
    driver.weight = torch.float32
    check(package, call(2, weight=rows(N, dtype=WEIGHTS[weight])), 1.0)
    assert driver.launches[0].arguments.weight_offset == 0


def test_calls_are_told_to_who_collects(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path / "shapes.yaml")
    monkeypatch.setattr(collecting, "recorder", recorder)
    check(package, call(3, dresidual=rows(*SHAPE)))
    recorder.stop()
    text = recorder.path.read_text()
    assert "rmsnorm_sum3_backward" in text and "24x16:bf16+residual" in text


# ---- Not by kernels ------------------------------------------------------------------------------


def test_a_weight_of_heads_is_served_by_the_norms_backward(
    package: Package, driver: Device
) -> None:
    for offset in (0.0, 1.0):
        check(package, call(2, weight=rows(6, N, seed=6)), offset)
    assert driver.calls == []


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "wider gradients": (
        {name: rows(*SHAPE, dtype=torch.float32) for name in GRADIENTS},
        "dy must have x's dtype torch.bfloat16",
    ),
    "a wider third gradient": ({"dy3": rows(*SHAPE, dtype=torch.float32)}, "dy3 must have x's d"),
    "a row": ({"dy2": rows(N)}, "dy2 must have x's shape"),
    "more rows": ({"dy3": rows(3, *SHAPE)}, "dy3 must have x's shape"),
    "a narrow rstd": ({"rstd": rows(*SHAPE[:-1], 1)}, "rstd must be "),
    "too few rstds": ({"rstd": torch.ones(3)}, "rstd must have one "),
    "a longer weight": ({"weight": rows(N + 1)}, "weight must have shape"),
    "a residual of another shape": ({"dresidual": rows(N)}, "dresidual must have "),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_before_a_kernel_reads_it(
    package: Package, driver: Device, name: str
) -> None:
    change, said = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=said):
        package.ops.backward_of_sum(*call(3, **change).values(), 0.0, package.name)
    assert driver.calls == []


# ---- What tracers see ----------------------------------------------------------------------------


@COUNTS
@pytest.mark.parametrize("residual", [None, torch.bfloat16, torch.float32])
def test_operator_is_what_tracers_take_it_for(
    tmp_path: Path, count: int, residual: torch.dtype | None
) -> None:
    package = write_package(tmp_path / "package")
    given = call(count)
    if residual is not None:
        given["dresidual"] = rows(*SHAPE, dtype=residual)
    torch.library.opcheck(package.ops.backward_of_sum, (*given.values(), 1.0, package.name))
    same = call(count, **dict.fromkeys(GRADIENTS[:count], given["dy"]))
    dx, dw, _ = package.ops.backward_of_sum(*same.values(), 0.0, package.name)
    assert not {dx.data_ptr(), dw.data_ptr()} & {
        t.data_ptr() for t in same.values() if t is not None
    }


def test_results_have_no_gradient(tmp_path: Path) -> None:
    package = write_package(tmp_path / "package")
    given = call(2, dy2=rows(*SHAPE).requires_grad_())
    dx, *_ = package.ops.backward_of_sum(*given.values(), 0.0, package.name)
    with pytest.raises(RuntimeError, match="has no gradient of its own"):
        dx.sum().backward()


# ---- Which rows a pass asks kernels for ----------------------------------------------------------


@pytest.fixture
def served(package: Package, monkeypatch: pytest.MonkeyPatch) -> SumBackward:
    monkeypatch.undo()  # may_serve asks for the device
    found: SumBackward = package.ops.sum_backward
    return found


def empty(*shape: Any, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=device)


def test_kernels_are_for_rows_of_their_kind(served: SumBackward) -> None:
    with FakeTensorMode():
        x, w = empty(SHAPE), empty(N)
        assert served.serves(2, x, w, None, False)
        assert served.serves(3, x, empty(N, dtype=torch.float32), x, False)
        assert served.serves(2, empty(0, 6, N), w, None, False)
        assert served.serves(2, x, w, None, True)  # to an fp32 weight
        left: list[tuple[Any, Any, Any]] = [
            (empty(SHAPE, device="cpu"), empty(N, device="cpu"), None),
            (x, empty(6, N), None),
            (empty(4, 6, 2 * N), empty(2 * N), None),
            (empty(SHAPE, dtype=torch.float64), w, None),
            (x, empty(N, dtype=torch.float64), None),
            (x, w, empty(SHAPE, dtype=torch.float16)),
            (x, w, empty(SHAPE, dtype=torch.float64)),
        ]
        assert not any(served.serves(2, *given, False) for given in left)


def test_a_kernel_is_asked_for_by_the_dtype_of_the_weight(served: SumBackward) -> None:
    source = served.server(2).source
    assert not isinstance(source, str)
    table = source(None).backward
    wide = [one for one in table.tuned if one.weight_dtype == "fp32"]
    served._servers[2] = row_server(RMSNORM_SUM_BACKWARDS[2], *wide)
    with FakeTensorMode():
        weights = [empty(N, dtype=dtype) for dtype in WEIGHTS.values()]
        asked = [served.serves(2, empty(SHAPE), weight, None, False) for weight in weights]
        assert served.serves(2, empty(SHAPE), empty(N), None, True)
    assert asked == [False, True]
    narrow = [one for one in table.tuned if one.weight_dtype == "bf16"]
    served._servers[2] = row_server(RMSNORM_SUM_BACKWARDS[2], *narrow)
    with FakeTensorMode():
        assert not served.serves(2, empty(SHAPE), empty(N), None, True)


def test_kernels_take_rows_on_a_gpu(served: SumBackward) -> None:
    with FakeTensorMode():
        assert served.may_serve(empty(SHAPE))
        left = [
            empty(0, N),
            empty(SHAPE, device="cpu"),
            empty(SHAPE, dtype=torch.float64),
        ]
        assert not any(map(served.may_serve, left))


def test_reasons_why_there_are_no_kernels_are_told_for_each_operation() -> None:
    reasons = {operation.name: "" for operation in RMSNORM_SUM_BACKWARDS.values()}
    for name in reasons:
        reasons[name] = f"there is no {name}"
        some: Any = SimpleNamespace()
        beside = SumBackward(lambda of, some=some: reasons[of] or some)
        assert beside.missing == " ".join(filter(None, reasons.values()))


def test_a_question_for_a_kernel_fixes_no_size(served: SumBackward) -> None:
    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment):
        symbols = [environment.create_unbacked_symint() for _ in range(3)]
        for size in symbols:
            torch._check(size >= 0)
        x = empty(symbols[0], N)
        assert served.serves(2, x, empty(N), None, False)
        guards = len(environment.guards)
        assert not served.serves(2, empty(symbols[0], symbols[1]), empty(symbols[2]), None, False)
        assert not served.serves(2, x, empty(symbols[1]), None, False)
    assert len(environment.guards) == guards


# ---- The functions of a package ------------------------------------------------------------------


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float16, torch.float64, None])
@COUNTS
def test_functions_of_a_package_give_what_those_of_the_norm_give(
    tmp_path: Path, count: int, weight: torch.dtype | None
) -> None:
    emit_first(tmp_path / "sums", f"{RMSNORM_SUM_BACKWARDS[count].name}:4096x128:bf16")
    functions, norm = SumBackwardPackage(tmp_path / "sums"), write_package(tmp_path / "norm")
    given = call(count, weight=None if weight is None else rows(N, dtype=weight))
    gradients = [one.float() for name in GRADIENTS if (one := given.pop(name)) is not None]
    x, rstd, scale, _ = given.values()
    x, wide = x.float(), None if scale is None else scale.float()
    for residual in (None, rows(*SHAPE), rows(*SHAPE, dtype=torch.float64)):
        others = {"weight_offset": 0.5, "dresidual": residual}
        found = functions.rmsnorm_backward(gradients, x, rstd, scale, **others)
        wanted = norm.rmsnorm_backward(reduce(add, gradients), x, rstd, wide, **others)
        torch.testing.assert_close(found, wanted)
    for others in (gradients[1:], [*gradients, x]):
        with pytest.raises(ValueError, match=f"adds {count} gradients, and got {len(others)}"):
            functions.rmsnorm_backward(others, x, rstd, scale)
