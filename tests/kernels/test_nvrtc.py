"""The compiler of kernels that is in use."""

from __future__ import annotations

import pytest
from cuda.bindings import nvrtc

from generator.errors import NormforgeError
from generator.kernels.nvrtc import nvrtc_version


def test_an_old_one_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PyTorch for CUDA 12 loads its own, and that is the one then."""
    answer = (nvrtc.nvrtcResult.NVRTC_SUCCESS, 12, 8)
    monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: answer)
    with pytest.raises(NormforgeError, match=r"NVRTC 12\.8 is in use, .* a PyTorch for CUDA 13"):
        nvrtc_version.__wrapped__()
