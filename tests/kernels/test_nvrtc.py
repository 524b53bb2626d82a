"""The compiler of kernels that is in use."""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda.bindings import nvrtc

from generator.errors import NormforgeError
from generator.kernels.cubin_cache import compile_cached
from generator.kernels.nvrtc import nvrtc_version


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
    source = 'extern "C" __global__ void rmsnorm_backward() {}'
    answer = (nvrtc.nvrtcResult.NVRTC_ERROR_BUILTIN_OPERATION_FAILURE,)
    with monkeypatch.context() as broken:
        broken.setattr(nvrtc, "nvrtcCompileProgram", lambda *arguments: answer)
        with pytest.raises(NormforgeError, match="install nvidia-cuda-nvrtc again"):
            compile_cached(tmp_path, source, "sm_90a")
    assert not compile_cached(tmp_path, source, "sm_90a").error
