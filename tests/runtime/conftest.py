"""Fixtures of the tests of the runtime: stand-ins for the driver and the device."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from normforge.api import Package
from normforge.launch.loaded_kernel import LoadedKernel
from normforge.native import build
from normforge.serve.checks import check_arguments
from normforge.spec import KernelSpec
from normforge.table import TABLE, Table
from tests.support.entry_points import aten_on_cpu, write_package
from tests.support.fake_driver import (
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
from tests.support.native import Machine, started


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """One without kernels: the formula serves everything."""
    return write_package(tmp_path_factory.mktemp("package"))


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
    for item in items:
        if Path(__file__).parent in item.path.parents and {"module", "make"} & {
            *getattr(item, "fixturenames", ())
        }:
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
def make(machine: Machine, module: Any, tmp_path: Path) -> Callable[..., Package]:
    """Makes a package whose kernels run on the fake device, native path on."""
    numbers = itertools.count()

    def make(spec: KernelSpec = SPEC, on: bool = True) -> Package:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        # Tuned for one row: the nearest for any number of rows, whatever is chosen for few.
        table = Table(TARGET, (entry(1, spec),), (fallback(4096, 16), fallback(4096, 2)))
        (folder / TABLE).write_text(json.dumps(table.to_json()))
        package = Package(folder)
        loaded: dict[Any, LoadedKernel] = {}
        package._source(None).loaded.get = lambda kernel: loaded.setdefault(  # type: ignore[method-assign]
            kernel, LoadedKernel(b"cubin", kernel.spec)
        )
        formula = package._find

        def find(given: Any, options: Any) -> Any:
            check_arguments(given, options)
            if given.x.dtype == torch.bfloat16 and given.x.numel():
                return package._with_kernel(given, options, 0)
            return formula(given, options)

        package._find = find  # type: ignore[method-assign]
        package._calls._device = ""
        return started(package, module, machine.addresses, on_cpu=True) if on else package

    return make
