"""Fixtures of the tests of the runtime: stand-ins for the driver and the device."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from normforge.api import Package
from normforge.frontends import layer_norm_operators
from normforge.frontends.layer_norm import LayerNormPackage
from normforge.frontends.quantized import QuantizedFunctions
from normforge.launch.loaded_kernel import LoadedKernel
from normforge.native import build
from normforge.operations import LAYERNORM_FORWARD
from normforge.operations.formula import evaluate
from normforge.serve.checks import check_arguments
from normforge.serve.options import DTYPES
from normforge.spec import KernelSpec
from normforge.table import TABLE, Kernel, Table
from tests.support.entry_points import aten_on_cpu, write_package
from tests.support.fake_driver import (
    LAYER_NORM,
    SPEC,
    TARGET,
    Calls,
    FakeDevice,
    FakeDriver,
    entry,
    fallback,
    stand_in,
    use_device,
)
from tests.support.native import OPERATIONS, Machine, started


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """One without kernels: the formula serves everything."""
    return write_package(tmp_path_factory.mktemp("package"))


@pytest.fixture
def rotated(package: Package) -> Package:
    """One whose graphs may have kernels of rotated heads."""
    package.ops.rotated = "normforge.rope_packages"
    return package


@pytest.fixture
def asked_to_quantize(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The rows that kernels that quantize are asked for, which there are, and of which
    operations."""
    found: list[tuple[Any, ...]] = []

    def have(_: Any, x: Any, weight: Any, operations: Any, **options: Any) -> bool:
        found.append((tuple(x.shape), *(one.name for one in operations), options))
        return True

    monkeypatch.setattr(QuantizedFunctions, "have_kernels", have)
    return found


@pytest.fixture
def quantized(package: Package, asked_to_quantize: list[tuple[Any, ...]]) -> Package:
    """One whose graphs may have kernels that quantize."""
    package.ops.quantized = "normforge.quantized_packages"
    return package


@pytest.fixture
def aten() -> Iterator[list[str]]:
    """PyTorch's operators on the CPU; the calls that reached them."""
    calls: list[str] = []
    with aten_on_cpu(calls):
        yield calls


@pytest.fixture
def fresh() -> Iterator[None]:
    """Dynamo has compiled nothing before, and keeps nothing."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's caches are empty and nobody else's."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    stand_in(monkeypatch, fake)
    return fake


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return FakeDevice(monkeypatch)


@pytest.fixture(params=["any", "quick", "any with mean", "quick with mean"])
def calls(request: pytest.FixtureRequest, driver: FakeDriver, device: FakeDevice) -> Calls:
    how: str = request.param
    return Calls(driver, device, quick=how.startswith("quick"), centred=how.endswith("mean"))


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` does not ask for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what needs the extension, because that is compiled first."""
    fixtures = {"module", "make"}
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if taken := fixtures & {*getattr(getattr(item, "callspec", None), "params", ())}:
            raise pytest.UsageError(f"{item.nodeid}: {taken} are fixtures of the extension")
        if fixtures & {*getattr(item, "fixturenames", ())}:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The extension, built once for all workers of a run."""
    try:
        build._compiler(), build._arguments()
    except RuntimeError as error:
        pytest.skip(str(error))
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    with pytest.MonkeyPatch.context() as patch, (shared / "native.lock").open("w") as lock:
        if "TORCH_EXTENSIONS_DIR" not in os.environ:
            patch.setenv("TORCH_EXTENSIONS_DIR", str(shared))
        fcntl.flock(lock, fcntl.LOCK_EX)
        return build.load(build.build())


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    stand_in(monkeypatch, made)
    use_device(monkeypatch, made, current_device=lambda: 0)
    return made


@pytest.fixture
def operation() -> str:
    """The operation of the packages of `make`."""
    return OPERATIONS[0]


def formula_of_forward(given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Compute what a kernel of LayerNorm's forward does."""
    found = evaluate(LAYERNORM_FORWARD, given)
    return {**found, "y": found["y"].to(given["x"].dtype)}


@pytest.fixture
def make(
    machine: Machine,
    module: Any,
    tmp_path: Path,
    operation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Any]:
    """Makes a package whose kernels of the backward run on the fake device, native path on."""
    numbers, centred = itertools.count(), operation == OPERATIONS[1]
    # The formula of the forward does not round what it saves.
    monkeypatch.setattr(layer_norm_operators, "_ON_CPU", tuple(DTYPES))

    def make(spec: KernelSpec = SPEC, on: bool = True) -> Any:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        kernels = [spec, *(fallback(4096, size).spec for size in (16, 2))]
        if centred:
            kernels = [replace(one, **LAYER_NORM) for one in kernels]  # type: ignore[arg-type]
        # Tuned for one row: the nearest for any number of rows, whatever is chosen for few.
        others = tuple(Kernel(f"any{one.vector_bytes}", "", one) for one in kernels[1:])
        table = Table(TARGET, (entry(1, kernels[0]),), others)
        (folder / TABLE).write_text(json.dumps(table.to_json()))
        package: Any = LayerNormPackage(folder) if centred else Package(folder)
        if centred:
            package._kernels.may_serve = lambda x: x.numel() > 0
            package._kernels.server.by_kernel = formula_of_forward
        loaded: dict[Any, LoadedKernel] = {}
        package._source(None).loaded.get = lambda kernel: loaded.setdefault(
            kernel, LoadedKernel(b"cubin", kernel.spec)
        )
        formula = package._find

        def find(given: Any, options: Any) -> Any:
            check_arguments(given, options)
            if given.x.dtype == torch.bfloat16 and given.x.numel():
                return package._with_kernel(given, options, 0)
            return formula(given, options)

        package._find = find
        package._calls._device = ""
        return started(package, module, machine.addresses, on_cpu=True) if on else package

    return make
