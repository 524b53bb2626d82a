"""The calls of one signature: which memory they share, what a kernel gets for which options, and
when the driver gets it."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cuda.bindings import driver as cuda

from generator.operations.rmsnorm_backward import Inputs
from generator.operations.rows import run_rows
from normforge.launch import graph_end
from normforge.launch.driver import LaunchError
from normforge.launch.loaded_kernel import LoadedKernel
from normforge.launch.workspace import LINE, PER_THREAD, SHARED_FROM, SLAB, Workspaces
from normforge.serve.options import Arguments, Options
from normforge.spec import SUM_KERNEL, UNBOUNDED, ForwardSpec, Launch, plan_launch
from tests.support.fake_driver import SEPARATE, SPEC, Calls, FakeDriver, read_arguments, tensors
from tests.support.native import in_threads


def ways(*names: str) -> pytest.MarkDecorator:
    """Parametrize by those of the four ways to make a call that differ for a test."""
    return pytest.mark.parametrize("calls", names, indirect=True)


of_any_norm = ways("any", "quick")
"""Ways on which a mean changes nothing: it is one more address."""
never_quick = ways("any", "any with mean")
"""Calls that no quick call is made for."""
always_quick = ways("quick", "quick with mean")


@of_any_norm
def test_calls_on_one_stream_reuse_its_workspace(calls: Calls) -> None:
    first, second = calls(), calls()
    assert (first.zeros, first.scratch) == (second.zeros, second.scratch)
    assert first.zeros and first.scratch


@of_any_norm
def test_streams_and_devices_never_share(calls: Calls) -> None:
    owners = []
    device = calls.device
    for device.device, device.stream in ((0, 7), (0, 8), (1, 7), (1, 8)):
        owners.append(calls())
    assert len({owner.zeros for owner in owners}) == 4
    assert len({owner.scratch for owner in owners}) == 4


@of_any_norm
def test_scratch_grows_in_stream_order_and_counters_stay(calls: Calls) -> None:
    small, large, small_again = calls(6), calls(4096), calls(6)
    assert calls.driver.freed == [(small.scratch, 7)]
    assert small.zeros == large.zeros == small_again.zeros
    assert large.scratch == small_again.scratch != small.scratch


@of_any_norm
def test_captured_calls_have_counters_of_their_own_and_no_memset(calls: Calls) -> None:
    eager = calls()
    calls.device.capturing = True
    captured = [calls(), calls()]
    calls.device.capturing = False
    assert calls().zeros == eager.zeros
    assert len({eager.zeros, *(call.zeros for call in captured)}) == 3
    assert all(call.scratch != eager.scratch for call in captured)
    assert len(calls.driver.zeroed) == 1  # the slab, once, outside the graph


def test_mailboxes_are_shared_by_what_one_stream_captures(driver: FakeDriver) -> None:
    workspaces, size = Workspaces(), 1 << 17
    first = workspaces.of_capture(0, 7, size)
    assert workspaces.of_capture(0, 7, size) == workspaces.of_capture(0, 7, size // 2) == first
    owners = {first, workspaces.of_capture(0, 7, 2 * size)}  # it has grown
    owners |= {workspaces.of_capture(0, 8, size), workspaces.of_capture(1, 7, size)}
    driver.capture_id = 2
    owners |= {workspaces.of_capture(0, 7, size)}
    # The driver need not say which capture it is.
    driver.capture_info = cuda.CUresult.CUDA_ERROR_LOSSY_QUERY
    owners |= {workspaces.of_capture(0, 7, size), workspaces.of_capture(0, 7, size)}
    driver.capture_info = cuda.CUresult.CUDA_SUCCESS
    driver.capture_status = cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_INVALIDATED
    owners |= {workspaces.of_capture(0, 7, size)}
    assert len(owners) == 8
    assert len(driver.zeroed) == 8
    zeroed = sorted(driver.zeroed)
    assert all(at + long <= after for (at, long), (after, _) in pairwise(zeroed))


@pytest.mark.parametrize("size", [LINE, SHARED_FROM, SLAB])
def test_words_of_a_graph_that_is_gone_serve_the_next(driver: FakeDriver, size: int) -> None:
    workspaces = Workspaces()
    kept = workspaces.of_stream(0, 7)
    kept.fit(plan_launch(SPEC, 6))
    first = workspaces.of_capture(0, 7, size)
    driver.capture_id = 2
    second = workspaces.of_capture(0, 7, size)
    assert len({kept.zeros, first, second}) == 3  # both graphs may be replayed
    driver.end_graph(1)
    taken = set()
    for driver.capture_id in range(3, 1000):  # a program that captures again and again
        both = {workspaces.of_capture(0, stream, size) for stream in (7, 8)}
        assert len(both) == 2
        taken |= both
        driver.end_graph(driver.capture_id)
    assert first in taken and len(taken) == 2
    assert not taken & {kept.zeros, second}
    driver.capture_id = 1000
    assert workspaces.of_capture(1, 7, size) not in (first, second)  # another device has others


@pytest.mark.parametrize("told", ["user_objects", "capture_info"])
def test_words_of_a_graph_whose_end_nobody_tells_are_its_own(driver: FakeDriver, told: str) -> None:
    setattr(driver, told, cuda.CUresult.CUDA_ERROR_NOT_SUPPORTED)
    workspaces, owners = Workspaces(), set()
    for driver.capture_id in range(5):
        owners.add(workspaces.of_capture(0, 7, LINE))
    assert len(owners) == 5


@never_quick
def test_layouts_that_kernels_cannot_read_are_copied(calls: Calls) -> None:
    x = tensors()[1]
    sideways = x.t().contiguous().t()
    call = calls(x=sideways)
    assert call.arguments.x != sideways.data_ptr()
    assert call.arguments.dy == call.given.dy.data_ptr()


@never_quick
def test_repeated_statistics_and_weight_are_copied_whole(calls: Calls) -> None:
    """Kernels read them one after the other, whatever their strides were."""
    launched, seen = calls.driver.cuLaunchKernelEx, []

    def read(config: Any, function: str, parameters: int, extra: int) -> Any:
        given = read_arguments(function, parameters)
        saved = (given.rstd, given.mean) if calls.centred else (given.rstd,)
        seen.extend(struct.unpack("6f", ctypes.string_at(at, 24)) for at in saved)
        seen.append(struct.unpack("1024H", ctypes.string_at(given.weight, 2048)))
        return launched(config, function, parameters, extra)

    calls.driver.cuLaunchKernelEx = read  # type: ignore[method-assign]
    mean = {"mean": torch.full((1, 1), 2.0).expand(6, 1)} if calls.centred else {}
    weight = torch.ones(()).bfloat16().expand(1024)
    calls(rstd=torch.ones(1, 1).expand(6, 1), weight=weight, **mean)
    assert seen == [(1.0,) * 6, *([(2.0,) * 6] if mean else []), (0x3F80,) * 1024]


def address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


QUICK: list[tuple[Options, dict[str, Any], int]] = [
    (Options(), {}, 0),
    (Options(dw_dtype=torch.float32), {}, 1),
]
"""Options, tensors, and how dw is written, of calls that have a quick call."""
SLOW: list[tuple[Options, dict[str, Any], int]] = [
    (Options(need_dx=False), {}, 0),
    (Options(need_dw=False), {}, 0),
    (Options(), {"weight": None}, 0),
    (Options(), {"dw_out": torch.float32}, 1),
    (Options(accumulate=True), {"dw_out": torch.float32}, 2),
    (Options(), {"dw_out": torch.bfloat16}, 0),
]


@pytest.mark.parametrize(
    ("calls", "options", "change", "dw_mode"),
    [
        *((how, *case) for how in ("any", "any with mean") for case in QUICK + SLOW),
        *((how, *case) for how in ("quick", "quick with mean") for case in QUICK),
    ],
    indirect=["calls"],
)
@pytest.mark.parametrize("capturing", [False, True])
def test_kernel_gets_what_the_options_ask_for(
    calls: Calls, options: Options, change: dict[str, Any], dw_mode: int, capturing: bool
) -> None:
    calls.device.capturing = capturing
    if "dw_out" in change:
        change = {"dw_out": calls.dw(change["dw_out"])}
    versions = {name: out._version for name, out in change.items() if out is not None}
    call = calls(options=options, **change)
    given, (dx, dw) = call.given, call.results
    for name, version in versions.items():
        assert getattr(given, name)._version == version + 1, "autograd knows that it was written"
    places = {name: address(getattr(given, name)) for name in ("x", "dy", "rstd", "weight")}
    places |= {"dx": address(dx), "dw": address(dw), "dresidual": 0, "dresidual_out": 0}
    assert call.tensors == places
    assert call.dw_mode == dw_mode
    assert call.mean == (given.mean.data_ptr() if calls.centred else None)
    assert (dx is None) is not options.need_dx
    assert (dw is None) is (not options.need_dw or given.weight is None)
    if dw is not None:
        assert dw.dtype == (torch.float32 if dw_mode else torch.bfloat16)
        assert dw.shape == calls.dw().shape and dw.is_contiguous()
        assert given.dw_out is None or dw is given.dw_out


@never_quick
def test_residual_of_another_dtype_has_an_output_of_its_own(calls: Calls) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        dresidual = torch.zeros(6, 1024, dtype=dtype)
        call = calls(dresidual=dresidual)
        dx, _, third = call.results
        assert (dx.dtype, third.dtype) == (torch.bfloat16, dtype)
        assert call.arguments.dresidual == dresidual.data_ptr()
        assert call.arguments.dresidual_out == (0 if third is dx else third.data_ptr())
        assert (third is dx) is (dtype is torch.bfloat16)


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("change", [{"options": Options(need_dw=False)}, {"weight": None}])
def test_without_dw_there_is_no_second_kernel(
    calls: Calls, capturing: bool, change: dict[str, Any]
) -> None:
    """It would write to address 0."""
    calls.take(SEPARATE)
    calls.device.capturing = capturing
    assert calls(**change).sum is None
    call = calls()
    assert call.sum.arguments.sums == address(call.results[1])


def in_another_thread(work: Callable[[], Any]) -> Any:
    results: list[Any] = []
    in_threads([lambda: results.append(work())])
    return results[0]


@of_any_norm
def test_threads_have_workspaces_of_their_own_on_the_per_thread_stream(calls: Calls) -> None:
    """The handle of the per-thread default stream names another stream in every thread, and calls
    of different streams may run at the same time."""
    for calls.device.stream, shared in ((PER_THREAD, False), (7, True)):
        mine, again, other = calls(), calls(), in_another_thread(calls)
        assert (mine.zeros, mine.scratch) == (again.zeros, again.scratch)
        assert (mine.zeros == other.zeros) is (mine.scratch == other.scratch) is shared


def test_call_for_another_device_than_the_current_one(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is launched on its own, with all that it has."""
    mine = calls()
    calls.device.device, entered = 1, []

    @contextmanager
    def change(index: int) -> Iterator[None]:
        entered.append(index)
        calls.device.device = index
        yield
        calls.device.device = 1

    monkeypatch.setattr(torch.cuda, "device", change)
    (call,) = calls._made.values()
    given = calls.plain()
    assert calls.serve(call, Arguments(**given)) is not None
    assert entered == [0] and calls.device.device == 1
    seen = calls.driver.launches[-1].arguments
    for name in ("counters", "zeroed", "scratch"):
        assert getattr(seen, name) == getattr(mine.arguments, name)
    assert all(getattr(seen, name) == tensor.data_ptr() for name, tensor in given.items())
    assert ("mean" in given) is calls.centred


@of_any_norm
def test_binding_of_another_thread_is_not_taken(calls: Calls) -> None:
    """Another thread has made a call of the same signature before, with arguments of its own."""
    calls.device.stream = PER_THREAD
    first = in_another_thread(calls)
    second = calls()
    assert first.zeros != second.zeros and first.scratch != second.scratch
    (call,) = calls._made.values()
    assert call.bindings == {}


@of_any_norm
def test_a_call_keeps_bindings_of_so_many_streams(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs make streams all the time, and free them, which nobody tells."""
    monkeypatch.setattr("normforge.serve.call.MOST_STREAMS", 3)
    kept = []
    for calls.device.stream in (11, 12, 13, 13, 14, 15):
        calls()
        (call,) = calls._made.values()
        kept.append(sorted(call.bindings))
    assert kept == [[11], [11, 12], [11, 12, 13], [11, 12, 13], [14], [14, 15]]


@of_any_norm
def test_refused_launch_is_an_error_of_the_call(calls: Calls) -> None:
    calls()
    calls.driver.status = cuda.CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    with pytest.raises(LaunchError, match=r"launching .* of example"):
        calls()


def test_threads_on_one_stream_do_not_mix_their_arguments(calls: Calls) -> None:
    """Both threads pack into the block of one signature and stream."""
    calls()
    launched = calls.driver.cuLaunchKernelEx
    seen: list[tuple[int, ...]] = []

    def slow_launch(config: Any, function: str, parameters: int, extra: int) -> Any:
        threading.Event().wait(0.002)  # lets the other thread run
        x, dy, *_, last = read_arguments(function, parameters)
        seen.append((x, dy, last if calls.centred else 0))
        return launched(config, function, parameters, extra)

    calls.driver.cuLaunchKernelEx = slow_launch  # type: ignore[method-assign]
    calls._made.clear()
    wanted: list[tuple[int, ...]] = []
    kept = []

    def work() -> None:
        for _ in range(5):
            given = calls.plain()
            kept.append(given)
            wanted.append(tuple(address(given.get(name)) for name in ("x", "dy", "mean")))
            calls(**given)

    in_threads([work] * 2)
    assert sorted(seen) == sorted(wanted)


@of_any_norm
def test_scratch_is_retried_after_pytorch_gave_back_its_cache(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = [True]
    allocate = calls.driver.cuMemAllocAsync
    monkeypatch.setattr(torch.cuda, "empty_cache", full.clear)

    def allocate_if_free(size: int, stream: int) -> tuple[Any, ...]:
        if full:
            return cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        return allocate(size, stream)

    monkeypatch.setattr(calls.driver, "cuMemAllocAsync", allocate_if_free)
    assert calls().scratch


@always_quick
@pytest.mark.parametrize("place", [0, 1, 3])
def test_every_address_counts_for_the_quick_call(calls: Calls, place: int) -> None:
    """dy, x and the weight: kernels read them in vectors."""
    given = [*calls.plain().values()]
    call = next(iter(calls._made.values())) if calls() else None
    assert call is not None and call.quick is not None
    assert call.quick(*given) is not None
    launches = len(calls.driver.launches)
    memory = torch.zeros(given[place].numel() + 16, dtype=given[place].dtype)
    given[place] = memory[1 : 1 + given[place].numel()].view(given[place].shape)
    assert call.quick(*given) is None
    assert len(calls.driver.launches) == launches


# ---- What the driver gets ------------------------------------------------------------------------


def run(
    kernel: LoadedKernel,
    plan: Launch,
    inputs: Inputs,
    outputs: dict[str, torch.Tensor | None],
    stream: int = 7,
    workspace: int = 4096,
) -> None:
    place: Any = SimpleNamespace(data_ptr=lambda: workspace)
    current = SimpleNamespace(cuda_stream=stream)
    with patch.object(torch.cuda, "current_stream", lambda: current):
        run_rows(kernel, plan, inputs, outputs, place)


def launch(kernel: LoadedKernel, stream: int = 7, workspace: int = 4096) -> tuple[Any, ...]:
    dy, x, rstd, weight = tensors()
    x = torch.cat([x, x], 1)[:, :1024]  # row stride 2048
    dx, dw = torch.empty_like(dy), torch.empty_like(weight)
    plan = plan_launch(kernel.spec, len(x))
    run(kernel, plan, Inputs(x, dy, rstd, weight), {"dx": dx, "dw": dw}, stream, workspace)
    return (x, dy, rstd, weight, dx, dw), plan


def test_launch_hands_over_arguments_in_the_order_of_the_kernel(driver: FakeDriver) -> None:
    given, plan = launch(LoadedKernel(b"cubin", SPEC))
    (seen,) = driver.launches
    assert seen.arguments == (
        *(tensor.data_ptr() for tensor in given),
        0,
        0,
        4096,
        4096 + plan.zeroed_offset,
        4096 + plan.scratch_offset,
        6,
        2048,
        1024,
        1024,
        1024,
        0,
        0,
        0,
        1024,
        plan.group,
        0,
        0.0,
    )
    assert (seen.function, seen.grid, seen.block) == ("rmsnorm_backward", plan.grid, 256)
    assert (seen.smem, seen.stream) == (50_000, 7)
    assert seen.attributes == {}
    size = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert driver.attributes == [(size, 50_000)]


def test_second_kernel_follows_with_early_start(driver: FakeDriver) -> None:
    given, plan = launch(LoadedKernel(b"cubin", SEPARATE))
    main, second = driver.launches
    kinds = cuda.CUlaunchAttributeID
    cluster = main.attributes[kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION].clusterDim
    assert (cluster.x, cluster.y, cluster.z) == (2, 1, 1)
    assert (second.function, second.grid, second.block) == ("sum_partials", plan.sum_grid, 512)
    assert (second.smem, second.stream) == (0, 7)
    scratch = 4096 + plan.scratch_offset
    numbers = (plan.partials, 1024, 0, plan.group)
    assert second.arguments == (scratch, given[5].data_ptr(), *numbers)
    early = second.attributes[kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION]
    assert early.programmaticStreamSerializationAllowed == 1


def test_without_dw_the_second_kernel_is_not_launched(driver: FakeDriver) -> None:
    kernel = LoadedKernel(b"cubin", SEPARATE)
    dy, x, rstd, weight = tensors()
    plan = plan_launch(SEPARATE, len(x))
    run(kernel, plan, Inputs(x, dy, rstd, weight), {"dx": torch.empty_like(x), "dw": None})
    assert [seen.function for seen in driver.launches] == ["rmsnorm_backward"]


def test_what_is_not_wanted_has_no_address_and_no_copy(driver: FakeDriver) -> None:
    """dx in the residual's dtype is one of dx."""
    kernel = LoadedKernel(b"cubin", replace(SPEC, residual="fp32"))
    dy, x, rstd, weight = tensors()
    inputs = Inputs(x, dy, rstd, weight, dresidual=torch.zeros(6, 1024))
    dx, dw, third = torch.empty_like(x), torch.empty_like(weight), torch.empty(6, 1024)
    for outputs in (
        {"dx": dx, "dw": dw, "dresidual_out": third},
        {"dx": None, "dw": dw, "dresidual_out": third},
    ):
        run(kernel, plan_launch(kernel.spec, len(x)), inputs, outputs)
    both, without = (seen.arguments for seen in driver.launches)
    assert (both.dx, both.dresidual_out) == (dx.data_ptr(), third.data_ptr())
    assert (both.dw, both.dresidual) == (dw.data_ptr(), inputs.dresidual.data_ptr())
    assert without == both._replace(dx=0, dresidual_out=0)


def test_no_attribute_is_set_that_a_kernel_does_not_ask_for(driver: FakeDriver) -> None:
    plain = replace(SEPARATE, cluster=1, dependent=False, smem_bytes=0)
    launch(LoadedKernel(b"cubin", plain))
    assert [seen.attributes for seen in driver.launches] == [{}, {}]
    assert driver.attributes == []


def test_clusters_beyond_the_portable_size_opt_in(driver: FakeDriver) -> None:
    launch(LoadedKernel(b"cubin", replace(SPEC, cluster=16)))
    wide = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    assert (wide, 1) in driver.attributes


@pytest.mark.parametrize("room", [14, 15])
def test_clusters_without_room_are_told_once(driver: FakeDriver, room: int) -> None:
    driver.room = room
    said: list[str] = []
    kernel = LoadedKernel(b"cubin", replace(SPEC, cluster=8, sms=120), said.append)
    assert kernel.spec.participants == 15
    launch(kernel)
    launch(kernel)
    assert len(said) == (room < 15)
    assert all("15 clusters of 8 CTAs" in text and "room for 14" in text for text in said)
    assert len(driver.launches) == 2


@pytest.mark.parametrize("forward", [False, True])
def test_clusters_that_wait_for_no_other_need_no_room(driver: FakeDriver, forward: bool) -> None:
    """The hardware starts those of a kernel without sums over its rows when others have ended."""
    driver.room = 1
    said: list[str] = []
    of_forward = ForwardSpec("forward", 4096, True, "bf16", "bf16", 128, 0, 16, 1, 1, 8, 1, 132)
    spec = of_forward if forward else replace(SPEC, cluster=8, sms=UNBOUNDED)
    LoadedKernel(b"cubin", spec, said.append).load(0)
    assert said == []


def test_a_driver_that_does_not_know_the_room_is_no_fault(driver: FakeDriver) -> None:
    driver.room = None
    said: list[str] = []
    LoadedKernel(b"cubin", replace(SPEC, cluster=8), said.append).load(0)
    assert said == []


def test_cubin_is_loaded_once_and_each_thread_has_its_own_arguments(driver: FakeDriver) -> None:
    kernel = LoadedKernel(b"cubin", SPEC)
    barrier, copy, given = threading.Barrier(4), driver.cuLaunchKernelEx, []

    def launch_late(*arguments: Any) -> Any:
        barrier.wait()  # all have written theirs
        return copy(*arguments)

    driver.cuLaunchKernelEx = launch_late  # type: ignore[method-assign]

    def work() -> None:
        given.append(launch(kernel)[0])

    in_threads([work] * 4)
    assert driver.loads == 1
    wanted = {tuple(tensor.data_ptr() for tensor in tensors) for tensors in given}
    assert {seen.arguments[:6] for seen in driver.launches} == wanted
    assert len(wanted) == 4
    modes = cuda.CUstreamCaptureMode
    assert driver.capture_modes == [  # loading is allowed during a capture, then as before
        modes.CU_STREAM_CAPTURE_MODE_RELAXED,
        modes.CU_STREAM_CAPTURE_MODE_GLOBAL,
    ]


def test_configurations_are_built_once_per_grid_and_stream(driver: FakeDriver) -> None:
    kernel = LoadedKernel(b"cubin", SPEC)
    built = []

    def config() -> Any:
        built.append(cuda.CUlaunchConfig())
        return built[-1]

    driver.CUlaunchConfig = config
    for stream in (7, 8, 7, 8, 7):
        launch(kernel, stream)
    assert [seen.stream for seen in driver.launches] == [7, 8, 7, 8, 7]
    assert len(built) == 2


def test_refused_launch_names_the_error_and_the_kernel(driver: FakeDriver) -> None:
    kernel = LoadedKernel(b"cubin", SPEC)
    launch(kernel)
    driver.status = cuda.CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    with pytest.raises(LaunchError, match="launching rmsnorm_backward of example") as caught:
        launch(kernel)
    assert caught.value.code == "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"


def test_refused_second_launch_names_the_second_kernel(driver: FakeDriver) -> None:
    failed = cuda.CUresult.CUDA_ERROR_LAUNCH_FAILED
    statuses = iter([cuda.CUresult.CUDA_SUCCESS, failed])
    driver.cuLaunchKernelEx = lambda *_: (next(statuses),)  # type: ignore[method-assign]
    with pytest.raises(LaunchError, match=f"launching {SUM_KERNEL} of two_kernels"):
        launch(LoadedKernel(b"cubin", SEPARATE))


def test_refused_cubin_leaves_the_capture_mode_as_it_was(driver: FakeDriver) -> None:
    refused = (cuda.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU, None)
    driver.cuModuleLoadData = lambda image: refused  # type: ignore[method-assign]
    with pytest.raises(LaunchError, match="loading example"):
        LoadedKernel(b"cubin", SPEC).load(0)
    modes = cuda.CUstreamCaptureMode
    assert driver.capture_modes == [
        modes.CU_STREAM_CAPTURE_MODE_RELAXED,
        modes.CU_STREAM_CAPTURE_MODE_GLOBAL,
    ]


def test_a_graph_that_is_gone_leaves_its_semaphore_to_the_next(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_end, "_unused", [])
    ends = []
    for graph in (1, 2, 3):
        ends.append(graph_end.GraphEnd(graph))
        assert not ends[-1].reached()
        driver.end_graph(graph)
        assert ends[-1].reached()
    assert len({end._semaphore for end in ends}) == 1
