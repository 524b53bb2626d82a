"""The compiler of kernels that is in use."""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda.bindings import nvrtc

from generator.errors import CompilerFailedError, NormforgeError
from generator.kernels import cubin_cache
from generator.kernels.cubin_cache import compile_cached, entry_path
from generator.kernels.nvrtc import Compiled, blames_source, compile_source, nvrtc_version

SOURCE = 'extern "C" __global__ void rmsnorm_backward() {}'


def test_an_old_one_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PyTorch for CUDA 12 loads its own, and that is the one then."""
    answer = (nvrtc.nvrtcResult.NVRTC_SUCCESS, 12, 8)
    monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: answer)
    with pytest.raises(NormforgeError, match=r"NVRTC 12\.8 is in use, .* a PyTorch for CUDA 13"):
        nvrtc_version.__wrapped__()


def test_one_without_its_builtins_is_no_fault_of_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is cached, so that the kernel compiles when NVRTC is whole again."""
    answer = (nvrtc.nvrtcResult.NVRTC_ERROR_BUILTIN_OPERATION_FAILURE,)
    with monkeypatch.context() as broken:
        broken.setattr(nvrtc, "nvrtcCompileProgram", lambda *arguments: answer)
        with pytest.raises(NormforgeError, match="install nvidia-cuda-nvrtc again"):
            compile_cached(tmp_path, SOURCE, "sm_90a")
    assert not compile_cached(tmp_path, SOURCE, "sm_90a").error


NO_MEMORY = "ptxas fatal   : Memory allocation failure"


@pytest.mark.parametrize("status", ["OUT_OF_MEMORY", "INTERNAL_ERROR", "CANCELLED", "COMPILATION"])
def test_a_failure_that_is_not_in_the_source_is_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    """An error of the compilation says so where ptxas, and not NVRTC, has no memory."""

    def fail(program: object, *arguments: object) -> tuple[nvrtc.nvrtcResult]:
        return (getattr(nvrtc.nvrtcResult, f"NVRTC_ERROR_{status}"),)

    with monkeypatch.context() as broken:
        broken.setattr(nvrtc, "nvrtcCompileProgram", fail)
        broken.setattr("generator.kernels.nvrtc.read_buffer", lambda *_: NO_MEMORY.encode())
        with pytest.raises(CompilerFailedError, match=rf"{status}.*Memory allocation failure"):
            compile_cached(tmp_path, SOURCE, "sm_90a")
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    assert compile_cached(tmp_path, SOURCE, "sm_90a").cubin


@pytest.mark.parametrize(
    "error", [NO_MEMORY, "<nvrtcResult.NVRTC_ERROR_OUT_OF_MEMORY: 1>", "Internal error"]
)
def test_an_entry_from_when_memory_was_short_is_replaced(tmp_path: Path, error: str) -> None:
    """Versions before this rule kept them."""
    assert not blames_source(error)
    failed = Compiled("sm_90a", SOURCE, b"", {}, nvrtc_version(), False, error, error)
    cubin_cache._write(entry_path(tmp_path, SOURCE, "sm_90a"), failed)
    assert compile_cached(tmp_path, SOURCE, "sm_90a").cubin


@pytest.mark.parametrize(
    "body",
    [
        "undefined;",
        "__shared__ float a[100000]; a[threadIdx.x] = x[0]; __syncthreads(); x[1] = a[3];",
        'asm volatile("no.such;");',
    ],
)
def test_what_is_wrong_with_a_source_is_known_from_the_log(body: str) -> None:
    source = f'extern "C" __global__ void rmsnorm_backward(float* x) {{ {body} }}'
    assert "error" in compile_source(source, "sm_90a").error


def test_an_architecture_that_nvrtc_does_not_know_is_no_fault_of_a_kernel() -> None:
    with pytest.raises(NormforgeError, match="invalid value for --gpu-architecture"):
        compile_source(SOURCE, "sm_12")
