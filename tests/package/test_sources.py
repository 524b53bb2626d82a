"""The sources of a package, emitted to be read, make its cubins."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from generator.kernels.code_digest import compiler_input
from generator.kernels.cubin_cache import compile_variant
from generator.kernels.forward import ForwardVariant
from generator.kernels.nvrtc import Compiled, compile_source
from generator.kernels.render import headers
from generator.kernels.variant import Variant
from generator.package import sources
from generator.package.emit import emit_package
from generator.package.entries import PROVENANCE_KEYS, Entry, Forwards
from generator.package.fallback_kernels import DTYPES, fallback_variants
from generator.package.include import rendered_headers
from generator.package.sources import (
    config_of,
    header_revision,
    source_of,
    variant_of,
)
from generator.paths import INCLUDE, header_folders
from generator.problem import Problem
from generator.space.forward_space import fallback_forwards, forward_variants
from normforge.table import ForwardTable, KernelOf, Table
from tests.support.packages import H200
from tests.support.samples import REDUCTION, sample_variant

SHAPE = Problem.parse("4096x4096:bf16")
VARIANTS: dict[str, Variant | ForwardVariant] = {
    **{
        name: sample_variant(SHAPE, H200, **knobs)
        for name, knobs in REDUCTION.items()
        if name not in ("atomic", "bulk_free")
    },
    "bulk rows": sample_variant(SHAPE, H200, pipeline="bulk", strategy="separate"),
    "cluster": sample_variant(SHAPE, H200, cluster=2, strategy="column_slices"),
    "residual": sample_variant("4096x1024:bf16+offset+residual_fp32", H200, strategy="last_cta"),
    "forward": forward_variants(SHAPE, H200)[0],
    "forward in clusters": next(
        v for v in forward_variants(Problem.parse("64x32768:bf16"), H200) if v.cluster > 1
    ),
    "forward twice": next(
        v for v in forward_variants(Problem.parse("64x32768:bf16"), H200) if v.form == "twice"
    ),
}
WITH_SOURCE = [name for name in VARIANTS if name != "forward"]
"""Variants with a source. A package has the source of one of the forwards of one form: here the one
in clusters."""


def made(variant: Variant | ForwardVariant) -> Compiled:
    return compile_variant(variant, H200.arch)


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of all of these."""
    folder = tmp_path_factory.mktemp("h200") / "rmsnorm_backward"
    facts = dict.fromkeys(PROVENANCE_KEYS, "known")
    entries, forwards = [], []
    for rows, variant in enumerate(VARIANTS.values(), 1):
        kind = (rows, variant.N, variant.dtype, variant.weight_dtype)
        if isinstance(variant, ForwardVariant):
            problem = Problem(*kind)
            entry = Entry(problem, variant, made(variant), "measured", facts)
            forwards.append(entry)
        else:
            problem = Problem(*kind, variant.offset, variant.residual)
            entries.append(Entry(problem, variant, made(variant), "measured", facts))
    emit_package(entries, [], H200, folder, Forwards(tuple(forwards), ()))
    return folder


def test_committed_headers_are_what_templates_render() -> None:
    """Run this after a change of the templates: python -m generator.package.include."""
    assert {path.name: path.read_text() for path in INCLUDE.iterdir()} == rendered_headers()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", WITH_SOURCE)
def test_source_alone_makes_the_same_cubin(emitted: Path, name: str) -> None:
    variant = VARIANTS[name]
    source = (emitted / "kernels" / f"{variant.id}.cu").read_text()
    assert len(source) < 16_000
    _, register_cap = compiler_input(variant)
    again = compile_source(source, H200.arch, register_cap, include=header_folders())
    assert again.error == ""
    assert again.cubin == made(variant).cubin


@pytest.mark.sampled(3)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, which is not in PATH")
@pytest.mark.parametrize("name", WITH_SOURCE)
def test_source_compiles_with_nvcc_wherever_it_is_called(
    emitted: Path, name: str, tmp_path: Path
) -> None:
    """nvcc makes machine code of its own: it is another compiler than NVRTC, of any version."""
    source = emitted / "kernels" / f"{VARIANTS[name].id}.cu"
    options = ["-cubin", f"-arch={H200.arch}", "-std=c++17", "-fmad=false", "-diag-suppress=177"]
    options += [f"-I{folder}" for folder in header_folders()]
    done = subprocess.run(
        ["nvcc", *options, "-o", str(tmp_path / "kernel.cubin"), str(source)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert (tmp_path / "kernel.cubin").read_bytes()[:4] == b"\x7fELF"


def test_source_names_its_headers_and_pastes_none() -> None:
    source = source_of(VARIANTS["mailbox"])
    for name in ("primitives.cuh", "elements.cuh", "partial_dw.cuh", "dw_mailbox.cuh"):
        assert f'\n#include "{name}"\n' in source
        assert headers()[name] not in source
    assert source.endswith(f"\n// Headers: templates/*.cuh, revision {header_revision(source)}\n")


def test_revision_is_of_the_code_of_the_headers_that_a_source_includes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, texts = source_of(VARIANTS["mailbox"]), headers()
    revision = header_revision(source)

    def changed(**others: str) -> str:
        changes = {f"{name}.cuh": texts[f"{name}.cuh"] + text for name, text in others.items()}
        monkeypatch.setattr(sources, "headers", lambda: texts | changes)
        return header_revision(source)

    assert changed(dw_mailbox="// Said in other words.\n") == revision
    assert changed(dw_last_cta="int other;\n") == revision  # it is not included
    assert changed(dw_mailbox="int other;\n") != revision
    assert header_revision(source.replace("dw_mailbox", "dw_last_cta")) != revision


@pytest.mark.parametrize("name", VARIANTS)
def test_table_names_what_a_kernel_was_rendered_from(emitted: Path, name: str) -> None:
    forward = ForwardTable.load(emitted)
    assert forward is not None
    stored = [*Table.load(emitted).kernels(), *forward.kernels()]
    (kernel,) = (kernel for kernel in stored if kernel.file == VARIANTS[name].id)
    assert variant_of(kernel) == VARIANTS[name]
    assert kernel.nvrtc == made(VARIANTS[name]).nvrtc


def test_fallback_kernels_come_back_from_their_configs() -> None:
    for variant in [*fallback_variants(H200), *fallback_forwards(DTYPES)]:
        kernel = KernelOf(variant.id, "", variant.spec(H200.sms), "", config_of(variant))
        assert variant_of(kernel) == variant


def test_config_of_other_templates_says_so() -> None:
    variant = VARIANTS["mailbox"]
    assert isinstance(variant, Variant)
    config = {knob: value for knob, value in config_of(variant).items() if knob != "stages"}
    kernel = KernelOf(variant.id, "", variant.spec(H200.sms), "", config)
    with pytest.raises(Exception, match="has no 'stages': it was made for other templates"):
        compiler_input(variant_of(kernel))
