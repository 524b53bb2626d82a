"""C++ launches what Python would have launched, and leaves to Python what it does not serve. The
extension is the real one; the driver is made of callbacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from normforge.api import Package
from normforge.frontends.operators import Operators
from normforge.launch.workspace import PER_THREAD
from normforge.spec import KernelSpec
from tests.support.entry_points import equal_bits
from tests.support.fake_driver import SEPARATE, SPEC
from tests.support.native import (
    OTHERS,
    STATES,
    EntryPoint,
    Machine,
    Watch,
    alike,
    attempt,
    by_autograd,
    by_backward,
    by_operator,
    check_launches,
    entry_points,
    in_state,
    inputs,
    learned,
    leaves,
    rows,
    started,
    who_served,
)


@entry_points
@pytest.mark.parametrize("spec", [SPEC, SEPARATE], ids=["one kernel", "two kernels"])
def test_native_launch_is_that_of_python_in_memory_of_its_own(
    machine: Machine, make: Any, entry_point: EntryPoint, spec: KernelSpec
) -> None:
    package, reference = make(spec), make(spec, on=False)
    learned(package, entry_point)
    given, kernels = inputs(), 1 + (spec is SEPARATE)
    native_kernels, by_python, results = who_served(machine, lambda: entry_point(package, **given))
    assert (native_kernels, by_python) == (kernels, 0)
    learned(reference, entry_point)
    none, by_python, wanted = who_served(machine, lambda: entry_point(reference, **given))
    assert (none, by_python) == (0, kernels)
    assert equal_bits(list(results), list(wanted))
    check_launches(machine, machine.native[-kernels:], machine.launches[-kernels:])
    main = machine.native[-kernels].arguments
    assert (main.dx, main.dw) == tuple(t.data_ptr() for t in results)
    assert all(getattr(main, n) == given[n].data_ptr() for n in ("x", "dy", "weight"))


def test_operators_are_of_the_package_that_has_the_name_now(machine: Machine, make: Any) -> None:
    """One that is loaded again, after it was tuned again, say."""
    former = make()
    for _ in range(3):
        former.ops.rms_norm_backward(*inputs().values(), None, None, 0.0, True, True, former.name)
    call = (*inputs().values(), None, None, 0.0, True, True, former.name)
    assert who_served(machine, lambda: former.ops.rms_norm_backward(*call))[:2] == (1, 0)
    ran: list[Any] = []

    def backward(given: Any, options: Any) -> Any:
        ran.append(given)
        return former._run(given, options)

    Operators(former.name, former._forward, backward, lambda *_: None)
    assert who_served(machine, lambda: former.ops.rms_norm_backward(*call))[:2] == (0, 1)
    assert len(ran) == 1


def test_planted_scratch_of_somebody_else_is_noticed(machine: Machine, make: Any) -> None:
    """The check of all tests here sees a plan with a wrong address."""
    package, reference = make(SEPARATE), make(SEPARATE, on=False)
    learned(package)
    learned(reference)
    learner = package._native.learn.__self__
    theirs = reference._workspaces.of_stream(0, 7).scratch
    for wrong, message in ((theirs, "memory of a call"), (12345, "nobody allocated")):
        learner._store.set_scratch(0, 7, wrong)
        by_autograd(package, **inputs())
        by_autograd(reference, **inputs())
        with pytest.raises(AssertionError, match=message):
            check_launches(machine, machine.native[-2:], machine.launches[-2:])


@pytest.mark.filterwarnings("ignore:nothing like")
@pytest.mark.parametrize("entry_point", [by_backward, by_operator])
@pytest.mark.parametrize("name", OTHERS)
def test_call_that_differs_in_one_thing_is_left_to_python(
    machine: Machine, make: Any, name: str, entry_point: EntryPoint
) -> None:
    package, never = make(), make(on=False)
    learned(package, entry_point)
    learned(package, entry_point, 1)
    assert who_served(machine, lambda: entry_point(package, **inputs()))[:2] == (1, 0)
    (by_cpp, found), (none, wanted) = (
        attempt(machine, lambda one=one: entry_point(one, **OTHERS[name]()))
        for one in (package, never)
    )
    assert (by_cpp, none) == (0, 0)
    assert alike(found, wanted, (package.name, never.name))
    assert who_served(machine, lambda: entry_point(package, **inputs()))[:2] == (1, 0)


@pytest.mark.filterwarnings("ignore:nothing like")
@pytest.mark.parametrize(
    "call_options",
    [
        {"weight_offset": 1.0},
        {"need_dx": False},
        {"need_dw": False},
        {"dw_dtype": torch.float32},
        {"dw_out": torch.zeros(1024)},
        {"dresidual": rows()},
    ],
    ids=lambda call_options: next(iter(call_options)),
)
def test_options_are_left_to_python(
    machine: Machine, make: Any, call_options: dict[str, Any]
) -> None:
    package = make()
    learned(package, by_backward)
    call = lambda: package.rmsnorm_backward(**inputs(), **call_options)  # noqa: E731
    assert who_served(machine, call)[0] == 0


@pytest.mark.filterwarnings("ignore:nothing like")
@pytest.mark.parametrize(
    ("place", "value"),
    [(4, rows()), (5, torch.float32), (6, 1.0), (7, False), (8, False)],
    ids=["dresidual", "dw_dtype", "offset", "only dw", "only dx"],
)
def test_operator_leaves_options_to_python(
    machine: Machine, make: Any, place: int, value: Any
) -> None:
    package, never = make(), make(on=False)
    learned(package, by_operator)
    plain = (*inputs().values(), None, None, 0.0, True, True)
    given = (*plain[:place], value, *plain[place + 1 :])
    by_cpp, _, results = who_served(
        machine, lambda: package.ops.rms_norm_backward(*given, package.name)
    )
    assert by_cpp == 0
    wanted = never.ops.rms_norm_backward(*given, never.name)
    assert equal_bits([results[0]], [wanted[0]])
    assert [(t.shape, t.dtype) for t in results] == [(t.shape, t.dtype) for t in wanted]


@pytest.mark.parametrize("first", ["native", "compiled"])
def test_compiled_backward_is_launched_natively(
    machine: Machine, make: Any, module: Any, first: str
) -> None:
    package, never = make(on=first == "native"), make(on=False)

    def step(package: Package, norm: Any) -> Any:
        given = leaves()
        return torch.autograd.grad(norm(**given), tuple(given.values()), inputs()["dy"])

    norm = torch.compile(
        lambda x, weight: package.rms_norm(x, weight, 1e-6), backend="aot_eager", fullgraph=True
    )
    assert who_served(machine, lambda: step(package, norm))[:2] == (0, 1)
    if first == "compiled":
        started(package, module, machine.addresses, on_cpu=True)
    for _ in range(3):
        step(package, norm)
    by_cpp, by_python, results = who_served(machine, lambda: step(package, norm))
    assert (by_cpp, by_python) == (1, 0)
    wanted = step(never, lambda x, weight: never.rms_norm(x, weight, 1e-6))
    assert equal_bits(list(results), list(wanted))


def test_gradient_of_a_native_operator_is_refused(machine: Machine, make: Any) -> None:
    package = make()
    learned(package, by_operator)
    for name in ("dy", "x", "rstd", "weight"):
        given = inputs()
        given[name].requires_grad_()
        by_cpp, _, (dx, _) = who_served(machine, lambda given=given: by_operator(package, **given))
        assert by_cpp == 0
        with pytest.raises(RuntimeError, match="no gradient of its own"):
            dx.sum().backward()
        with torch.no_grad():
            by_cpp, _, (dx, _) = who_served(
                machine, lambda given=given: by_operator(package, **given)
            )
        assert by_cpp == 1 and not dx.requires_grad


def gradients(package: Package, *wanted: str, offset: float = 0.0, **how: Any) -> Any:
    given = leaves()
    y = package.rms_norm(**given, eps=1e-6, weight_offset=offset)
    return torch.autograd.grad(y, [given[name] for name in wanted], inputs()["dy"], **how)


@pytest.mark.filterwarnings("ignore:nothing like")
@pytest.mark.parametrize(
    ("wanted", "how"),
    [
        (["x"], {}),
        (["weight"], {}),
        (["x", "weight"], {"create_graph": True}),
        (["x", "weight"], {"offset": 1.0}),
    ],
)
def test_node_leaves_other_call_options_to_python(
    machine: Machine, make: Any, wanted: list[str], how: dict[str, Any]
) -> None:
    package = make()
    learned(package)
    assert who_served(machine, lambda: gradients(package, *wanted, **how))[0] == 0
    assert who_served(machine, lambda: by_autograd(package, **inputs()))[:2] == (1, 0)


@entry_points
@pytest.mark.parametrize("name", STATES)
def test_state_of_the_machine_is_asked(
    machine: Machine, make: Any, entry_point: EntryPoint, name: str
) -> None:
    package = make()
    learned(package, entry_point)
    _, _, wanted = who_served(machine, lambda: entry_point(package, **inputs()))
    with in_state(machine, name):
        by_cpp, by_python, results = who_served(machine, lambda: entry_point(package, **inputs()))
    assert (by_cpp, by_python) == (0, 1)
    assert equal_bits(list(results), list(wanted))
    assert who_served(machine, lambda: entry_point(package, **inputs()))[:2] == (1, 0)


def test_mode_that_watches_the_backward_alone_sees_it(machine: Machine, make: Any) -> None:
    package = make()
    learned(package)
    given = leaves()
    y = package.rms_norm(**given, eps=1e-6)
    with Watch() as watch:
        by_cpp, by_python, _ = who_served(
            machine, lambda: torch.autograd.grad(y, tuple(given.values()), inputs()["dy"])
        )
    assert (by_cpp, by_python) == (0, 1)
    assert any("rms_norm_backward" in name for name in watch.seen)


def test_nothing_is_learned_during_a_capture_or_on_the_per_thread_stream(
    machine: Machine, make: Any
) -> None:
    package = make()
    for machine.stream, machine.capturing in ((7, True), (PER_THREAD, False)):
        learned(package)
        learned(package)
        assert machine.native == []
    machine.stream = 7
    learned(package)
    assert len(machine.native) > 0


def test_shapes_of_the_same_rows_share_a_plan(machine: Machine, make: Any) -> None:
    package = make()
    learned(package, by_backward)
    given = inputs()
    cube = {name: given[name].view(2, 3, -1) for name in ("dy", "x", "rstd")}
    by_cpp, by_python, (dx, dw) = who_served(
        machine, lambda: by_backward(package, **cube, weight=given["weight"])
    )
    assert (by_cpp, by_python) == (1, 0)
    wanted = by_backward(package, **given)
    assert dx.shape == (2, 3, 1024) and equal_bits([dx.view(6, 1024), dw], list(wanted))
