"""`import normforge`: which package it is, from a checkout and from a wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import warnings
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import normforge
from generator.kernels.render import headers
from generator.paths import REPOSITORY
from generator.target import load_targets
from normforge import packages as packages_module
from normforge.packages import Tuned, choose
from normforge.this_gpu import Gpu
from tests.support.fresh import run_fresh
from tests.support.packages import BEFORE
from tests.support.wheels import wheel_of

PACKAGES = {
    name: Tuned(Path(name), arch, f"NVIDIA {name.upper()}")
    for name, arch in (
        ("a100", "sm_80"),
        ("b200", "sm_100a"),
        ("gb200", "sm_100a"),
        ("h200", "sm_90a"),
    )
}


@pytest.mark.parametrize(
    ("gpu", "capability", "module"),
    [
        ("NVIDIA H200", (9, 0), "h200"),
        ("NVIDIA GB200", (10, 0), "gb200"),
        ("NVIDIA B200", (10, 0), "b200"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "a100"),
    ],
)
def test_package_of_the_gpu_is_taken(gpu: str, capability: Any, module: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(PACKAGES, Gpu(gpu, capability)) == module


def test_every_gpu_that_can_be_tuned_finds_its_own_package() -> None:
    targets = load_targets().values()
    packages = {t.name: Tuned(Path(t.name), t.arch, t.title) for t in targets}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for target in targets:
            digits = target.arch.removeprefix("sm_").removesuffix("a")
            for name in target.device_names:
                gpu = Gpu(name, (int(digits[:-1]), int(digits[-1])))
                assert choose(packages, gpu) == target.name


def test_kernels_that_run_there_are_taken_with_a_word() -> None:
    for gpu, capability, module in (
        ("NVIDIA H100 80GB HBM3", (9, 0), "h200"),
        ("NVIDIA L40S", (8, 9), "a100"),
    ):
        told = f"{gpu} runs the kernels that were tuned for NVIDIA"
        with pytest.warns(UserWarning, match=told) as warned:
            assert choose(PACKAGES, Gpu(gpu, capability)) == module
        assert warned[0].filename == __file__


def test_arch_of_another_kind_runs_nowhere() -> None:
    """It must not keep the other packages from being found."""
    odd = PACKAGES | {"odd": Tuned(Path("odd"), "sm_100f", "another")}
    assert choose(odd, Gpu("NVIDIA H200", (9, 0))) == "h200"


def test_gpu_without_kernels_gets_a_sentence() -> None:
    told = r"no kernels for NVIDIA T4 \(sm_75\), only for a100 \(sm_80\), .* python tune.py --gpu"
    with pytest.warns(UserWarning, match=told) as warned:
        assert choose(PACKAGES, Gpu("NVIDIA T4", (7, 5))) == "a100"
    assert warned[0].filename == __file__
    assert choose(PACKAGES, Gpu("NVIDIA T4", (7, 5)), "h200") == "h200"
    with pytest.raises(RuntimeError, match="NORMFORGE_GPU is h20, and the packages here are: a100"):
        choose(PACKAGES, None, "h20")
    assert choose(PACKAGES, Gpu("NVIDIA T4", (7, 5)), "b300, GB200 ,h200") == "gb200"
    with pytest.raises(RuntimeError, match="NORMFORGE_GPU is b300,t4, and the packages here are"):
        choose(PACKAGES, None, "b300,t4")
    with pytest.raises(RuntimeError, match="no tuned package"):
        choose({}, None)


def test_a_damaged_package_does_not_take_the_others_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "normforge").mkdir()
    for gpu, text in (
        ("h200", '{"target": {"name": "h200"'),
        ("h100", "{}"),
        ("gb200", '{"target": {"name": "gb200", "arch": "sm_100a", "title": "GB200"}}'),
    ):
        folder = tmp_path / "generated" / gpu / "rmsnorm_backward"
        folder.mkdir(parents=True)
        (folder / "table.json").write_text(text)
    monkeypatch.setattr(packages_module, "_HERE", tmp_path / "normforge")
    with pytest.warns(
        UserWarning, match=r"table\.json is damaged .*: its package is left out"
    ) as w:
        found = packages_module.tuned_packages("rmsnorm_backward")
    assert [*found] == ["gb200"]
    assert sorted(gpu for gpu in ("h200", "h100") for said in w if gpu in str(said.message)) == [
        "h100",
        "h200",
    ]


def test_machine_without_a_gpu_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(PACKAGES, None) == "a100"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert packages_module.find_gpu() is None


class FakeNvml:
    """Two GPUs; asking them initialises nothing of CUDA."""

    uuids = ("GPU-one", "GPU-two")

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return (0, 1)[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        return self.uuids.index(uuid)

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return ("NVIDIA H200", "NVIDIA T4")[handle]

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:  # noqa: N802
        return ((9, 0), (7, 5))[handle]


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, "NVIDIA H200"),
        ("1,0", "NVIDIA T4"),
        ("GPU-two", "NVIDIA T4"),
        ("", None),
        ("7", None),  # NVML knows no such device, and CUDA is asked, which has none here
    ],
)
def test_gpu_is_found_without_cuda(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, found: str | None
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpu = packages_module.find_gpu()
    assert (gpu and gpu.name) == found


@pytest.mark.parametrize(
    ("names", "visible", "found"),
    [
        (("NVIDIA H200", "NVIDIA T4"), "0", "the one that CUDA has first"),
        (("NVIDIA H200", "NVIDIA T4"), "GPU-two", "NVIDIA T4"),
        (("NVIDIA H200", "NVIDIA H200"), "1", "NVIDIA H200"),
    ],
)
def test_gpu_of_an_index_is_that_of_cuda(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, str], visible: str, found: str
) -> None:
    """CUDA has the fastest GPU first, and NVML the first one on the bus."""
    nvml: Any = FakeNvml()
    nvml.nvmlDeviceGetName = lambda handle: names[handle]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    of_cuda = SimpleNamespace(
        name="the one that CUDA has first", major=9, minor=0, multi_processor_count=132
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: of_cuda)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpu = packages_module.find_gpu()
    assert gpu is not None and gpu.name == found


USE = """
import sys
import normforge
assert not any(name.startswith("generated") for name in sys.modules)
from normforge import RMSNorm, explain, installed, rmsnorm_backward
import torch
assert RMSNorm.__module__ == "normforge.rmsnorm", RMSNorm.__module__
norm = RMSNorm(64)
norm(torch.randn(4, 64, requires_grad=True)).sum().backward()
assert norm.weight.grad is not None
assert explain(4096, 4096, "bf16")["how"] == "tuned"
import {module} as package
assert package.RMSNorm.__module__ == "{module}" and package.RMSNorm is not RMSNorm
kernel = next(k for e in package._package.table.tuned for k in [e.kernel])
assert kernel.read_cubin(package._package.folder)
assert package._package.name == "h200/rmsnorm_backward"
assert normforge.PROVENANCE == package.PROVENANCE
layernorm = normforge.layernorm  # without an import of its own
assert layernorm.LayerNorm.__module__ == "normforge.layernorm"
from {generated}h200 import layernorm_backward, rmsnorm_invariant_backward
assert sorted(layernorm.__all__) == sorted(layernorm_backward.__all__)
own = ["RMSNormGated", "apply_rope", "collect", "qk_norm_rope", "rms_norm_gated", "rms_norm_rope"]
own += ["rms_norm_quantized", "use_batch_invariant"]
assert sorted(normforge.__all__) == sorted([*package.__all__, *own])
batch_invariant = normforge.batch_invariant
assert batch_invariant.RMSNorm.__module__ == "normforge.batch_invariant"
assert sorted(batch_invariant.__all__) == sorted(dir(batch_invariant))
assert sorted(batch_invariant.__all__) == sorted(rmsnorm_invariant_backward.__all__)
assert batch_invariant.explain(4096, 4096, "bf16")["determinism"] == "batch_invariant"
normforge.use_batch_invariant()
assert normforge.RMSNorm is batch_invariant.RMSNorm
assert normforge.install == batch_invariant.install != package.install
normforge.use_batch_invariant(False)
assert normforge.RMSNorm is RMSNorm and normforge.install != batch_invariant.install
for of, wanted in ((RMSNorm, batch_invariant), (package.RMSNorm, rmsnorm_invariant_backward)):
    invariant = of(64, 1e-5, batch_invariant=True, weight_offset=1.0)
    assert type(invariant) is wanted.RMSNorm
    assert (invariant.eps, invariant.weight_offset) == (1e-5, 1.0) and not invariant.weight.any()
assert type(batch_invariant.RMSNorm(64, batch_invariant=True)) is batch_invariant.RMSNorm
class Own(RMSNorm):
    pass
assert type(Own(64)) is Own
try:
    Own(64, batch_invariant=True)
except TypeError as error:
    assert "derive it from the RMSNorm of normforge.batch_invariant" in str(error)
else:
    raise AssertionError
batch_invariant.rms_norm(torch.randn(4, 64, requires_grad=True), torch.ones(64)).sum().backward()
try:
    batch_invariant.nothing
except AttributeError as error:
    assert "normforge.batch_invariant" in str(error)
layernorm.layer_norm(torch.randn(4, 64, requires_grad=True), torch.ones(64)).sum().backward()
try:
    normforge.nothing
except AttributeError:
    print("done")
"""


def run(program: str, path: Path, folder: Path) -> None:
    """Run a program that ends by printing "done". path: where it imports from."""
    done = run_fresh(program, folder, [path], NORMFORGE_GPU="h200")
    assert done.stdout.strip() == "done", done.stderr[-3000:]


@pytest.mark.parametrize("generated", ["generated.", "normforge.generated."])
def test_checkout_serves_its_packages(tmp_path: Path, generated: str) -> None:
    """It does by the names that a wheel has also where another package is called `generated`."""
    if generated != "generated.":
        (tmp_path / "generated").mkdir()
        (tmp_path / "generated" / "__init__.py").touch()
    program = USE.format(generated=generated, module=f"{generated}h200.rmsnorm_backward")
    run(program, REPOSITORY, tmp_path)


def top_level(names: list[str]) -> set[str]:
    return {name.split("/")[0] for name in names if ".dist-info" not in name}


def test_wheel_carries_the_packages_and_the_headers(wheel_sources: Path, tmp_path: Path) -> None:
    name, names = wheel_of(wheel_sources, tmp_path / "site")
    assert name == f"normforge-{normforge.__version__}-py3-none-any.whl"
    assert top_level(names) == {"normforge"}
    packages = [table.parent for table in REPOSITORY.glob("generated/*/*/table.json")]
    assert len(packages) >= 4
    folders = {f"normforge/{folder.relative_to(REPOSITORY)}/": folder for folder in packages}
    for prefix, folder in folders.items():
        assert files_of(folder) == {
            name.removeprefix(prefix) for name in names if name.startswith(prefix)
        }
    included = tmp_path / "site" / "normforge" / "generated" / "include"
    assert {path.name: path.read_text() for path in included.iterdir()} == headers()
    library = {f"normforge/{name}" for name in files_of(REPOSITORY / "normforge")}
    library.remove("normforge/generated.py")
    rest = {name for name in names if ".dist-info" not in name and "/generated/" not in name}
    assert rest == library
    (installed,) = distributions(path=[str(tmp_path / "site")])
    assert installed.metadata.get_all("Provides-Extra") is None, "of what no wheel has"
    needs = {re.split(r"\W", need)[0] for need in installed.requires or ()}
    assert needs == {"torch", "cuda", "nvidia"}
    module = "normforge.generated.h200.rmsnorm_backward"
    run(USE.format(generated="normforge.generated.", module=module), tmp_path / "site", tmp_path)


def files_of(folder: Path) -> set[str]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)) for path in found if "__pycache__" not in path.parts}


def test_a_wheel_that_is_built_again_has_nothing_of_the_one_before(
    wheel_sources: Path, tmp_path: Path
) -> None:
    """A kernel that is gone, and a table that is older than the one it replaces."""
    for gpu in ("h100", "gb200"):
        shutil.rmtree(wheel_sources / "generated" / gpu)
    folder = wheel_sources / "generated" / "h200" / "layernorm_backward"
    gone = folder / "kernels" / "gone.cu"
    gone.write_text("")
    wheel_of(wheel_sources, tmp_path / "first")
    for wheel in wheel_sources.glob("*.whl"):
        wheel.unlink()
    gone.unlink()
    table = folder / "table.json"
    table.write_text(table.read_text() + " ")
    os.utime(table, (0, 400_000_000))
    _, names = wheel_of(wheel_sources, tmp_path / "second")
    assert not any(name.endswith("gone.cu") for name in names)
    found = tmp_path / "second" / "normforge" / table.relative_to(wheel_sources)
    assert found.read_text() == table.read_text()


def test_a_wheel_carries_packages_with_a_library_of_their_own(
    wheel_sources: Path, tmp_path: Path
) -> None:
    for gpu in ("h100", "h200", "gb200"):
        shutil.rmtree(wheel_sources / "generated" / gpu)
    folder = wheel_sources / "generated" / "x100"
    with tarfile.open(BEFORE) as archive:
        archive.extractall(folder, filter="data")
    package = (folder / "before_library").rename(folder / "rmsnorm_backward")
    wheel_of(wheel_sources, tmp_path / "site")
    site = tmp_path / "site" / "normforge" / "generated" / "x100" / "rmsnorm_backward"
    # A wheel has a license and metadata of its own.
    assert files_of(package) - files_of(site) == {"LICENSE", "pyproject.toml"}
    assert any(name.startswith("include/") for name in files_of(site))
    program = """
import torch
from normforge.generated.x100.rmsnorm_backward import RMSNorm, _package
RMSNorm(64)(torch.randn(4, 64, requires_grad=True)).sum().backward()
assert (_package.folder / "runtime" / "native" / "native.cpp").exists()
print("done")
"""
    run(program, tmp_path / "site", tmp_path)


def test_an_editable_install_works_outside_the_checkout(
    wheel_sources: Path, tmp_path: Path
) -> None:
    pytest.importorskip("pip")
    site = tmp_path / "site"
    command = "pip install --no-build-isolation --no-index --no-deps --no-cache-dir -q"
    done = subprocess.run(
        [sys.executable, "-m", *command.split(), "--target", str(site), "-e", str(wheel_sources)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    program = (
        f"import site; site.addsitedir({str(site)!r})"
        + """
import torch, normforge
normforge.RMSNorm(64)(torch.randn(4, 64, requires_grad=True)).sum().backward()
assert normforge.explain(4096, 4096, "bf16")["how"] == "tuned"
from normforge.generated.h200.rmsnorm_backward import rms_norm
for name in ("generated", "generator", "templates", "tests"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise AssertionError(name)
print("done")
"""
    )
    run(program, site, tmp_path)
