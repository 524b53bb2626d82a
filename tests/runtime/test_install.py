"""`install()` on the CPU, where PyTorch's operators have kernels of their own."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from normforge.api import Package
from normforge.frontends.install import RMS_NORM, Installation
from normforge.serve.warn_once import WarnOnce
from tests.support.entry_points import (
    check_that_backwards_end_as_they_began,
    grads,
    leaf,
    randn,
    routing_on_cpu,
    same,
    write_package,
)
from tests.support.native import in_threads


def train_once(norm: torch.nn.Module) -> list[torch.Tensor]:
    x = leaf(4, 16)
    return grads(norm(x), x, norm.weight)


def test_existing_model_is_routed_while_installed_only(package: Package, aten: list[str]) -> None:
    norm, entry_point = torch.nn.RMSNorm(16), routing_on_cpu(package)
    wanted = train_once(norm)
    assert aten == ["forward", "backward"]
    entry_point.install()
    entry_point.install()  # idempotent
    assert same(train_once(norm), wanted)
    assert aten == ["forward", "backward", "forward"]
    entry_point.uninstall()
    train_once(norm)
    assert aten[-1] == "backward"
    entry_point.uninstall()


def test_blocks_nest_and_restore_what_was(package: Package, aten: list[str]) -> None:
    norm, entry_point = torch.nn.RMSNorm(16), routing_on_cpu(package)

    def routed() -> bool:
        before = aten.count("backward")
        train_once(norm)
        return aten.count("backward") == before

    with entry_point.installed():
        with entry_point.installed():
            assert routed()
        assert routed()
        entry_point.uninstall()  # takes effect when the block ends
        assert routed()
    assert not routed()
    entry_point.install()
    with pytest.raises(ZeroDivisionError), entry_point.installed():
        raise ZeroDivisionError
    assert routed()
    entry_point.uninstall()
    assert not routed()


def test_threads_may_install_and_uninstall(package: Package, aten: list[str]) -> None:
    entry_point, norm = routing_on_cpu(package), torch.nn.RMSNorm(16)

    def work() -> None:
        for _ in range(10):
            with entry_point.installed():
                train_once(norm)

    in_threads([work] * 3)
    assert "backward" not in aten
    train_once(norm)
    assert aten[-1] == "backward"


def test_second_package_is_refused_while_one_is_installed(
    package: Package, aten: list[str], tmp_path: Path
) -> None:
    one, two = routing_on_cpu(package), routing_on_cpu(write_package(tmp_path))
    with one.installed(), pytest.raises(RuntimeError, match="uninstall it first"):
        two.install()
    with two.installed():
        pass


def test_package_that_is_loaded_again_takes_the_place_of_its_former_self(
    aten: list[str], tmp_path: Path
) -> None:
    """importlib.reload does that, and leaves nobody who could uninstall the former one."""
    norm, wanted = torch.nn.RMSNorm(16), ["forward", "backward"]

    def load() -> Installation:
        package = write_package(tmp_path)
        return Installation(package._quick, package._route, "CPU", package.folder)

    first = load()
    first.install()
    second = load()
    second.install()
    train_once(norm)
    assert aten == ["forward"]
    second.uninstall()
    train_once(norm)
    assert aten[1:] == wanted
    first.uninstall()  # long gone
    with first.installed():
        third = load()
        third.uninstall()
        train_once(norm)
    assert aten[3:] == wanted
    with third.installed():
        train_once(norm)
    train_once(norm)
    assert aten[5:] == ["forward", *wanted]


def test_wish_of_a_former_self_ends_with_it(aten: list[str]) -> None:
    def load() -> Installation:
        return Installation(lambda *_: None, lambda dy, x, *_: (x, x[0]), "CPU", "one package")

    first, second = load(), load()
    first.install()
    second.install()
    second.uninstall()
    with first.installed():
        pass
    train_once(torch.nn.RMSNorm(16))
    assert aten == ["forward", "backward"]


def test_backward_under_way_ends_as_it_began_when_another_thread_uninstalls(
    aten: list[str],
) -> None:
    """PyTorch has found the kernel and waits for the interpreter meanwhile."""
    check_that_backwards_end_as_they_began(aten)


def test_native_kernel_comes_and_goes_with_the_installation(aten: list[str]) -> None:
    class Kernel:
        pass

    functions: list[Any] = []
    kernels: list[weakref.ref[Kernel]] = []

    def take(function: Any) -> Kernel:
        functions.append(function)
        kernels.append(weakref.ref(kernel := Kernel()))
        return kernel

    def registered() -> list[bool]:
        return [kernel() is not None for kernel in kernels]

    entry_point = Installation(lambda *_: None, lambda dy, x, *_: (x, x[0]), "CPU")
    with entry_point.installed():
        entry_point.use_native(take)
        assert registered() == [True]
    assert registered() == [False]
    with entry_point.installed():
        assert registered() == [False, True]
    assert registered() == [False, False]
    x, rstd = randn(4, 16), torch.ones(4, 1)
    for function in functions:  # a call that is under way still has these
        assert same(function(x, x, [16], rstd, x[0], [True, True]), (x, x[0]))
    assert aten == []


def test_an_error_of_native_code_leaves_pytorchs_kernel_in_place() -> None:
    def take(function: Any) -> Any:
        raise RuntimeError("planted")

    entry_point = Installation(lambda *_: None, lambda dy, x, *_: (x, x[0]), "CPU")
    entry_point.use_native(take)
    with pytest.raises(RuntimeError, match="planted"):
        entry_point.install()
    assert not hasattr(torch.library, RMS_NORM.mark)
    with pytest.raises(RuntimeError, match="planted"), entry_point.installed():
        pass
    assert not hasattr(torch.library, RMS_NORM.mark)


def test_what_was_not_tuned_goes_to_the_kernel_that_was_there(
    package: Package, aten: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    norm, entry_point = torch.nn.RMSNorm(16), routing_on_cpu(package)
    monkeypatch.setattr(package, "warn", WarnOnce())
    monkeypatch.setattr(package, "_find", lambda given, options: "nothing was tuned")
    with entry_point.installed():
        with pytest.warns(UserWarning, match="nothing was tuned; using PyTorch's own kernel"):
            train_once(norm)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train_once(norm)
            train_once(norm)  # the same reason
            train_once(torch.nn.RMSNorm((4, 16)))  # no package is asked for this
    assert aten.count("backward") == 4


@pytest.mark.parametrize("shape", [(16,), (1, 16), (4, 16)])
def test_norms_over_two_dimensions_stay_with_pytorch(
    shape: tuple[int, ...], aten: list[str]
) -> None:
    """Nobody is asked: their weight may look like one per head, and there may be a call whose
    tensors are alike."""
    asked: list[str] = []

    def serve(who: str) -> Any:
        return lambda dy, x, rstd, weight, *_: asked.append(who) or (x + 1, weight + 1)

    x, weight, rstd = randn(3, 4, 16), randn(*shape), torch.ones(3, 4, 1)
    with Installation(serve("quick"), serve("route"), "CPU").installed():
        for mask in ([True, True], [True, False]):
            torch.ops.aten._fused_rms_norm_backward(x, x, list(shape), rstd, weight, mask)
    two = len(shape) > 1
    assert asked == ([] if two else ["quick", "route"])
    assert aten == (["backward", "backward"] if two else [])


@pytest.mark.parametrize("mask", [[], [True], [True] * 3])
def test_masks_of_another_length_stay_with_pytorch(
    package: Package, aten: list[str], mask: list[bool]
) -> None:
    """It refuses them in its own words."""
    x, w, rstd = randn(4, 16), randn(16), torch.ones(4, 1)
    with routing_on_cpu(package).installed(), suppress(IndexError):
        torch.ops.aten._fused_rms_norm_backward(x, x, [16], rstd, w, mask)
    assert aten == ["backward"]


def test_routing_serves_second_derivatives_by_pytorch(package: Package, aten: list[str]) -> None:
    x, weight = leaf(3, 6, dtype=torch.float64), leaf(6, dtype=torch.float64, seed=1)

    def penalty(y: torch.Tensor) -> list[torch.Tensor]:
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(dx.square().sum(), (x, weight)))

    with routing_on_cpu(package).installed():
        found = penalty(functional.rms_norm(x, (6,), weight, 1e-5))
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(found, penalty(x * rstd * weight))


BACKWARD = "_fused_rms_norm_backward"


@pytest.fixture
def override(aten: list[str]) -> Iterator[Callable[[], None]]:
    """Register a kernel, for 16 columns, as PyTorch does with those of its own in Python."""
    registry = pytest.importorskip("torch._native.registry", reason="PyTorch before 2.13")

    def kernel(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        aten.append("override")
        return torch.zeros_like(given[1]), torch.zeros_like(given[4])

    def graph() -> tuple[str, ...]:
        return next(key for key in registry._graphs if key[-2:] == (BACKWARD, "CPU"))

    def register() -> None:
        cond = partial(is_of_width, 16)
        registry.register_op_override("tests", "aten", BACKWARD, "CPU", cond=cond, impl=kernel)
        registry._register_overrides_from_graph(*graph(), registry._graphs[graph()])

    yield register
    registry._graphs[graph()].clear()
    with torch.backends.python_native.operations_disabled(BACKWARD):
        pass


def is_of_width(width: int, dy: torch.Tensor, x: torch.Tensor, *_: Any) -> bool:
    return x.shape[-1] == width


def served_by(aten: list[str], *shape: int) -> str:
    """Return who runs the backward of rows of (4, *shape)."""
    x, weight, rstd = randn(4, *shape), randn(*shape), torch.ones(4, *shape[:-1], 1)
    aten.clear()
    torch.ops.aten._fused_rms_norm_backward(x, x, list(shape), rstd, weight, [True, True])
    return aten[-1] if aten else "package"


def test_kernels_that_pytorch_overrides_its_own_with_come_second(
    package: Package, aten: list[str], override: Callable[[], None]
) -> None:
    """They may be switched off and on: nobody calls a kernel that is gone."""
    entry_point = routing_on_cpu(package)

    def who() -> list[str]:
        return [served_by(aten, 16), served_by(aten, 8), served_by(aten, 2, 16)]

    override()
    assert who() == ["override", "backward", "override"]
    entry_point.install()
    assert who() == ["package", "package", "override"]
    torch.backends.python_native.disable_operations(BACKWARD)
    assert who() == ["package", "package", "backward"]
    torch.backends.python_native.enable_operations(BACKWARD)
    assert who() == ["override", "package", "override"]
    entry_point.install()
    assert who() == ["package", "package", "override"]
    torch.backends.python_native.enable_operations(BACKWARD)
    entry_point.uninstall()
    assert who() == ["override", "backward", "override"]


def test_an_override_that_comes_later_is_first_until_install_comes_again(
    package: Package, aten: list[str], override: Callable[[], None]
) -> None:
    entry_point = routing_on_cpu(package)
    with entry_point.installed():
        override()
        assert [served_by(aten, 16), served_by(aten, 8)] == ["override", "package"]
        entry_point.install()
        assert [served_by(aten, 16), served_by(aten, 8)] == ["package", "package"]
        entry_point.uninstall()
        assert served_by(aten, 16) == "package"
    assert [served_by(aten, 16), served_by(aten, 8)] == ["override", "backward"]
