"""`install()` after `use_native()`: plain calls of PyTorch's operator are launched from C++, all
others go to the handler in Python. The extension is the real one, the driver is made of callbacks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from normforge.frontends.install import Installation
from normforge.native import native
from normforge.spec import KernelSpec
from tests.support.entry_points import (
    Training,
    aten_on_cpu,
    check_that_backwards_end_as_they_began,
    equal_bits,
    routing_on_cpu,
    spied,
    write_layer_norm_package,
    write_package,
)
from tests.support.fake_driver import SEPARATE, SPEC
from tests.support.native import (
    OPERATIONS,
    OTHERS,
    Machine,
    alike,
    attempt,
    both_norms,
    by_backward,
    in_threads,
    inputs,
    installed_natively,
    layer_norm_only,
    learned,
    mean_of,
    rms_norm_only,
    rows,
    who_served,
)

pytestmark = pytest.mark.usefixtures("aten")


operation = both_norms


@pytest.fixture
def aten(operation: str) -> Iterator[list[str]]:
    """PyTorch's operators on the CPU; the calls that reached them."""
    calls: list[str] = []
    with aten_on_cpu(calls, layer_norm=operation == OPERATIONS[1]):
        yield calls


@pytest.fixture
def by_aten(operation: str) -> Callable[..., Any]:
    """Calls PyTorch's backward, where it wants as many results as the mask has, by default all."""
    centred = operation == OPERATIONS[1]

    def call(dy: Any, x: Any, rstd: Any, weight: Any, mask: Any = None, shape: Any = None) -> Any:
        shape = shape or ([1024] if x is None else [x.shape[-1]])
        mask = [True] * (2 + centred) if mask is None else list(mask)
        if not centred:
            return torch.ops.aten._fused_rms_norm_backward(dy, x, shape, rstd, weight, mask)
        given = (dy, x, shape, mean_of(rstd), rstd, weight, weight, mask)
        return torch.ops.aten.native_layer_norm_backward(*given)

    return call


def installation_of(package: Any) -> Installation:
    """Return the installation for CPU tensors, native if the package is."""
    found = routing_on_cpu(package)
    if package._native.take is not None:
        found.use_native(package._native.take)
    return found


def taught(make: Any, spec: KernelSpec = SPEC) -> Any:
    """A package whose plain calls C++ serves."""
    package = make(spec)
    learned(package, by_backward)
    return package


@pytest.fixture
def module_of(operation: str) -> Callable[[int], torch.nn.Module]:
    """Makes PyTorch's module of a width."""
    return partial(torch.nn.LayerNorm if operation == OPERATIONS[1] else torch.nn.RMSNorm, eps=1e-6)


@pytest.fixture
def norm_step(module_of: Any) -> Callable[[], list[torch.Tensor]]:
    """A training step of PyTorch's own module."""

    def step() -> list[torch.Tensor]:
        norm, x = module_of(1024).bfloat16(), rows().requires_grad_()
        return list(torch.autograd.grad(norm(x), (x, *norm.parameters()), rows(seed=1)))

    return step


@pytest.mark.parametrize("spec", [SPEC, SEPARATE], ids=["one kernel", "two kernels"])
@pytest.mark.parametrize("order", ["native first", "install first", "while calls go on"])
def test_plain_calls_are_launched_from_cpp_in_either_order(
    make: Any, machine: Machine, spec: KernelSpec, order: str, aten: list[str], by_aten: Any
) -> None:
    package, never, kernels = make(spec), make(spec, on=False), 1 + (spec is SEPARATE)
    with installation_of(never).installed():
        wanted = by_aten(**inputs())
    entry_point = routing_on_cpu(package)
    take = package._native.take
    if order != "native first":
        entry_point.install()
    if order == "while calls go on":
        for _ in range(4):
            assert who_served(machine, lambda: by_aten(**inputs()))[:2] == (0, kernels)
    entry_point.use_native(take)
    entry_point.use_native(take)  # changes nothing
    entry_point.install()
    try:
        if order != "while calls go on":  # calls under way have taught it
            assert who_served(machine, lambda: by_aten(**inputs()))[:2] == (0, kernels)
            by_aten(**inputs())
        by_cpp, by_python, found = who_served(machine, lambda: by_aten(**inputs()))
        assert (by_cpp, by_python) == (kernels, 0)
        assert equal_bits(list(found), list(wanted))
    finally:
        entry_point.uninstall()
    assert aten == []


def test_training_step_needs_no_python(
    make: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch, norm_step: Any
) -> None:
    package = make()
    asked = spied(monkeypatch, package, "_quick")
    with installation_of(package).installed():
        wanted = [norm_step() for _ in range(4)][-1]
        before = len(asked)
        by_cpp, by_python, found = who_served(machine, norm_step)
    assert (by_cpp, by_python) == (1, 0)
    assert len(asked) == before > 0
    assert equal_bits(found, wanted)


@layer_norm_only
def test_training_step_without_a_bias_needs_no_python(make: Any, machine: Machine) -> None:
    """Autograd gives PyTorch's operator an undefined tensor for it, and not None."""
    norm = torch.nn.LayerNorm(1024, bias=False).bfloat16()

    def step() -> list[torch.Tensor]:
        x = rows().requires_grad_()
        return list(torch.autograd.grad(norm(x), (x, norm.weight), rows(seed=1)))

    served = []
    for package in (taught(make), make(on=False)):
        with installation_of(package).installed():
            served.append(who_served(machine, step))
    (*one, found), (*other, wanted) = served
    assert one == [1, 0] and other == [0, 1] and equal_bits(found, wanted)


TAKEN_APART = {"dy a subclass": 2, "dy negative": 1}
"""Calls that PyTorch makes plain before they get here, and how many."""


@pytest.mark.filterwarnings("ignore:nothing like")
@pytest.mark.parametrize("name", OTHERS)
def test_call_that_differs_in_one_thing_is_left_to_python(
    make: Any, machine: Machine, name: str, by_aten: Any
) -> None:
    package, never, outcomes = taught(make), make(on=False), []
    learned(package, by_backward, 1)
    for one in (package, never):
        with installation_of(one).installed():
            by_cpp, found = attempt(machine, lambda: by_aten(**OTHERS[name]()))
            outcomes.append(found)
            launched = 0 if isinstance(found, tuple) else TAKEN_APART.get(name, 0)
            assert by_cpp == launched * (one is package)
            if one is package:
                assert who_served(machine, lambda: by_aten(**inputs()))[:2] == (1, 0)
    assert alike(*outcomes)


@pytest.mark.parametrize("mask", [(True, False), (False, True), (False, False)])
@rms_norm_only
def test_what_is_not_wanted_is_not_computed(
    make: Any, machine: Machine, mask: tuple[bool, bool], aten: list[str], by_aten: Any
) -> None:
    package = taught(make)
    with installation_of(package).installed():
        wanted = by_aten(**inputs())
        by_cpp, _, found = who_served(machine, lambda: by_aten(**inputs(), mask=mask))
    assert by_cpp == 0 and aten == []
    for one, other, computed in zip(found, wanted, mask, strict=True):
        assert torch.equal(one, other) if computed else one is None


@layer_norm_only
@pytest.mark.parametrize("mask", list(itertools.product((True, False), repeat=3)))
def test_either_of_both_sums_is_left_out(
    make: Any, machine: Machine, mask: tuple[bool, ...], aten: list[str], by_aten: Any
) -> None:
    package = taught(make)
    with installation_of(package).installed():
        wanted = by_aten(**inputs())
        by_cpp, _, found = who_served(machine, lambda: by_aten(**inputs(), mask=mask))
    assert by_cpp == (mask[0] and any(mask[1:])) and aten == []
    for one, other, computed in zip(found, wanted, mask, strict=True):
        assert torch.equal(one, other) if computed else one is None


@layer_norm_only
@pytest.mark.parametrize("bias", ["wide", "none"])
def test_sums_are_of_the_weight_s_dtype(
    make: Any, machine: Machine, aten: list[str], bias: str
) -> None:
    """So a bias of another one is PyTorch's; without a bias both are still computed."""
    package, given = taught(make), inputs()
    scale = given["weight"].float() if bias == "wide" else None
    with installation_of(package).installed():
        call = lambda: torch.ops.aten.native_layer_norm_backward(  # noqa: E731
            *(given["dy"], given["x"], [1024], mean_of(given["rstd"]), given["rstd"]),
            *(given["weight"], scale, [True, True, bias == "wide"]),
        )
        by_cpp, by_python, _ = who_served(machine, call)
    assert (by_cpp, by_python, len(aten)) == ((0, 0, 1) if bias == "wide" else (1, 0, 0))


@rms_norm_only  # the schema of LayerNorm's has a length
@pytest.mark.parametrize("mask", [[], [True], [True] * 3])
def test_masks_of_another_length_stay_with_pytorch(
    make: Any, machine: Machine, mask: Any, aten: list[str], by_aten: Any
) -> None:
    package = taught(make)
    with installation_of(package).installed(), suppress(IndexError):
        assert who_served(machine, lambda: by_aten(**inputs(), mask=mask))[:2] == (0, 0)
    assert aten == ["backward"]


def test_norms_over_two_dimensions_stay_with_pytorch(
    make: Any, machine: Machine, aten: list[str], by_aten: Any
) -> None:
    package = taught(make)
    with installation_of(package).installed():
        call = lambda: by_aten(**inputs(), shape=[1, 1024])  # noqa: E731
        assert who_served(machine, call)[:2] == (0, 0)
    assert aten == ["backward"]


@pytest.mark.parametrize("state", ["capturing", "another stream"])
def test_state_of_the_machine_is_asked(
    make: Any, machine: Machine, state: str, by_aten: Any
) -> None:
    package = taught(make)
    machine.capturing, machine.stream = state == "capturing", 8 if state == "another stream" else 7
    with installation_of(package).installed():
        assert who_served(machine, lambda: by_aten(**inputs()))[:2] == (0, 1)
        machine.capturing, machine.stream = False, 7
        assert who_served(machine, lambda: by_aten(**inputs()))[:2] == (1, 0)


def test_uninstall_restores_pytorch_and_install_again_is_native(
    make: Any, machine: Machine, aten: list[str], by_aten: Any
) -> None:
    package = taught(make)
    entry_point = installation_of(package)
    for _ in range(3):
        entry_point.install()
        assert who_served(machine, lambda: by_aten(**inputs()))[:2] == (1, 0)
        with entry_point.installed():
            entry_point.uninstall()
            assert who_served(machine, lambda: by_aten(**inputs()))[:2] == (1, 0)
        assert aten == []
        assert who_served(machine, lambda: by_aten(**inputs()))[:2] == (0, 0)
        assert aten.pop() == "backward"


def test_packages_take_turns(make: Any, machine: Machine, aten: list[str], by_aten: Any) -> None:
    one, two = (installation_of(taught(make, spec)) for spec in (SPEC, SEPARATE))
    for _ in range(2):
        with one.installed():
            with pytest.raises(RuntimeError, match="uninstall it first"):
                two.install()
            assert who_served(machine, lambda: by_aten(**inputs()))[:2] == (1, 0)
        with two.installed():
            assert who_served(machine, lambda: by_aten(**inputs()))[:2] == (2, 0)
    assert aten == []


def test_package_that_is_loaded_again_takes_the_place_of_its_former_self(
    make: Any, machine: Machine, aten: list[str], by_aten: Any
) -> None:
    first, second = taught(make), make(on=False)
    former, now = installation_of(first), installation_of(second)
    former.package = now.package = "one package"
    former.install()
    now.install()
    assert who_served(machine, lambda: by_aten(**inputs()))[:2] == (0, 1)
    now.uninstall()
    by_aten(**inputs())
    assert aten == ["backward"]


@pytest.mark.parametrize("served_by", ["cpp", "python"])
def test_call_that_uninstalls_its_own_package_ends_as_it_began(
    make: Any, machine: Machine, served_by: str, aten: list[str], by_aten: Any
) -> None:
    """Its kernel is no longer registered when it goes on."""
    package = taught(make, SEPARATE)
    wanted = by_backward(package, **inputs())
    entry_point = installation_of(package)
    entry_point.install()
    if served_by == "python":
        monitored = package._find

        def find(*given: Any) -> Any:
            entry_point.uninstall()
            return monitored(*given)

        package._find = find  # type: ignore[method-assign]
        given = inputs(7)
        by_cpp, by_python, found = who_served(machine, lambda: by_aten(**given))
        wanted = by_backward(package, **given)
    else:
        machine.between = entry_point.uninstall
        by_cpp, by_python, found = who_served(machine, lambda: by_aten(**inputs()))
    assert (by_cpp, by_python) == ((2, 0) if served_by == "cpp" else (0, 2))
    assert equal_bits(list(found), list(wanted)) and aten == []
    by_aten(**inputs())
    assert aten == ["backward"]


@rms_norm_only
def test_backward_under_way_ends_as_it_began_when_another_thread_uninstalls(
    make: Any, aten: list[str]
) -> None:
    """It is in the kernel in C++, and waits for the interpreter to go on in Python."""
    check_that_backwards_end_as_they_began(aten, make()._native.take)


def test_threads_may_train_install_and_uninstall(make: Any, machine: Machine, by_aten: Any) -> None:
    package = make(SEPARATE)
    entry_point = installation_of(package)
    wanted = by_backward(package, **inputs())
    learned(package, by_backward)

    def train() -> None:
        for _ in range(30):
            with entry_point.installed():
                assert equal_bits(list(by_aten(**inputs())), list(wanted))

    in_threads([train] * 3)
    assert len(machine.native) > 2 * 80


def test_error_in_python_is_that_of_the_call(make: Any, by_aten: Any, norm_step: Any) -> None:
    class OddError(Exception):
        pass

    error = OddError("planted")

    def fail(*_: Any) -> Any:
        raise error

    package = make()
    entry_point = Installation(lambda *_: None, fail, "CPU", routed=package._routed)
    entry_point.use_native(package._native.take)
    with entry_point.installed():
        calls: tuple[Callable[[], Any], ...] = (lambda: by_aten(**inputs()), norm_step)
        for call in calls:
            with pytest.raises(OddError) as caught:
                call()
            assert caught.value is error


def test_gradient_of_a_gradient_is_not_dropped(make: Any, module_of: Any) -> None:
    """PyTorch differentiates through its own operators then."""
    package, grads = taught(make), []
    for one in (package, make(on=False)):
        with installation_of(one).installed():
            norm, x = module_of(1024).bfloat16(), rows().requires_grad_()
            (dx,) = torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
            grads.append([dx.detach(), *torch.autograd.grad(dx.float().square().sum(), x)])
    assert equal_bits(*grads)


def test_trainings_have_the_same_bits(
    make: Any, machine: Machine, aten: list[str], module_of: Any
) -> None:
    runs = []
    for package in (make(), make(on=False)):
        with installation_of(package).installed():
            sizes = {"width": 1024, "heads": 8}
            runs.append(Training(module_of, False, "cpu", torch.bfloat16, **sizes).train(2))
    assert equal_bits(*runs)
    assert len(machine.native) > 0 and "backward" not in aten


def test_use_native_of_a_package_reaches_its_installation(
    tmp_path: Path,
    module: Any,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
) -> None:
    write = write_layer_norm_package if operation == OPERATIONS[1] else write_package
    monkeypatch.setattr(native, "_driver_addresses", lambda: machine.addresses)
    monkeypatch.setattr(native, "load_extension", lambda: module)
    for first in ("native", "install"):
        package: Any = write(tmp_path / first)
        backward = package.ops.aten[-1]
        if first == "native":
            package.use_native()
        with package.installed():
            package.use_native()
            assert installed_natively(backward)
        assert not installed_natively(backward)
