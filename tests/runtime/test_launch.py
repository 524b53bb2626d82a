"""The driver's arguments, and when it gets them."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cuda.bindings import driver as cuda

from generator.operations.rmsnorm_backward import Inputs
from generator.operations.rows import run_rows
from normforge.launch.driver import LaunchError
from normforge.launch.loaded_kernel import LoadedKernel
from normforge.spec import Launch, plan_launch
from tests.support.fake_driver import SEPARATE, SPEC, FakeDriver, tensors
from tests.support.native import in_threads


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
