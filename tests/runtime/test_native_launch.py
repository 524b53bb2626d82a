"""C++ launches what Python would have launched, and leaves to Python what it does not serve. The
extension is the real one; the driver is made of callbacks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from normforge.frontends.layer_norm_operators import LayerNormOperators
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
    both_norms,
    by_autograd,
    by_backward,
    by_operator,
    call_operator,
    check_launches,
    entry_points,
    in_state,
    inputs,
    layer_norm_only,
    learned,
    leaves,
    norm,
    rms_norm_only,
    rows,
    started,
    who_served,
)

operation = both_norms


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
    assert (main.dx, main.dw) == tuple(t.data_ptr() for t in results[:2])
    assert all(getattr(main, n) == given[n].data_ptr() for n in ("x", "dy", "weight"))


def test_operators_are_of_the_package_that_has_the_name_now(
    machine: Machine, make: Any, operation: str
) -> None:
    """One that is loaded again, after it was tuned again, say."""
    former = make()
    learned(former, by_operator)
    assert who_served(machine, lambda: by_operator(former, **inputs()))[:2] == (1, 0)
    ran: list[Any] = []

    def backward(given: Any, options: Any) -> Any:
        ran.append(given)
        return former._run(given, options)

    if operation == "rmsnorm_backward":
        Operators(former.name, former._forward, backward, lambda *_: None)
    else:
        LayerNormOperators(former.name, backward, lambda *_: None)
    assert who_served(machine, lambda: by_operator(former, **inputs()))[:2] == (0, 1)
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
        {"need_dx": False},
        {"need_dw": False},
        {"dw_dtype": torch.float32},
        {"dw_out": torch.zeros(1024)},
        {"dresidual": rows()},
    ],
    ids=lambda call_options: next(iter(call_options)),
)
def test_options_are_left_to_python(
    machine: Machine, make: Any, operation: str, call_options: dict[str, Any]
) -> None:
    package = make()
    learned(package, by_backward)
    if operation == "layernorm_backward" and "dw_out" in call_options:
        call_options = {"dw_out": torch.zeros(2, 1024)}
    call = lambda: by_backward(package, **inputs(), **call_options)  # noqa: E731
    assert who_served(machine, call)[0] == 0


@rms_norm_only
@pytest.mark.filterwarnings("ignore:nothing like")
def test_offset_is_left_to_python(machine: Machine, make: Any) -> None:
    package = make()
    learned(package, by_backward)
    call = lambda: by_backward(package, **inputs(), weight_offset=1.0)  # noqa: E731
    assert who_served(machine, call)[0] == 0


MEANS: dict[str, Callable[[], Any]] = {
    "other length": lambda: torch.ones(5),
    "another dtype": lambda: torch.ones(6).bfloat16(),
    "gaps": lambda: torch.ones(12)[::2],
    "no tensor": lambda: 1.0,
}


@layer_norm_only
@pytest.mark.parametrize("name", MEANS)
def test_mean_that_differs_is_left_to_python(machine: Machine, make: Any, name: str) -> None:
    package, never = make(), make(on=False)
    learned(package, by_backward)
    given = inputs()
    found = []
    for one in (package, never):
        call = lambda one=one: one.layer_norm_backward(  # noqa: E731
            given["dy"], given["x"], MEANS[name](), given["rstd"], given["weight"]
        )
        by_cpp, results = attempt(machine, call)
        assert by_cpp == 0
        found.append(results)
    assert alike(*found, (package.name, never.name))


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
    by_cpp, _, results = who_served(machine, lambda: call_operator(package, *given))
    assert by_cpp == 0
    wanted = call_operator(never, *given)
    assert equal_bits([results[0]], [wanted[0]])
    assert [(t.shape, t.dtype) for t in results] == [(t.shape, t.dtype) for t in wanted]


@pytest.mark.parametrize("first", ["native", "compiled"])
def test_compiled_backward_is_launched_natively(
    machine: Machine, make: Any, module: Any, first: str
) -> None:
    package, never = make(on=first == "native"), make(on=False)

    def step(package: Any, norm: Any) -> Any:
        given = leaves(package)
        return torch.autograd.grad(norm(*given.values()), tuple(given.values()), inputs()["dy"])

    compiled = torch.compile(partial(norm, package), backend="aot_eager", fullgraph=True)
    assert who_served(machine, lambda: step(package, compiled))[:2] == (0, 1)
    if first == "compiled":
        started(package, module, machine.addresses, on_cpu=True)
    for _ in range(3):
        step(package, compiled)
    by_cpp, by_python, results = who_served(machine, lambda: step(package, compiled))
    assert (by_cpp, by_python) == (1, 0)
    wanted = step(never, partial(norm, never))
    assert equal_bits(list(results), list(wanted))


def test_gradient_of_a_native_operator_is_refused(machine: Machine, make: Any) -> None:
    package = make()
    learned(package, by_operator)
    for name in ("dy", "x", "rstd", "weight"):
        given = inputs()
        given[name].requires_grad_()
        by_cpp, _, (dx, *_) = who_served(machine, lambda given=given: by_operator(package, **given))
        assert by_cpp == 0
        with pytest.raises(RuntimeError, match="no gradient of its own"):
            dx.sum().backward()
        with torch.no_grad():
            by_cpp, _, (dx, *_) = who_served(
                machine, lambda given=given: by_operator(package, **given)
            )
        assert by_cpp == 1 and not dx.requires_grad


def gradients(package: Any, *wanted: str, eps: float = 1e-6, **how: Any) -> Any:
    given = leaves(package)
    y = norm(package, **given, eps=eps)
    return torch.autograd.grad(y, [given[name] for name in wanted], inputs()["dy"], **how)


@pytest.mark.filterwarnings("ignore:nothing like")
@pytest.mark.parametrize(
    ("wanted", "how"),
    [
        (["x"], {}),
        (["weight"], {}),
        (["x", "weight"], {"create_graph": True}),
        (["x", "weight"], {"eps": 1e-30}),
    ],
)
def test_node_leaves_other_call_options_to_python(
    machine: Machine, make: Any, wanted: list[str], how: dict[str, Any]
) -> None:
    package = make()
    learned(package)
    assert who_served(machine, lambda: gradients(package, *wanted, **how))[0] == 0
    assert who_served(machine, lambda: by_autograd(package, **inputs()))[:2] == (1, 0)


@rms_norm_only
@pytest.mark.filterwarnings("ignore:nothing like")
def test_node_leaves_an_offset_to_python(machine: Machine, make: Any) -> None:
    package = make()
    learned(package)
    given = leaves(package)
    y = package.rms_norm(**given, eps=1e-6, weight_offset=1.0)
    call = lambda: torch.autograd.grad(y, (*given.values(),), inputs()["dy"])  # noqa: E731
    assert who_served(machine, call)[0] == 0


@layer_norm_only
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_node_gives_either_of_both_sums(machine: Machine, make: Any, frozen: str) -> None:
    """The kernel computes both, and the one that is frozen gets none."""
    package = make()
    learned(package)
    given = leaves(package)
    wanted = torch.autograd.grad(norm(package, **given), (*given.values(),), inputs()["dy"])
    given[frozen].requires_grad_(False)
    left = [name for name in given if name != frozen]
    y = norm(package, **given)
    by_cpp, _, found = who_served(
        machine, lambda: torch.autograd.grad(y, [given[name] for name in left], inputs()["dy"])
    )
    assert by_cpp == 1
    assert equal_bits(list(found), [dict(zip(given, wanted, strict=True))[name] for name in left])


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
    given = leaves(package)
    y = norm(package, **given)
    with Watch() as watch:
        by_cpp, by_python, _ = who_served(
            machine, lambda: torch.autograd.grad(y, tuple(given.values()), inputs()["dy"])
        )
    assert (by_cpp, by_python) == (0, 1)
    assert any("norm_backward" in name for name in watch.seen)


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
    by_cpp, by_python, (dx, *sums) = who_served(
        machine, lambda: by_backward(package, **cube, weight=given["weight"])
    )
    assert (by_cpp, by_python) == (1, 0)
    wanted = by_backward(package, **given)
    assert dx.shape == (2, 3, 1024) and equal_bits([dx.view(6, 1024), *sums], list(wanted))
