"""The driver of exported packages, by ctypes, against cuda-python: both call one fake libcuda."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from generator.package.hub.export import export_package
from generator.paths import REPOSITORY
from tests.support.fake_driver import SEPARATE
from tests.support.packages import entry, put
from tests.support.patience import patience

BINDINGS = "generator/package/hub/bindings.py", "normforge/launch/cuda_api.py"
SPEC = replace(SEPARATE, cluster=16, sms=128, smem_bytes=50_000)
"""A kernel that asks the driver for everything: two kernels, the second with an early start;
clusters that have to be allowed, and no room for all of them; much shared memory."""
PROGRAM = """
import ctypes, importlib, json, sys
from dataclasses import asdict, replace

name, alone = sys.argv[1], sys.argv[3] == "alone"
if alone:
    import torch  # which imports the bindings itself where it has CUDA
    for module in [m for m in sys.modules if m.split(".")[0] == "cuda"]:
        del sys.modules[module]
    sys.modules["cuda"] = None

driver, kernels, binding, launch, workspace, specs = (
    importlib.import_module(f"{name}.runtime.{module}")
    for module in (
        *("launch.driver", "launch.loaded_kernel", "launch.binding", "launch.kernel_arguments"),
        *("launch.workspace", "spec"),
    )
)
workspace.is_capturing = lambda: False
spec = specs.KernelSpec(**json.loads(sys.argv[2]))
plan = specs.plan_launch(spec, 600)
N = spec.N
extent = launch.Extent(600, (N, N, N, N), (0, 0), 0, N, plan.group)
library = ctypes.CDLL("libcuda.so.1")
library.fake_log.restype = ctypes.c_char_p
spaces = workspace.Workspaces()
space = spaces.of_stream(0, 7)
warned = []


def run(stream=7):
    kernel = kernels.LoadedKernel(b"machine code", spec, warned.append)
    addresses = tuple(range(0x7F0000000000, 0x7F0000000080, 16))
    bound = binding.bind(kernel, plan, extent, 0, stream, 4096, 8192, wants_sums=True)
    bound.run(addresses)


def fit(words):
    space.fit(replace(plan, scratch=words))
    return space.zeros, space.scratch, space.scratch_words


def say(action, *arguments):
    try:
        print(action(*arguments))
    except driver.LaunchError as error:
        print(error.code, "|", error)


say(run)
say(run, 0)
say(run, (1 << 47) + 1)
say(fit, 100)
say(fit, 200)
say(spaces.of_capture, 0, 7, 1 << 13)
say(spaces.of_capture, 0, 7, 1 << 13)
for refused, status, times, action in (
    ("cuModuleLoadData", 209, 1, run),
    ("cuModuleGetFunction", 1, 1, run),
    ("cuFuncSetAttribute", 1, 1, run),
    ("cuOccupancyMaxActiveClusters", 1, 1, run),
    ("cuLaunchKernelEx", 701, 1, run),
    ("cuThreadExchangeStreamCaptureMode", 900, 1, run),
    ("cuMemFreeAsync", 1, 1, lambda: fit(1000)),
    ("cuMemAllocAsync", 2, 2, lambda: fit(2000)),
    ("cuMemAllocAsync", 2, 1, lambda: fit(3000)),
    ("cuMemAlloc", 2, 2, lambda: spaces.of_capture(0, 8, 1 << 20)),
    ("cuMemsetD8Async", 1, 1, lambda: spaces.of_capture(0, 8, 1 << 20)),
    ("cuStreamGetCaptureInfo", 1, 1, lambda: spaces.of_capture(0, 8, 1 << 13)),
    ("cuUserObjectCreate", 1, 1, lambda: workspace.end_of(5)),
    ("cuGraphRetainUserObject", 1, 1, lambda: workspace.end_of(5)),
):
    library.fake_refuse(refused.encode(), status, times)
    say(action)
functions = driver.cuda_driver()
wide = driver.configure(1, 2, 3, 4, [driver.cluster_attribute(ctas) for ctas in (5, 6)])
main = kernels.LoadedKernel(b"machine code", spec).load(0)[0]
say(lambda: functions.cuOccupancyMaxActiveClusters(main, wide)[1])
say(lambda: ctypes.c_uint.from_address(wide.getPtr() + 12).value)  # as native.py reads it
assert ("cuda" in sys.modules and not alone) or sys.modules["cuda"] is None
print(warned)
print(library.fake_log().decode())
"""


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a fake libcuda.so.1."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler to make a fake libcuda; none is here")
    folder = tmp_path_factory.mktemp("libcuda")
    source = REPOSITORY / "tests" / "support" / "fake_libcuda.c"
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-D_GNU_SOURCE", str(source)]
    subprocess.run([*command, "-o", str(folder / "libcuda.so.1")], check=True)
    return folder


def run(name: str, folder: Path, libcuda: Path, alone: bool) -> str:
    """Return what PROGRAM prints with the package `name`, which is in `folder`."""
    mode = "alone" if alone else "with cuda-python"
    done = subprocess.run(
        [sys.executable, "-B", "-c", PROGRAM, name, json.dumps(asdict(SPEC)), mode],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "LD_LIBRARY_PATH": str(libcuda)},
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_driver_is_asked_for_the_same_as_by_cuda_python(
    package: Path, tmp_path: Path, libcuda: Path
) -> None:
    """Calls, arguments, order and errors are the same."""
    put(package, entry("4096x1024:bf16"), standalone=True)
    export_package(package, tmp_path / "exported")
    wanted = run("rmsnorm_backward", package.parent, libcuda, alone=False)
    found = run("torch-cuda", tmp_path / "exported" / "build", libcuda, alone=True)
    assert found.splitlines() == wanted.splitlines()
    # The fake has to have seen it all: two programs may fail alike.
    for part in (
        "CUDA_ERROR_NO_BINARY_FOR_GPU | CUDA_ERROR_NO_BINARY_FOR_GPU while loading two_kernels",
        "CUDA_ERROR_OUT_OF_MEMORY while allocating 8000 bytes for the workspace",
        "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES while launching rmsnorm_backward of two_kernels",
        "cuModuleLoadData(machine , mode 2)",
        "cuFuncSetAttribute(0x7f00abcdef01, 8, 50000)",
        "cuFuncSetAttribute(0x7f00abcdef01, 14, 1)",
        "cuLaunchKernelEx(0x7f00abcdef01, 7f0000000000, (nil))",
        "stream 0x7 cluster 16 1 1",
        "stream 0x4 cluster 5 1 1 cluster 6 1 1",
        "stream 0x800000000001 attribute 6: 1",
        "cuMemsetD8Async(100000004b0, 0, 65536, 0x7f0099999990)",
        "and this GPU has room for 3 at once",
        "cuUserObjectCreate(1, 1, 1, 1)",
        "cuGraphRetainUserObject(0x7f0055555550, 0x7f0066666660, 1, 1)",
    ):
        assert part in found, part


def test_it_has_all_names_of_the_runtimes_bindings() -> None:
    """Read, not imported: one needs libcuda, the other cuda-python."""
    ours, cuda_pythons = (ast.parse((REPOSITORY / path).read_text()).body for path in BINDINGS)
    (imported,) = (node for node in cuda_pythons if isinstance(node, ast.ImportFrom))
    wanted = {alias.name for alias in imported.names}
    named = {node.name for node in ours if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    named |= {ast.unparse(node.targets[0]) for node in ours if isinstance(node, ast.Assign)}
    assert wanted and wanted <= named


@pytest.mark.parametrize(
    ("library", "says"),
    [
        ("libnowhere.so", "there is no CUDA driver (libnowhere.so: "),
        ("libc.so.6", "the CUDA driver has no cuGetErrorName ("),
    ],
)
def test_missing_driver_is_one_sentence(tmp_path: Path, library: str, says: str) -> None:
    text = (REPOSITORY / BINDINGS[0]).read_text()
    assert text.count('"libcuda.so.1"') == 1
    (tmp_path / "other_bindings.py").write_text(text.replace("libcuda.so.1", library))
    program = "try:\n import other_bindings\nexcept RuntimeError as error:\n print(error)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith(says), done.stdout + done.stderr
