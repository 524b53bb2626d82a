"""The packages of generated/ are whole, and hold data alone."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from generator.kernels.knobs import KNOBS
from generator.kernels.machine_code import illegal_copies
from generator.package.entries import problem_of
from generator.package.fallback_kernels import DTYPES
from generator.package.files import UNVERIFIED, unverified, write_stub
from generator.package.hub.export import export_package
from generator.package.sources import config_of, header_revision, variant_of
from generator.package.standalone import export_standalone
from generator.paths import GENERATED, LIBRARY, REPOSITORY, TEMPLATES
from generator.problem import Problem
from generator.space.forward_space import fallback_forwards, tile_forwards
from generator.space.legal_configs import LegalConfigs
from generator.space.load import load_space, space_file
from generator.studies.records import study_name, without_space
from generator.studies.storage import JOURNAL_NAME
from generator.target import find_target
from normforge.cubins import read_cubins
from normforge.table import FORWARD_TABLE, TABLE, ForwardTable, KernelOf, Table, seal
from tests.support.committed import committed_studies
from tests.support.packages import archived_cubins, snapshot, unsealed

PACKAGES = sorted(table.parent for table in GENERATED.glob(f"*/*/{TABLE}"))
CODE = (".py", ".cpp", ".h", ".cuh", ".j2")
each_package = pytest.mark.parametrize(
    "package", PACKAGES, ids=lambda package: "/".join(package.parts[-2:])
)


def kernels_of(package: Path) -> list[KernelOf[Any]]:
    """Return the kernels of the backward, and of the forward where the package has a table of
    it."""
    forward = ForwardTable.load(package)
    return [*Table.load(package).kernels(), *(forward.kernels() if forward else ())]


def test_every_committed_package_is_tested() -> None:
    names = ["/".join(package.parts[-2:]) for package in PACKAGES]
    norms = ("rmsnorm_backward", "rmsnorm_invariant_backward")
    more = ("layernorm_backward", "layernorm_forward", "rmsnorm_add_forward")
    more += ("rmsnorm_mxfp8_forward", "rmsnorm_rope_backward", "rmsnorm_rope_forward")
    more += ("gated_rmsnorm_backward", "gated_rmsnorm_forward", "rmsnorm_fp8_forward")
    alone = ("rmsnorm_sum2_backward", "rmsnorm_sum3_backward", "rope")
    alone += ("rmsnorm_fp8_backward", "rmsnorm_mxfp8_backward", "rmsnorm_fp8_residual_forward")
    operations = {"gb200": norms, "h100": (*norms, *more), "h200": (*norms, *more, *alone)}
    assert names == [f"{gpu}/{norm}" for gpu in operations for norm in sorted(operations[gpu])]


@each_package
def test_committed_package_has_todays_stub_and_sealed_tables(package: Path, tmp_path: Path) -> None:
    for name in (TABLE, FORWARD_TABLE):
        if (package / name).exists():
            text = (package / name).read_text()
            assert text == seal(unsealed(text))
    write_stub(tmp_path, Table.load(package))
    wanted = (tmp_path / "__init__.py").read_text()
    assert (package / "__init__.py").read_text() == wanted, "emit the package again"


def tracked() -> list[Path]:
    """Every file of the repository. Skips where Git does not know them."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True)
    if listing.returncode != 0:
        pytest.skip("this is no Git checkout, or git is missing")
    return [REPOSITORY / name for name in listing.stdout.decode().split("\0") if name]


def test_the_library_and_the_headers_stand_once() -> None:
    """Content decides, wherever a copy might lie and however it might be called."""
    ours = [path for folder in (LIBRARY, TEMPLATES) for path in folder.rglob("*.*")]
    places = {path.read_bytes().strip(): path for path in ours if path.suffix in CODE}
    copies = [
        f"{path.relative_to(REPOSITORY)} is {places[content].relative_to(REPOSITORY)}"
        for path in tracked()
        if path.exists() and (content := path.read_bytes().strip())
        if content in places and path != places[content]
    ]
    assert copies == []
    assert len(places) > 90


@each_package
def test_committed_package_has_all_kernels_and_nothing_else(package: Path) -> None:
    table, forward = Table.load(package), ForwardTable.load(package)
    kernels = kernels_of(package)
    for cubin in read_cubins(package, {one.file: one.digest for one in kernels}).values():
        assert cubin[:4] == b"\x7fELF" and illegal_copies(cubin) == 0
    assert archived_cubins(package).keys() == {kernel.file for kernel in kernels}
    winners = {entry.kernel.file for entry in table.tuned}
    tuned = {entry.kernel.file: entry.kernel for entry in (forward.tuned if forward else ())}
    sources = {path.stem: path.read_text() for path in (package / "kernels").iterdir()}
    assert winners <= sources.keys()
    others = [tuned[name].config["form"] for name in sources.keys() - winners]
    assert sorted(others) == sorted({kernel.config["form"] for kernel in tuned.values()})
    for text in sources.values():
        assert text.endswith(f"templates/*.cuh, revision {header_revision(text)}\n")


def own_sections(source: str) -> list[str]:
    """The sections of a source without those of headers, which stand in it where they are not as
    in generated/include: another form of the operation, or an earlier template."""
    headers = "".join(path.read_text() for path in (GENERATED / "include").iterdir())
    titles = set(re.findall("^// ---- .*$", headers, re.M))
    assert len(titles) > 5
    sections = re.split("^(?=// ---- )", source, flags=re.M)
    return [section for section in sections if section.partition("\n")[0] not in titles]


@each_package
def test_committed_package_is_small_enough_to_be_read(package: Path) -> None:
    found = snapshot(package)
    kernels = list((package / "kernels").iterdir())  # one source of each tuned backward kernel
    assert len(kernels) <= 250
    assert len(found) - len(kernels) <= 5
    assert sum(map(len, found.values())) <= 8_000_000
    for path in kernels:
        text = path.read_text()
        assert len(text) <= 35_000
        assert sum(map(len, own_sections(text))) <= 17_000


@each_package
def test_tables_hold_what_every_kernel_was_rendered_from(package: Path) -> None:
    table = Table.load(package)
    for kernel in kernels_of(package):
        variant = variant_of(kernel)
        assert variant.id == kernel.spec.name
        assert variant.spec(table.target["sms"]) == kernel.spec
        assert config_of(variant) == kernel.config


@pytest.mark.parametrize(
    ("N", "dtypes"),
    [
        (72, ("bf16", "bf16")),
        (3328, ("fp16", "fp16")),
        (12000, ("bf16", "fp32")),
        (14848, ("bf16", "bf16")),
        (14336, ("fp16", "fp16")),
        (14336, ("fp32", "fp32")),
    ],
)
def test_committed_package_of_the_h200_serves_widths_that_nobody_tuned(
    N: int, dtypes: tuple[str, str]
) -> None:
    table = Table.load(GENERATED / "h200" / "rmsnorm_backward")
    assert table.choose(4096, N, *dtypes).how == "fallback"


# ---- What nobody has measured --------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["rmsnorm_backward", "rmsnorm_invariant_backward"])
def test_committed_predictions_are_those_of_todays_model_and_of_the_committed_studies(
    operation: str,
) -> None:
    folder, target = GENERATED / "gb200", find_target("gb200")
    advice = "predict anew, as docs/prediction.md says under 'When the model changes'"
    assert (folder / f"{JOURNAL_NAME}.xz").stat().st_size < 1_000_000
    studies = {without_space(study.name): study for study in committed_studies("gb200")}
    for one in Table.load(folder / operation).tuned:
        assert one.evidence == "predicted"
        name = study_name(problem_of(one), target, "predicted")
        assert name in studies, advice
        winner = studies[name].winner
        assert winner is not None
        later = winner.config.keys() - one.kernel.config.keys()
        config = {**one.kernel.config, **{knob: KNOBS[knob].neutral for knob in later}}
        assert (winner.config, winner.cubin) == (config, one.kernel.digest), advice
        assert winner.result.us == one.provenance["us"], advice
        assert one.provenance["study"] == studies[name].name, advice


@pytest.mark.parametrize("gpu", ["gb200", "h200"])
def test_committed_package_has_todays_forwards_for_any_row(gpu: str) -> None:
    table = ForwardTable.load(GENERATED / gpu / "rmsnorm_backward")
    assert table is not None
    named = sorted(kernel.file for kernel in table.fallback)
    assert named == sorted(variant.id for variant in fallback_forwards(DTYPES))


# ---- Bits that do not depend on the batch --------------------------------------------------------

INVARIANT = GENERATED / "h200" / "rmsnorm_invariant_backward"


def test_batch_invariant_kernels_of_a_width_have_what_the_space_fixes() -> None:
    """The bits are then the same, whichever of them serves a number of rows."""
    table, forward = Table.load(INVARIANT), ForwardTable.load(INVARIANT)
    assert forward is not None
    space, of_forward = (
        load_space(space_file(f"rmsnorm_invariant_{way}")) for way in ("backward", "forward")
    )
    shapes = [(one.M, one.N, one.dtype, one.weight_dtype) for one in table.tuned]
    assert shapes == [(one.M, one.N, one.dtype, one.weight_dtype) for one in forward.tuned]
    assert len({(N, dtype) for _, N, dtype, _ in shapes}) < len(shapes) / 2
    for backward, before in zip(table.tuned, forward.tuned, strict=True):
        problem = Problem(backward.M, backward.N, backward.dtype, backward.weight_dtype)
        knobs, fields = space.fixed_for(problem), of_forward.fixed_for(problem)
        assert set(fields) == {"cluster", "threads_per_row", "vector_bytes"}
        assert set(knobs) == {*fields, "rows_per_cta", "run_rows", "group_rows"}
        assert backward.kernel.config.items() >= knobs.items(), backward.shape
        assert before.kernel.config.items() >= fields.items(), before.shape
        assert before.kernel.config["form"] == "registers"


@pytest.mark.parametrize("gpu", ["gb200", "h200"])
def test_committed_package_has_todays_forwards_with_the_arithmetic_of_vllms(gpu: str) -> None:
    """The H200 alone has them; nobody has read Triton's machine code for others."""
    table = ForwardTable.load(GENERATED / gpu / "rmsnorm_invariant_backward")
    assert table is not None
    named = [kernel.spec.name for kernel in table.fallback]
    assert named == [variant.id for variant in tile_forwards(find_target(gpu))]
    assert len(named) == {"gb200": 0, "h200": 12}[gpu]


def test_batch_invariant_kernels_were_checked_for_it() -> None:
    table = Table.load(INVARIANT)
    space = load_space(space_file("rmsnorm_invariant_backward"))
    assert table.fallback == ()
    for one in table.tuned:
        assert one.kernel.spec.determinism == "batch_invariant"
        assert one.provenance["verified"] == "verified"
        assert "batch invariance" in one.provenance["checks"]
        problem = Problem(one.M, one.N, one.dtype, one.weight_dtype)
        assert LegalConfigs(space, problem, find_target("h200")).today(one.kernel.config)


@pytest.mark.parametrize("gpu", ["gb200", "h200"])
def test_whatever_leaves_with_predicted_kernels_says_unverified(gpu: str, tmp_path: Path) -> None:
    """Nobody is told so where the GPU ran them."""
    package, doubt = GENERATED / gpu / "rmsnorm_backward", gpu == "gb200"
    table = Table.load(package)
    assert {tuned.evidence for tuned in table.tuned} == {"predicted" if doubt else "measured"}
    export_standalone(package, tmp_path / "alone")
    export_package(package, tmp_path / "hub")
    sources = [path.read_text() for path in (package / "kernels").glob("*.cu")]
    assert {text.startswith(UNVERIFIED) for text in sources} == {doubt}
    told = (
        package / "__init__.py",
        tmp_path / "alone" / "__init__.py",
        tmp_path / "alone" / "pyproject.toml",
        tmp_path / "hub" / "README.md",
    )
    for path in told:
        assert ("Unverified: its kernels were chosen by a model" in path.read_text()) == doubt, path
    card = (tmp_path / "hub" / "README.md").read_text()
    assert ("The same inputs give the same bits in every run" in card) != doubt
    some = replace(table, tuned=[*table.tuned[:2], replace(table.tuned[0], evidence="measured")])
    assert unverified(some) == (
        " Unverified: 2 kernels were chosen by a model and have not run on this GPU."
        if doubt
        else ""
    )
