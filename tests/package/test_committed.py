"""The packages of generated/ are whole and have today's runtime."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

import pytest

from generator.package.files import RUNTIME, runtime_files, write_code
from generator.package.sources import config_of, included, revision, variant_of
from generator.paths import GENERATED
from generator.runtime.cubins import CUBINS
from generator.runtime.table import FORWARD_TABLE, TABLE, ForwardTable, Table, seal
from tests.support.packages import snapshot, unsealed

COMMITTED = GENERATED
COMMITTED_GPUS = ("gb200", "h200")


@pytest.mark.parametrize("gpu", COMMITTED_GPUS)
def test_committed_package_has_todays_runtime(gpu: str, tmp_path: Path) -> None:
    """It was emitted, or had its runtime copied, after the last change of the runtime."""
    package = COMMITTED / gpu / "rmsnorm_backward"
    found = {
        path.relative_to(package / "runtime"): path.read_bytes()
        for path in (package / "runtime").rglob("*.*")
        if path.suffix != ".pyc"
    }
    wanted = {name: (RUNTIME / name).read_bytes() for name in runtime_files()}
    advice = "run python -m generator.package.files, or emit the package again"
    assert found == wanted, advice
    for name in (TABLE, FORWARD_TABLE):
        text = (package / name).read_text()
        assert text == seal(unsealed(text)), advice
    init = (package / "__init__.py").read_bytes()
    write_code(tmp_path, Table.load(package))
    assert (tmp_path / "__init__.py").read_bytes() == init, advice


@pytest.mark.parametrize("gpu", COMMITTED_GPUS)
def test_committed_package_has_all_kernels_and_nothing_else(gpu: str) -> None:
    package = COMMITTED / gpu / "rmsnorm_backward"
    table, forward = Table.load(package), ForwardTable.load(package)
    assert forward is not None
    kernels = [*table.kernels(), *forward.kernels()]
    for kernel in kernels:
        assert kernel.read_cubin(package)[:4] == b"\x7fELF"
    with ZipFile(package / CUBINS) as container:
        assert container.testzip() is None
        assert set(container.namelist()) == {f"{kernel.file}.cubin" for kernel in kernels}
    winners = [entry.kernel.file for entry in [*table.tuned, *forward.tuned]]
    sources = {path.stem: path.read_text() for path in (package / "kernels").iterdir()}
    assert sources.keys() == set(winners)
    revisions = {path.name: path for path in (package / "include").iterdir()}
    assert {name for text in sources.values() for name in included(text)} == revisions.keys()
    for name, folder in revisions.items():
        assert revision({path.name: path.read_text() for path in folder.iterdir()}) == name


@pytest.mark.parametrize("gpu", COMMITTED_GPUS)
def test_committed_package_is_small_enough_to_be_read(gpu: str) -> None:
    package = COMMITTED / gpu / "rmsnorm_backward"
    found = snapshot(package)
    assert len(found) <= 250
    assert sum(map(len, found.values())) <= 15_000_000
    for path in (package / "kernels").iterdir():
        assert path.stat().st_size <= 16_000


@pytest.mark.parametrize("gpu", COMMITTED_GPUS)
def test_tables_hold_what_every_kernel_was_rendered_from(gpu: str) -> None:
    package = COMMITTED / gpu / "rmsnorm_backward"
    table, forward = Table.load(package), ForwardTable.load(package)
    assert forward is not None
    for kernel in [*table.kernels(), *forward.kernels()]:
        variant = variant_of(kernel)
        assert variant.id == kernel.spec.name
        assert variant.spec(table.target["sms"]) == kernel.spec
        assert config_of(variant) == kernel.config


@pytest.mark.parametrize(
    ("N", "dtypes"),
    [
        (80, ("bf16", "bf16")),
        (3328, ("fp16", "fp16")),
        (12000, ("bf16", "fp32")),
        (14336, ("bf16", "bf16")),
        (14336, ("fp16", "fp16")),
        (14336, ("fp32", "fp32")),
    ],
)
def test_committed_package_of_the_h200_serves_widths_that_nobody_tuned(
    N: int, dtypes: tuple[str, str]
) -> None:
    table = Table.load(COMMITTED / "h200" / "rmsnorm_backward")
    assert table.choose(4096, N, *dtypes).how == "fallback"
