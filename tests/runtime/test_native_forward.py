"""Forwards that C++ launches are those that Python would have launched, and what it does not serve
goes to Python. The extension is the real one; the driver is made of callbacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda.bindings import driver as cuda
from torch.testing._internal.two_tensor import TwoTensor

from normforge.frontends.layer_norm import LayerNormPackage
from normforge.launch import forward_call as call_module
from normforge.launch.driver import LaunchError
from normforge.launch.forward_call import forward_call
from normforge.launch.loaded_kernel import LoadedKernel
from normforge.launch.row_layout import row_layout
from normforge.launch.workspace import PER_THREAD
from normforge.operations import LAYERNORM_FORWARD
from normforge.serve.checks import check_forward
from normforge.serve.collect import Recorder, collecting
from normforge.serve.reference import reference_forward
from tests.support.entry_points import equal_bits
from tests.support.fake_driver import SPEC, entry, row_server, use_row_servers
from tests.support.forward import of_kind
from tests.support.native import (
    OPERATIONS,
    STATES,
    AnyPackage,
    Machine,
    Watch,
    alike,
    attempt,
    both_norms,
    in_state,
    in_threads,
    norm,
    rows,
    shifted,
    spread,
    who_served,
)

operation = both_norms


@pytest.fixture
def package(
    make: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., AnyPackage]:
    """Makes a package whose forwards run on the fake device, too."""
    # `forward_call` asks a tensor for its device, and these are the CPU's.
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    use_row_servers(monkeypatch, machine)
    kernel = LoadedKernel(b"cubin", of_kind("4096x1024:bf16").spec(132))
    without = {"strategy": "none", "way": "", "operation": LAYERNORM_FORWARD.name}
    entries = (entry(1, replace(SPEC, name="forward", **without)),)

    def prepare(x: torch.Tensor, weight: Any, residual: Any) -> Any:
        check_forward(x, weight, residual)
        tensors = [tensor for tensor in (x, weight, residual) if tensor is not None]
        if any(t.dtype != torch.bfloat16 for t in tensors) or x.shape[-1] != 1024:
            return reference_forward
        layouts = (row_layout(x), None if residual is None else row_layout(residual))
        return forward_call(kernel, x, weight, residual, *layouts)

    def made(on: bool = True) -> AnyPackage:
        package: Any = make(on=on)
        if isinstance(package, LayerNormPackage):
            package._kernels.by(lambda: row_server(LAYERNORM_FORWARD, *entries).source)
            server = package._kernels.server
            server.by_kernel = lambda given: server._by_kernel(given["x"], given)
            return package
        package._forward._prepare = prepare
        for calls in package._forward._calls.values():
            calls._device = ""
        return package

    return made


Call = Callable[..., Any]


def function(package: Any, x: Any, weight: Any, third: Any = None, **norm: Any) -> Any:
    """Return the results for those who want no gradient. third: of LayerNorm the bias, of RMSNorm
    the residual."""
    with torch.no_grad():
        return results_of(package, x, weight, third, **norm)


def results_of(
    package: Any, x: Any, weight: Any, third: Any, eps: Any = 1e-6, offset: float = 0.0
) -> Any:
    if isinstance(package, LayerNormPackage):
        return (package.layer_norm(x, weight, third, eps),)
    y = package.rms_norm(x, weight, eps, weight_offset=offset, residual=third)
    return y if isinstance(y, tuple) else (y,)


def node(package: Any, x: Any, weight: Any, third: Any = None, **norm: Any) -> Any:
    """Return the results, and rstd and perhaps the mean, which the node saves."""
    x, saved = x.detach().requires_grad_(), []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = results_of(package, x, weight, third, **norm)
    return *(t.detach() for t in results), *(t for t in saved if t.shape[-1] == 1)


def with_rstd(
    package: Any, x: Any, weight: Any, third: Any = None, eps: Any = 1e-6, offset: float = 0.0
) -> Any:
    if isinstance(package, LayerNormPackage):
        return package.layer_norm_forward(x, weight, third, eps)
    return package.rmsnorm_forward(x, weight, eps, weight_offset=offset, residual=third)


def operator(
    package: Any, x: Any, weight: Any, third: Any = None, eps: Any = 1e-6, offset: float = 0.0
) -> Any:
    """Call the operator as compiled code does."""
    if isinstance(package, LayerNormPackage):
        *results, none = package.ops.layer_norm(x, None, weight, third, eps, package.name)
        assert none.numel() == 0
        return tuple(results)
    if third is None:
        return package.ops.rms_norm(x, weight, eps, offset, package.name)
    return package.ops.add_rms_norm(x, third, weight, eps, offset, package.name)


calls = pytest.mark.parametrize("call", [function, node, with_rstd, operator])
thirds = pytest.mark.parametrize("three", [False, True], ids=["two tensors", "three"])


def third_of(package: Any, three: bool = True) -> Any:
    found = rows(1, seed=4)[0] if isinstance(package, LayerNormPackage) else rows(seed=4)
    return found if three else None


def inputs(**change: Any) -> dict[str, Any]:
    return {"x": rows(), "weight": rows(1, seed=2)[0]} | change


def learned(package: Any, call: Call = operator, **change: Any) -> None:
    for _ in range(3):
        call(package, **inputs(**change))


@calls
@thirds
@pytest.mark.parametrize(
    "norm", [{}, {"eps": None}, {"eps": 0.25, "offset": 1.0}], ids=["plain", "no eps", "numbers"]
)
def test_native_forward_is_that_of_python(
    machine: Machine, package: Any, call: Call, three: bool, norm: dict[str, Any]
) -> None:
    one, reference = package(), package(on=False)
    if isinstance(one, LayerNormPackage) and None in norm.values():
        pytest.skip("it has no eps of its own")
    given = inputs(third=third_of(one, three))
    learned(one, call, third=given["third"])
    by_cpp, by_python, results = who_served(machine, lambda: call(one, **given, **norm))
    assert (by_cpp, by_python) == (1, 0)
    call(reference, **given, **norm)
    *_, wanted = who_served(machine, lambda: call(reference, **given, **norm))
    assert equal_bits(list(results), list(wanted))
    assert [t.stride() for t in results] == [t.stride() for t in wanted]
    found, python = machine.native[-1], machine.launches[-1]
    for name in ("function", "grid", "block", "smem", "stream"):
        assert getattr(found, name) == getattr(python, name), name
    assert found.attributes == {int(kind) for kind in python.attributes}
    made = {"y", "mean", "rstd", "residual_out"}  # memory of each call's own
    own = {name: getattr(found.arguments, name) for name in made & {*found.arguments._fields}}
    assert found.arguments == python.arguments._replace(**own)
    assert own["y"] == results[0].data_ptr()


@calls
def test_rows_of_any_number_of_dimensions_share_a_plan(
    machine: Machine, package: Any, call: Call
) -> None:
    one, weight = package(), inputs()["weight"]
    learned(one, call)
    wanted = call(one, **inputs())
    for shape in ((2, 3, 1024), (1, 6, 1, 1024)):
        by_cpp, _, results = who_served(
            machine, lambda shape=shape: call(one, rows().view(shape), weight)
        )
        assert by_cpp == 1
        for found, expected in zip(results, wanted, strict=True):
            assert found.shape[:-1] == shape[:-1] and found.is_contiguous()
            assert torch.equal(found.view(expected.shape), expected)


OTHERS: dict[str, Callable[[], dict[str, Any]]] = {
    "other rows": lambda: inputs(x=rows(7)),
    "x shifted": lambda: inputs(x=shifted(6, 1024)),
    "weight shifted": lambda: inputs(weight=shifted(1024)),
    "third": lambda: inputs(third=None),
    "third spread": lambda: inputs(third=None),
    "third of another dtype": lambda: inputs(third=None),
    "x spread": lambda: inputs(x=spread(6, 1024)),
    "x turned": lambda: inputs(x=rows(1024, 6).T),
    "x negative": lambda: inputs(x=torch._neg_view(rows())),
    "x a subclass": lambda: inputs(x=TwoTensor(rows(), rows())),
    "x wants a gradient": lambda: inputs(x=rows().requires_grad_()),
    "half": lambda: inputs(x=rows().half(), weight=rows(1)[0].half()),
    "fp32 weight": lambda: inputs(weight=rows(1, seed=2)[0].float()),
    "no weight": lambda: inputs(weight=None),
    "weight of other length": lambda: inputs(weight=rows(1, 512)[0]),
    "weight per row": lambda: inputs(x=rows().view(6, 1, 1024), weight=rows(1, seed=2)),
    "one row at an odd stride": lambda: inputs(x=rows(1, 2000).as_strided((1, 1024), (1500, 1))),
    "no tensor": lambda: inputs(x=1.0),
}


def other_call(package: Any, name: str) -> dict[str, Any]:
    """Return the arguments of that name, with a third tensor where it is about that."""
    given = OTHERS[name]()
    if "third" in given:
        third = third_of(package)
        if "spread" in name:  # rows that lie apart, or elements
            wide = torch.cat((third, third), -1)
            third = wide[..., :1024] if third.dim() > 1 else wide[::2].copy_(third)
        given["third"] = third.float() if "dtype" in name else third
    return given


UNWRAPPED = ("x negative", "x a subclass", "x wants a gradient")
"""Tensors that PyTorch or Python makes plain before the forward gets them."""


@pytest.mark.parametrize("call", [function, operator])
@pytest.mark.parametrize("name", OTHERS)
def test_forward_that_differs_in_one_thing_is_left_to_python(
    machine: Machine, package: Any, call: Call, name: str
) -> None:
    one, never = package(), package(on=False)
    learned(one, call)
    learned(one, call, x=rows(1))
    given = other_call(one, name)
    if name in ("third spread", "third of another dtype"):  # what C++ knows is a plain one
        learned(one, call, third=third_of(one))
    (by_cpp, found), (none, wanted) = (
        attempt(machine, lambda each=each: call(each, **given)) for each in (one, never)
    )
    assert none == 0 and (by_cpp == 0 or name in UNWRAPPED)
    assert alike(found, wanted, (one.name, never.name))
    assert who_served(machine, lambda: call(one, **inputs()))[:2] == (1, 0)


@pytest.mark.parametrize(
    "name",
    ["x shifted", "weight shifted", "x spread", "x repeated", "no weight", "third spread"],
)
def test_forwards_that_are_not_plain_teach_nothing(
    machine: Machine, package: Any, name: str
) -> None:
    one, never = package(), package(on=False)
    repeated = inputs(x=rows(3).expand(2, 3, 1024))
    plain = inputs(third=third_of(one)) if name == "third spread" else inputs()
    learned(one, function, **(repeated if name == "x repeated" else other_call(one, name)))
    assert who_served(machine, lambda: function(one, **plain))[:2] == (0, 1)
    learned(one, function, **plain)
    found = function(one, **plain)
    assert equal_bits(list(found), list(function(never, **plain)))


def test_forwards_that_are_tuned_by_themselves_count(
    machine: Machine, package: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """LayerNorm's forward is, and counts in C++ as in Python."""
    one, path = package(), tmp_path / "shapes.yaml"
    learned(one, function)
    monkeypatch.setattr(collecting, "recorder", recorder := Recorder(path))
    for _ in range(2):
        assert who_served(machine, lambda: function(one, **inputs()))[:2] == (1, 0)
    with in_state(machine, "capturing"):
        function(one, **inputs())
    recorder.stop()
    if operation == OPERATIONS[0]:
        assert not path.exists()
    else:
        assert path.read_text().endswith("layernorm_forward:\n    6x1024:bf16: 3\n")


@calls
def test_state_of_the_machine_is_asked(machine: Machine, package: Any, call: Call) -> None:
    one = package()
    learned(one, call)
    by_cpp, _, wanted = who_served(machine, lambda: call(one, **inputs()))
    assert by_cpp == 1
    for name in STATES.keys() - {"a mode"}:
        with in_state(machine, name):
            by_cpp, by_python, results = who_served(machine, lambda: call(one, **inputs()))
        assert (by_cpp, by_python) == (0, 1), name
        assert equal_bits(list(results), list(wanted))
    with Watch() as watch:
        assert equal_bits(list(call(one, **inputs())), list(wanted))
    assert any("_norm" in name for name in watch.seen)
    assert who_served(machine, lambda: call(one, **inputs()))[:2] == (1, 0)


def test_nothing_is_learned_during_a_capture_or_on_the_per_thread_stream(
    machine: Machine, package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = package()
    for machine.stream, machine.capturing in ((7, True), (PER_THREAD, False)):
        learned(one, function)
        assert machine.native == []
        machine.capturing = False
        assert who_served(machine, lambda: function(one, **inputs()))[0] == 0
    assert call_module.raw_stream(0) == PER_THREAD


def test_refused_forward_is_done_by_python_and_is_its_error(machine: Machine, package: Any) -> None:
    one = package()
    learned(one)
    for call, tries in ((function, 1), (operator, 2)):  # of which one is by Python's kernel
        machine.refuse_native = tries
        assert who_served(machine, lambda call=call: call(one, **inputs()))[:2] == (0, 1)
    machine.refuse_native = 1
    machine.status = cuda.CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    with pytest.raises(LaunchError, match="launching"):
        function(one, **inputs())


def test_forwards_need_no_memory_and_wait_for_none(machine: Machine, package: Any) -> None:
    """No workspace is taken, and a stream whose scratch is being replaced serves them."""
    one = package()
    machine.full = True
    learned(one, function)
    assert machine.allocated == {}
    one._native.learn.__self__._store.set_scratch(0, 7, None)
    assert who_served(machine, lambda: function(one, **inputs()))[:2] == (1, 0)


def test_threads_share_plans_and_streams_do_not(machine: Machine, package: Any) -> None:
    one, weight = package(), inputs()["weight"]
    wanted = {seed: norm(package(on=False), rows(seed=seed), weight) for seed in range(4)}

    def work(seed: int) -> None:
        machine.local.stream = 11 + seed % 2
        for _ in range(10):
            with torch.no_grad():
                assert torch.equal(norm(one, rows(seed=seed), weight), wanted[seed])

    in_threads([lambda seed=seed: work(seed) for seed in range(4)])  # type: ignore[misc]
    streams = {id(each): each.stream for each in machine.native}
    assert set(streams.values()) == {11, 12}
    assert len({each.grid for each in machine.native}) == 1


def test_derivatives_of_other_kinds_are_left_to_python(machine: Machine, package: Any) -> None:
    """torch.func and forward mode make them, and their tensors are plain ones below."""
    one, weight, cube = package(), inputs()["weight"], rows(12).view(2, 6, 1024)
    learned(one)

    def norm(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = operator(one, x, weight)[0].float()
        return y

    def theirs(x: torch.Tensor) -> torch.Tensor:
        of: Any = torch.nn.functional.rms_norm
        if isinstance(one, LayerNormPackage):
            of = torch.nn.functional.layer_norm
        y: torch.Tensor = of(x.float(), (1024,), weight.float(), eps=1e-6)
        return y

    def grad(norm: Call) -> Any:
        return torch.func.grad(lambda x: norm(x).square().sum())(rows())

    def of_each(norm: Call) -> Any:
        return torch.func.vmap(torch.func.grad(lambda x: norm(x).square().sum()))(cube)

    def grad_of_all(norm: Call) -> Any:
        return torch.func.grad(lambda x: torch.func.vmap(norm)(x).square().sum())(cube)

    def jvp(norm: Call) -> Any:
        return torch.func.jvp(norm, (rows(),), (rows(seed=5),))[1]

    def dual(norm: Call) -> Any:
        with torch.autograd.forward_ad.dual_level():
            x = torch.autograd.forward_ad.make_dual(rows(), rows(seed=5))
            return torch.autograd.forward_ad.unpack_dual(norm(x)).tangent

    for transform in (grad, of_each, grad_of_all, jvp, dual):
        by_cpp, by_python, found = who_served(machine, lambda call=transform: call(norm))
        assert (by_cpp, by_python) == (0, 0), transform
        wanted = transform(theirs).to(found.dtype)
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.05)
    # vmap without a derivative calls the operator for each, with plain tensors.
    torch.testing.assert_close(torch.func.vmap(norm)(cube), theirs(cube), rtol=0.02, atol=0.05)
    assert who_served(machine, lambda: operator(one, **inputs()))[:2] == (1, 0)
