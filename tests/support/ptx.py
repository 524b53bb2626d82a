"""The PTX that NVRTC makes of a source."""

from __future__ import annotations

from cuda.bindings import nvrtc

from generator.kernels.nvrtc import read_buffer


def ptx_of(source: str, arch: str) -> str:
    """The PTX of a translation unit for an architecture."""

    def checked(answer: tuple[object, ...]) -> object:
        assert answer[0] == nvrtc.nvrtcResult.NVRTC_SUCCESS, answer[0]
        return answer[1] if len(answer) > 1 else None

    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"primitives.cu", 0, [], []))
    options = [f"--gpu-architecture=compute_{arch}", "--std=c++17"]
    encoded = [option.encode() for option in options]
    failed = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)[0].value
    assert not failed, read_buffer(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
    return read_buffer(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).decode()
