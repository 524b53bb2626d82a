"""Native launches have memory of their own, whoever grows or loses it, in every thread.
The extension is the real one; the driver is made of callbacks."""

from __future__ import annotations

import ctypes
import itertools
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from cuda.bindings import driver as cuda

from normforge.frontends import package as package_module
from normforge.launch.driver import LaunchError
from normforge.native import plans
from normforge.native.kinds import RMS_NORM
from normforge.serve.call_cache import _MOST_RECENT as _MOST
from tests.support.entry_points import equal_bits
from tests.support.fake_driver import SEPARATE, SPEC
from tests.support.native import (
    OPERATIONS,
    OTHERS,
    EntryPoint,
    Machine,
    both_norms,
    by_autograd,
    by_backward,
    entry_points,
    in_threads,
    inputs,
    learned,
    leaves,
    norm,
    rows,
    who_served,
)

operation = both_norms


@pytest.fixture
def warming(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """`warmup` on the fake device."""
    for name, answer in (("is_available", True), ("current_device", 0), ("device", nullcontext())):
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(package_module, "raw_stream", lambda device: machine.here())
    on_cpu = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **how: on_cpu(*size, **how))


def test_scratch_that_grew_is_that_of_every_plan(machine: Machine, make: Any) -> None:
    package = make(SEPARATE)
    learned(package)
    small = machine.native[-2].arguments.scratch
    learned(package, M=4096)
    by_cpp, _, _ = who_served(machine, lambda: by_autograd(package, **inputs(4096)))
    assert by_cpp == 2
    large = machine.native[-2].arguments.scratch
    assert (small, 7) in machine.freed and large != small
    by_cpp, _, _ = who_served(machine, lambda: by_autograd(package, **inputs()))
    assert by_cpp == 2
    assert machine.native[-2].arguments.scratch == machine.native[-1].arguments.scratch == large
    needed = machine.allocated[large][0]
    assert needed >= 4 * 1024 * machine.native[-3].arguments.partials, "room for all partial rows"


@contextmanager
def without_memory(machine: Machine, package: Any) -> Iterator[None]:
    """There is no memory whenever a plan is learned."""
    learn = package._native.learn

    def learn_without_memory(call: Any) -> None:
        machine.full = True
        learn(call)
        machine.full = False

    package._native.learn = learn_without_memory
    yield
    package._native.learn = learn


def test_scratch_that_was_lost_leaves_calls_to_python_until_there_is_new(
    machine: Machine, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = make(SEPARATE)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    learned(package)
    assert who_served(machine, lambda: by_autograd(package, **inputs()))[:2] == (2, 0)
    with without_memory(machine, package):
        learned(package, M=4096)  # the block of before was freed for a larger one that there is not
        for M in (6, 4096):
            assert who_served(machine, lambda M=M: by_autograd(package, **inputs(M)))[:2] == (0, 2)
    learned(package, M=7)
    for M, by_cpp in ((6, 2), (7, 2), (4096, 0)):
        assert who_served(machine, lambda M=M: by_autograd(package, **inputs(M)))[0] == by_cpp


@pytest.mark.parametrize("failures", [1, 2])
def test_scratch_that_comes_back_has_room_for_the_largest_plan(
    machine: Machine, make: Any, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """However small the calls are that came last and that bring it back, and however often it
    failed to come."""
    package = make(SEPARATE)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    learned(package, M=16)
    needed = machine.allocated[machine.native[-2].arguments.scratch][0]
    learned(package, M=4)
    with without_memory(machine, package):
        for M in (4096, 2048)[:failures]:
            learned(package, M=M)
        assert who_served(machine, lambda: by_autograd(package, **inputs(16)))[:2] == (0, 2)
    learned(package, M=2)
    assert who_served(machine, lambda: by_autograd(package, **inputs(16)))[:2] == (2, 0)
    assert machine.allocated[machine.native[-2].arguments.scratch][0] >= needed


@pytest.mark.usefixtures("warming")
def test_warmup_takes_the_memory_that_native_launches_need(machine: Machine, make: Any) -> None:
    machine.stream = 8  # the current stream of native launches, and of what is warmed up
    cold, warm = make(SEPARATE), make(SEPARATE)
    warm.warmup([(4096, 1024, "bf16"), (6, 1024, "bf16")])
    for package, takes in ((warm, False), (cold, True)):
        before = len(machine.allocated), len(machine.zeroed)
        learned(package, M=4096)
        assert who_served(machine, lambda p=package: by_autograd(p, **inputs(4096)))[:2] == (2, 0)
        assert ((len(machine.allocated), len(machine.zeroed)) != before) is takes
    warm.warmup([(6, 1024, "bf16")])
    assert who_served(machine, lambda: by_autograd(warm, **inputs(4096)))[:2] == (2, 0)


@pytest.mark.usefixtures("warming")
def test_warmup_without_memory_for_native_launches_leaves_them_what_they_had(
    machine: Machine, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    package = make(SEPARATE)
    learned(package)
    plans = package._native.learn.__self__
    workspace = plans._workspaces.of_stream(0, 7)
    most, allocate = 4 * workspace.scratch_words, machine.cuMemAllocAsync
    asked: list[int] = []

    def little(size: int, stream: int) -> tuple[Any, ...]:
        machine.full = size > most and size in asked  # there was room for Python's block
        asked.append(size)
        return allocate(size, stream)

    machine.cuMemAllocAsync = little  # type: ignore[method-assign]
    package.warmup([(4096, 1024, "bf16"), (6, 1024, "bf16")])
    assert max(map(asked.count, asked)) > 1, "some memory was refused"
    assert who_served(machine, lambda: by_autograd(package, **inputs()))[:2] == (2, 0)
    learned(package, M=4096)
    assert who_served(machine, lambda: by_autograd(package, **inputs(4096)))[:2] == (0, 2)
    machine.cuMemAllocAsync = allocate  # type: ignore[method-assign]
    package.warmup([(4096, 1024, "bf16")])
    learned(package, M=4095)
    assert who_served(machine, lambda: by_autograd(package, **inputs(4095)))[:2] == (2, 0)


def test_learning_that_fails_does_not_fail_the_call(
    machine: Machine, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("planted")

    package = make(SEPARATE)
    monkeypatch.setattr(torch.cuda, "empty_cache", fail)
    by_autograd(package, **inputs())
    machine.full = True  # the native path gets no workspace; Python's is there
    learned(package)
    assert who_served(machine, lambda: by_autograd(package, **inputs()))[:2] == (0, 2)


def test_other_threads_run_while_a_launch_waits_for_the_driver(module: Any) -> None:
    """A launch that is C's usleep, whose first argument is the address of a configuration."""
    usleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value
    device, stream = (ctypes.c_int(0), ctypes.c_void_p(7))
    of = ctypes.CFUNCTYPE
    number, pointer = ctypes.POINTER(ctypes.c_int), ctypes.c_void_p

    def give_stream(index: int, at: Any) -> int:
        at[0] = stream.value
        return 0

    def give_zero(at: Any) -> int:
        at[0] = device.value
        return 0

    entries = (
        of(ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(pointer))(give_stream),
        of(ctypes.c_int, number)(give_zero),
        of(ctypes.c_int, pointer, number)(lambda stream, at: give_zero(at)),
    )
    driver = [ctypes.cast(entry, pointer).value for entry in entries] + [usleep]
    kinds = tuple(kind.described for kind in RMS_NORM)
    store = module.Store(tuple(driver), True, kinds, lambda *_: None, lambda *_: None)
    store.set_scratch(0, 7, 4096)
    words, of_rows = struct.pack, (6, 1024, torch.bfloat16, torch.bfloat16)
    places = words("6Q", *range(0, 48, 8))
    launch = (bytes(256), places, words("Q", 80), (300_000, 1, words("Q", 0)), (0, 0, b""))
    store.add(0, 0, 7, *of_rows, *launch)
    ticks, done = [0], threading.Event()

    def tick() -> None:
        while not done.wait(0.01):
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        given = inputs()
        before = ticks[0]
        assert store.backward(*(given[name] for name in ("dy", "x", "rstd", "weight"))) is not None
        assert ticks[0] - before >= 5
    finally:
        done.set()
        thread.join()


def test_refused_launch_is_done_by_python_and_is_its_error(
    machine: Machine, make: Any, operation: str
) -> None:
    package = make()
    learned(package)
    machine.refuse_native = 1
    by_cpp, by_python, _ = who_served(machine, lambda: by_autograd(package, **inputs()))
    assert (by_cpp, by_python) == (0, 1)
    machine.refuse_native = 1
    machine.status = cuda.CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    with pytest.raises(LaunchError, match=f"launching {operation} of example"):
        by_autograd(package, **inputs())


@entry_points
def test_threads_on_one_stream_do_not_mix(
    machine: Machine, make: Any, entry_point: EntryPoint, operation: str
) -> None:
    """Both kernels of a call follow each other (`compute` looks), with the call's own tensors."""
    package = make(SEPARATE)
    learned(package, entry_point)
    machine.between = lambda: threading.Event().wait(0.001) and None  # lets other threads run
    wanted = list(entry_point(package, **inputs()))

    def work() -> None:
        for _ in range(10):
            assert equal_bits(list(entry_point(package, **inputs())), wanted)

    before = len(machine.native)
    in_threads([work] * 3)
    pairs = machine.native[before:]
    assert len(pairs) == 60
    for main, second in zip(pairs[::2], pairs[1::2], strict=True):
        assert (main.function, second.function) == (operation, "sum_partials")
        assert main.thread == second.thread and main.arguments.dw == second.arguments.sums


@entry_points
def test_threads_on_streams_of_their_own_share_nothing(
    machine: Machine, make: Any, entry_point: EntryPoint
) -> None:
    package = make()

    def work(stream: int) -> None:
        machine.local.stream = stream
        learned(package, entry_point)
        for M in (6, 4096, 6):
            learned(package, entry_point, M)

    in_threads([lambda stream=stream: work(stream) for stream in (11, 12, 13)])  # type: ignore[misc]
    mains = [one for one in machine.native if one.function in OPERATIONS]
    assert {one.stream for one in mains} == {11, 12, 13}
    for one, other in itertools.combinations(mains, 2):
        if one.stream != other.stream:
            assert one.arguments.counters != other.arguments.counters
            assert one.arguments.scratch != other.arguments.scratch


def test_tangent_of_a_gradient_is_not_dropped(machine: Machine, make: Any) -> None:
    """Forward mode over the backward, by either node: no kernel, and what PyTorch's norm gives."""
    tangent, dy = rows(seed=3), inputs()["dy"]
    for package in (make(), make(on=False)):
        learned(package)
        given = list(leaves(package).values())
        x, *scales = (one.double() for one in given)
        theirs = [torch.nn.functional.rms_norm, torch.nn.functional.layer_norm][len(scales) - 1]
        found = []
        for y in (norm(package, *given), theirs(x, (1024,), *scales, eps=1e-6)):  # type: ignore[operator]
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(dy.to(y.dtype), tangent.to(y.dtype))
                by_cpp, by_python, results = who_served(
                    machine, partial(torch.autograd.grad, y, given, dual)
                )
                assert (by_cpp, by_python) == (0, 0)
                parts = [torch.autograd.forward_ad.unpack_dual(each).tangent for each in results]
                found.append([part.double() for part in parts])
        torch.testing.assert_close(*found, rtol=0.02, atol=0.05)


def test_growing_while_other_threads_launch(machine: Machine, make: Any) -> None:
    """No native launch uses scratch that was freed before it."""
    package = make(SEPARATE)
    learned(package)

    def launch() -> None:
        for _ in range(150):
            by_autograd(package, **inputs())

    def grow() -> None:
        for M in (64, 128, 256, 512, 1024, 2048, 4096):
            learned(package, M=M)

    seen: list[tuple[int, list[int]]] = []
    machine.between = lambda: seen.append(
        (machine.native[-1].arguments.scratch, [at for at, _ in machine.freed])
    )
    in_threads([launch, launch, grow])
    assert len({scratch for scratch, _ in seen}) > 2
    assert all(scratch not in freed for scratch, freed in seen)


def test_number_of_plans_is_bounded(
    machine: Machine, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "_MOST_PLANS", 3)
    package = make()
    for M in range(1, 9):
        learned(package, M=M)
    served = [
        who_served(machine, lambda M=M: by_autograd(package, **inputs(M)))[0] for M in range(1, 9)
    ]
    assert served == [1] * 3 + [0] * 5


def test_packages_have_plans_of_their_own(machine: Machine, make: Any) -> None:
    one, two = make(), make(replace(SPEC, threads=128))
    learned(one)
    assert who_served(machine, lambda: by_autograd(two, **inputs()))[0] == 0
    learned(two)
    blocks = []
    for package in (one, two):
        by_autograd(package, **inputs())
        blocks.append(machine.native[-1].block)
    assert blocks == [256, 128]


@pytest.mark.parametrize(
    "name", ["x spread", "dy spread", "dy repeated", "x shifted", "dy shifted", "weight shifted"]
)
def test_strided_and_misaligned_calls_teach_nothing(machine: Machine, make: Any, name: str) -> None:
    """Their strides, and their kernels, would be taken for those of dense and aligned calls."""
    package, never = make(), make(on=False)
    for _ in range(4):
        by_backward(package, **OTHERS[name]())
    assert who_served(machine, lambda: by_backward(package, **inputs()))[:2] == (0, 1)
    for _ in range(5):
        found = by_backward(package, **inputs())
    assert len(machine.native) > 0
    assert equal_bits(list(found), list(by_backward(never, **inputs())))


def test_more_kinds_than_the_entry_points_try_in_turn_are_learned(
    machine: Machine, make: Any
) -> None:
    package = make()
    shapes = range(1, 3 * _MOST)
    for _, M in itertools.product(range(4), shapes):
        by_autograd(package, **inputs(M))
    for M in shapes:
        assert who_served(machine, lambda M=M: by_autograd(package, **inputs(M)))[:2] == (1, 0)


def test_entry_points_teach_each_other(machine: Machine, make: Any) -> None:
    package = make()
    learned(package, by_backward)
    assert who_served(machine, lambda: by_autograd(package, **inputs()))[:2] == (1, 0)


def test_results_in_deterministic_mode_are_not_filled(machine: Machine, make: Any) -> None:
    """Python does not fill its results either; a kernel writes all of them."""
    package = make()
    learned(package)
    machine.idle = True
    torch.use_deterministic_algorithms(True)
    try:
        by_cpp, _, results = who_served(machine, lambda: by_backward(package, **inputs()))
    finally:
        torch.use_deterministic_algorithms(False)
    assert by_cpp == 1
    assert not any(result.isnan().all() for result in results)


def test_native_launch_in_a_graph_of_compiled_autograd(machine: Machine, make: Any) -> None:
    package = make()
    wanted = [by_autograd(package, **inputs()) for _ in range(4)][-1]
    for _ in range(2):
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            given = leaves(package)
            given |= {"bias": given["weight"].detach().requires_grad_()} if "bias" in given else {}
            y = norm(package, **given)
            by_cpp, by_python, _ = who_served(machine, lambda y=y: y.backward(inputs()["dy"]))
        assert by_cpp + by_python == 1
        assert equal_bits([one.grad for one in given.values()], list(wanted))
    torch._dynamo.reset()


def test_hooks_replays_and_threads_of_a_native_backward(machine: Machine, make: Any) -> None:
    package = make(SEPARATE)
    learned(package)
    given = leaves(package)
    y = norm(package, **given)
    dy = inputs()["dy"]

    def again(keep: bool = True) -> list[torch.Tensor]:
        return list(torch.autograd.grad(y, tuple(given.values()), dy, retain_graph=keep))

    by_cpp, by_python, wanted = who_served(machine, again)
    assert (by_cpp, by_python) == (2, 0)
    in_threads([lambda: [again() for _ in range(10)]] * 3)  # type: ignore[list-item]
    with torch.autograd.set_multithreading_enabled(False):
        by_cpp, _, found = who_served(machine, lambda: again(False))
    assert by_cpp == 2 and equal_bits(found, wanted)
    with pytest.raises(RuntimeError, match="a second time"):
        again()
    with torch.autograd.graph.save_on_cpu():
        by_cpp, _, found = who_served(machine, lambda: list(by_autograd(package, **inputs())))
    assert equal_bits(found, wanted)
