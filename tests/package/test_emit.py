"""The emitted package: what is written, what is kept, and that it works when it is imported."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from generator.errors import NormforgeError
from generator.kernels.cubin_cache import compile_variant
from generator.kernels.nvrtc import Compiled
from generator.kernels.ptxas import Resources
from generator.kernels.variant import Variant, make_variant
from generator.package import atomic_folder
from generator.package.atomic_folder import check_writable
from generator.package.emit import emit_package
from generator.package.entries import PROVENANCE_KEYS, Emission, Entry
from generator.package.fallback_kernels import (
    DTYPES,
    compile_generics,
    first_choices,
    generic_variants,
)
from generator.package.files import RUNTIME, refresh, runtime_files, write_code
from generator.paths import GENERATED
from generator.problem import ITEMSIZE, Problem
from generator.runtime.api import Package
from generator.runtime.serve.options import PLAIN, Arguments
from generator.runtime.serve.reference import reference_backward
from generator.runtime.spec import MAIN_KERNEL
from generator.runtime.table import Kernel, Table
from generator.space.load import load_space
from generator.target import Target, find_target, load_targets, match_device
from tests.support.samples import compiled_generics

SPACE = load_space()
H200 = find_target("h200")


def variant_for(problem: Problem, target: Target = H200, **knobs: Any) -> Variant:
    """A legal variant with plain loads; `knobs` are those of the space."""
    row = {"threads_per_row": problem.N // 8, "rows_per_cta": 1024 // problem.N * 2}
    config = SPACE.normalize({"pipeline": "direct"} | row | knobs, problem, target)
    assert SPACE.reject(config, problem, target) is None, SPACE.reject(config, problem, target)
    return make_variant(config, problem)


def compiled(variant: Variant, text: str = "cubin", arch: str = H200.arch) -> Compiled:
    """Stands for a compiled variant where nothing gets launched."""
    return Compiled(arch, f"// {variant}\n", f"{text} {variant}".encode(), {}, "13", False, "")


def entry(shape: str, evidence: str = "measured", text: str = "cubin", **knobs: Any) -> Entry:
    problem = Problem.parse(shape)
    variant = variant_for(problem, **knobs)
    provenance = dict.fromkeys(PROVENANCE_KEYS, "known") | {"us": 12.5, "tie": ["another"]}
    return Entry(problem, variant, compiled(variant, text), evidence, provenance)


GENERICS = [(variant, compiled(variant)) for variant in first_choices(generic_variants(H200))]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return tmp_path / "h200" / "rmsnorm_backward"


def put(package: Path, *entries: Entry, generics: Any = GENERICS) -> Emission:
    return emit_package(entries, generics, H200, package)


@pytest.fixture
def imported(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports the package as somebody would who copied it into a project."""
    monkeypatch.syspath_prepend(package.parent)

    def load() -> ModuleType:
        forget()
        return importlib.import_module("rmsnorm_backward")

    def forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "rmsnorm_backward"]:
            del sys.modules[name]
        importlib.invalidate_caches()

    yield load
    forget()


def snapshot(package: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(package)): path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


# ---- What is written -----------------------------------------------------------------------------


def test_package_holds_source_and_cubin_of_every_winner_and_the_runtime(package: Path) -> None:
    winner = entry("4096x1024:bf16")
    result = put(package, winner)
    files = snapshot(package)
    assert result.written == (winner.problem,)
    assert files[f"kernels/{winner.variant}.cubin"] == winner.compiled.cubin
    assert files[f"kernels/{winner.variant}.cu"] == winner.compiled.source.encode()
    for name in runtime_files():
        assert files[f"runtime/{name}"] == (RUNTIME / name).read_bytes()
    assert sum(name.endswith(".cubin") for name in files) == 1 + len(GENERICS)
    assert [path.name for path in package.parent.iterdir()] == ["rmsnorm_backward"]


def test_refreshed_package_has_todays_code_and_its_own_kernels(package: Path) -> None:
    put(package, entry("4096x1024:bf16"))
    before = snapshot(package)
    (package / "__init__.py").write_text("old")
    (package / "runtime" / "native" / "native.cpp").unlink()
    (package / "runtime" / "api.py").write_text("old")
    (package / "runtime" / "gone.py").write_text("of an older runtime")
    refresh(package)
    assert snapshot(package) == before
    assert Path("native/native.cpp") in runtime_files()


def test_equal_winners_make_equal_packages(package: Path, tmp_path: Path) -> None:
    winners = [entry("4096x1024:bf16"), entry("8192x1024:bf16"), entry("4096x512:bf16")]
    put(package, *winners)
    put(tmp_path / "again", *reversed(winners))
    assert snapshot(package) == snapshot(tmp_path / "again")


def test_shapes_that_share_a_variant_share_its_files(package: Path) -> None:
    put(package, entry("4096x1024:bf16"), entry("8192x1024:bf16"), generics=[])
    assert len(list((package / "kernels").iterdir())) == 2


def test_shapes_that_are_not_tuned_again_are_kept(package: Path) -> None:
    put(package, entry("4096x1024:bf16"), entry("8192x1024:bf16"))
    again = entry("4096x1024:bf16", rows_per_cta=4)
    result = put(package, again, entry("4096x512:bf16"))
    table = Table.load(package)
    assert [t.shape for t in table.tuned] == [
        *("4096x512:bf16", "4096x1024:bf16", "8192x1024:bf16")
    ]
    assert table.tuned[1].kernel.file == again.variant.id
    assert result.kept == (Problem.parse("8192x1024:bf16"),)
    for kernel in table.kernels():
        assert kernel.read_cubin(package)


def test_kept_winner_keeps_its_own_code_when_the_templates_changed(package: Path) -> None:
    old, new = entry("4096x1024:bf16", text="old"), entry("8192x1024:bf16", text="new")
    put(package, old)
    put(package, new)
    small, large = Table.load(package).tuned
    assert small.kernel.read_cubin(package) == old.compiled.cubin
    assert large.kernel.read_cubin(package) == new.compiled.cubin


@pytest.mark.parametrize(
    ("before", "after", "stays"),
    [
        ("measured", "predicted", True),
        ("measured", "measured", False),
        ("predicted", "measured", False),
        ("predicted", "predicted", False),
    ],
)
def test_predicted_winner_never_replaces_a_measured_one(
    package: Path, before: str, after: str, stays: bool
) -> None:
    old = entry("4096x1024:bf16", before)
    new = entry("4096x1024:bf16", after, rows_per_cta=4)
    put(package, old)
    result = put(package, new)
    (tuned,) = Table.load(package).tuned
    assert tuned.kernel.file == (old if stays else new).variant.id
    assert tuned.evidence == (before if stays else after)
    assert result.refused == ((new.problem,) if stays else ())
    assert result.kept == ()


def test_two_runs_that_extend_one_package_lose_nothing(package: Path) -> None:
    shapes = [f"{M}x1024:bf16" for M in (1024, 2048, 4096, 8192, 16384, 32768)]
    threads = [
        threading.Thread(target=put, args=(package, entry(shape)), kwargs={"generics": []})
        for shape in shapes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [tuned.shape for tuned in Table.load(package).tuned] == shapes


# ---- What is refused -----------------------------------------------------------------------------


def test_entries_that_must_not_be_emitted(package: Path) -> None:
    good = entry("4096x1024:bf16")
    loose = entry("4096x1024:bf16", strategy="atomic")
    bare = Entry(good.problem, good.variant, good.compiled, "measured", {"us": 1.0})
    other = Entry(
        *(good.problem, good.variant, compiled(good.variant, arch="sm_100a")),
        *("measured", good.provenance),
    )
    broken = Compiled(H200.arch, "", b"", {}, "13", False, "", "error: expected a ;")
    failed = Entry(good.problem, good.variant, broken, "measured", good.provenance)
    proposed = Entry(good.problem, good.variant, good.compiled, "proposed", good.provenance)
    for bad, sentence in (
        (loose, "not deterministic"),
        (bare, "does not state its"),
        (other, "is for sm_100a and h200 is sm_90a"),
        (failed, "error: expected a ;"),
        (proposed, "evidence 'proposed by the surrogate'"),
    ):
        with pytest.raises(NormforgeError, match=sentence):
            put(package, good, bad)
    assert not package.exists()


def test_package_of_another_gpu_is_left_alone(package: Path) -> None:
    put(package, entry("4096x1024:bf16"))
    before = snapshot(package)
    with pytest.raises(NormforgeError, match="is for h200 and this run for h100"):
        emit_package([], [], find_target("h100"), package)
    assert snapshot(package) == before


@pytest.mark.parametrize("name", ["table.json", "kernels"])
def test_damaged_package_is_left_alone(package: Path, name: str) -> None:
    winner = entry("4096x1024:bf16")
    put(package, winner, generics=[])
    damaged = package / "table.json"
    if name == "kernels":
        damaged = package / "kernels" / f"{winner.variant}.cubin"
    damaged.write_text("{")
    before = snapshot(package)
    with pytest.raises(NormforgeError, match="to start a new one"):
        put(package, entry("8192x1024:bf16"))
    assert snapshot(package) == before


def test_folder_that_is_not_a_package_is_left_alone(package: Path) -> None:
    package.mkdir(parents=True)
    (package / "thesis.txt").write_text("years of work")
    with pytest.raises(NormforgeError, match="holds no readable package"):
        put(package, entry("4096x1024:bf16"))
    assert (package / "thesis.txt").exists()


def test_unwritable_folders_are_named_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "rmsnorm_backward"):
        with pytest.raises(NormforgeError, match=f"cannot write {bad}"):
            check_writable(bad)
    if os.geteuid() != 0:
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(NormforgeError, match="Permission denied"):
            check_writable(tmp_path / "locked" / "rmsnorm_backward")
    check_writable(tmp_path / "new" / "rmsnorm_backward")


# ---- The swap ------------------------------------------------------------------------------------


def no_exchange(one: Path, other: Path) -> None:
    raise OSError("not on this file system")


@pytest.mark.parametrize("exchange", [True, False])
def test_failure_at_any_step_leaves_the_old_package(
    package: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    put(package, entry("4096x1024:bf16"))
    before = snapshot(package)
    if not exchange:
        monkeypatch.setattr(atomic_folder, "_exchange", no_exchange)
    step = 0
    steps = (
        *((Path, name, getattr(Path, name)) for name in ("write_bytes", "write_text", "rename")),
        (shutil, "copyfile", shutil.copyfile),
    )

    def counted(original: Any) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal step
            step += 1
            if step == fail_at:
                raise OSError(28, "No space left on device")
            return original(*arguments)

        return call

    for fail_at in range(1, 80):
        with monkeypatch.context() as patch:
            step = 0
            for owner, name, original in steps:
                patch.setattr(owner, name, counted(original))
            try:
                put(package, entry("8192x1024:bf16"), generics=[])
                if step < fail_at:
                    break  # nothing was left to fail
            except NormforgeError as error:
                assert "what was there is unchanged" in str(error)
                assert snapshot(package) == before
    else:
        pytest.fail("the loop ends when every step has failed once")
    assert fail_at > 10
    assert len(Table.load(package).tuned) == 2
    assert [path.name for path in package.parent.iterdir()] == ["rmsnorm_backward"]


def test_run_killed_between_two_renames_is_healed_by_the_next(package: Path) -> None:
    put(package, entry("4096x1024:bf16"))
    package.rename(package.parent / ".rmsnorm_backward.old")
    put(package, entry("8192x1024:bf16"))
    assert len(Table.load(package).tuned) == 2
    assert [path.name for path in package.parent.iterdir()] == ["rmsnorm_backward"]


def test_leftovers_of_a_killed_run_do_not_get_into_the_package(package: Path) -> None:
    leftover = package.parent / ".rmsnorm_backward.part" / "kernels"
    leftover.mkdir(parents=True)
    (leftover / "half.cubin").write_bytes(b"half")
    put(package, entry("4096x1024:bf16"))
    assert not any("half" in name for name in snapshot(package))
    assert [path.name for path in package.parent.iterdir()] == ["rmsnorm_backward"]


# ---- The import ----------------------------------------------------------------------------------


def test_import_compiles_nothing_and_leaves_cuda_alone(package: Path) -> None:
    put(package, entry("4096x1024:bf16"))
    program = (
        "import sys, torch\n"
        # Newer PyTorch imports the bindings itself; what is gone would be imported again.
        "for m in [m for m in sys.modules if m.split('.')[0] == 'cuda']: del sys.modules[m]\n"
        "import rmsnorm_backward as r\n"
        "x = torch.ones(4, 8); r.rmsnorm_backward(x, x, torch.ones(4), torch.ones(8))\n"
        "r.explain(4096, 1024, 'bf16')\n"
        "assert not torch.cuda.is_initialized()\n"
        "loaded = [m for m in sys.modules if m.split('.')[0] in ('cuda', 'generator', 'optuna')]\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run(
        [sys.executable, "-B", "-c", program],
        cwd=package.parent,
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        check=True,
        timeout=60,
    )


def test_explain_tells_which_kernel_and_what_is_known(package: Path, imported: Any) -> None:
    winner = entry("4096x1024:bf16", "predicted")
    put(package, winner)
    module = imported()
    facts = module.explain(4096, 1024, "bf16")
    assert facts["how"] == "tuned"
    assert facts["kernel"] == winner.variant.id
    assert Path(facts["source"]).read_text() == winner.compiled.source
    assert (facts["evidence"], facts["determinism"]) == ("predicted", "gpu_to_gpu")
    assert facts["provenance"] == winner.provenance
    assert facts["launch"]["grid"] == 132
    near = module.explain(5000, 1024, torch.bfloat16)
    assert (near["how"], near["tuned_shape"]) == ("nearest", "4096x1024:bf16")
    other = module.explain(4096, 1000, "bf16", "fp32")
    assert (other["how"], other["strategy"]) == ("generic", "separate")
    assert "kernel" not in module.explain(4096, 1 << 20, "bf16")
    json.dumps([facts, near, other])  # plain values
    asked = module.explain(4096, 1024, "bf16", offset=True, residual="fp32")
    assert asked["how"] == "none" and "4096x1024:bf16+offset+residual_fp32" in asked["reason"]
    with pytest.raises(ValueError, match="M and N must be at least 1"):
        module.explain(0, 1024, "bf16")
    with pytest.raises(ValueError, match="dtype must be one of bf16, fp16, fp32, got int8"):
        module.explain(1, 1024, "int8")


def test_provenance_lists_every_tuned_shape(package: Path, imported: Any) -> None:
    put(package, entry("4096x1024:bf16"), entry("4096x512:bf16:fp32", "predicted"))
    provenance = imported().PROVENANCE
    assert provenance["target"]["arch"] == "sm_90a"
    assert set(provenance["shapes"]) == {"4096x1024:bf16", "4096x512:bf16:fp32"}
    facts = provenance["shapes"]["4096x512:bf16:fp32"]
    assert PROVENANCE_KEYS | {"kernel", "determinism", "evidence"} <= facts.keys()


def test_cpu_tensors_of_any_layout_are_served(package: Path, imported: Any) -> None:
    put(package, entry("4096x1024:bf16"))
    backward = imported().rmsnorm_backward
    torch.manual_seed(0)
    x, dy = torch.randn(3, 5, 8), torch.randn(3, 5, 8)
    rstd, weight = torch.rand(3, 5, 1), torch.rand(8)
    dx, dw = backward(dy, x, rstd, weight)
    for layout in (
        (dy.transpose(0, 1).contiguous().transpose(0, 1), x),
        (dy, x.permute(2, 0, 1).contiguous().permute(1, 2, 0)),
    ):
        again = backward(*layout, rstd.flatten(), weight)
        assert torch.equal(again[0], dx) and again[0].is_contiguous()
        torch.testing.assert_close(again[1], dw)
    ones = torch.ones(()).expand(3, 5, 8)
    torch.testing.assert_close(
        backward(ones, x, rstd, weight), backward(ones.contiguous(), x, rstd, weight)
    )
    one_row = backward(dy[0, 0], x[0, 0], rstd[0, 0], weight)
    torch.testing.assert_close(one_row[0], dx[0, 0])
    no_rows = backward(dy[:0], x[:0], rstd[:0], weight)
    assert no_rows[0].shape == (0, 5, 8) and not no_rows[1].any()
    leaf = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="no gradient of its own"):
        backward(dy, leaf, rstd, weight)[0].sum().backward()


def test_arguments_are_checked_at_every_call(package: Path, imported: Any) -> None:
    put(package, entry("4096x1024:bf16"))
    backward = imported().rmsnorm_backward
    x, rstd, weight = torch.ones(4, 8), torch.ones(4), torch.ones(8)
    backward(x, x, rstd, weight)
    with pytest.raises(TypeError, match=r"dy must be a torch\.Tensor, got list"):
        backward([1.0], x, rstd, weight)
    with pytest.raises(ValueError, match="each of the 4 rows of x, got 3"):
        backward(x, x, rstd[:3], weight)
    with pytest.raises(ValueError, match="weight must have shape"):
        backward(x, x, rstd, weight[:7])
    with pytest.raises(ValueError, match="dy must have x's shape"):
        backward(x.t(), x, rstd, weight)
    dx, dw = backward(*(tensor.to("meta") for tensor in (x, x, rstd, weight)))
    assert (dx.shape, dw.shape, dx.is_meta) == ((4, 8), (8,), True)


def test_what_has_no_kernel_is_one_warning(package: Path) -> None:
    put(package, entry("4096x1024:bf16"))
    module = Package(package)
    rows, wide = torch.ones(2, 8).bfloat16(), torch.ones(8)
    mixed = Arguments(rows, rows, wide[:2], wide)
    with pytest.warns(UserWarning, match="the formula in plain PyTorch"):
        module._fallback("no kernel is that wide", mixed, PLAIN)
    if hasattr(torch.ops.aten, "_fused_rms_norm_backward"):
        given = Arguments(rows, rows, wide[:2], wide.bfloat16())
        with pytest.warns(UserWarning, match="PyTorch's own kernel") as seen:
            module._fallback("no kernel is that wide", given, PLAIN)
            module._fallback("no kernel is that wide", given, PLAIN)
            module._fallback("another reason", given, PLAIN)
        assert len(seen) == 2


# ---- Generic variants ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(load_targets()))
def test_generic_variants_cover_all_dtypes_on_every_gpu(name: str) -> None:
    variants = generic_variants(find_target(name))
    assert len({variant.id for variant in variants}) == len(variants)
    for dtype, weight_dtype in DTYPES:
        same = [v for v in variants if (v.dtype, v.weight_dtype) == (dtype, weight_dtype)]
        for size in ({v["vector_bytes"] for v in same}, {v.N for v in same}):
            assert len(size) >= 2
        assert max(v.N for v in same) >= 8192
        assert all(v.determinism == "gpu_to_gpu" and not v.exact for v in same)


def generic_table(variants: list[Variant], target: Target) -> Table:
    """A package of generic kernels alone: of those that take the same rows, the first."""
    kernels = (Kernel(v.id, "", v.spec(target.sms)) for v in first_choices(variants))
    return Table({}, (), tuple(kernels))


def served(table: Table, N: int, pair: tuple[str, str], **alignment: int) -> tuple[int, int]:
    """Bytes of a vector and columns of the kernel that serves a call; (0, 0) for none."""
    kernel = table.choose(4096, N, *pair, **alignment).kernel
    return (kernel.spec.vector_bytes, kernel.spec.N) if kernel else (0, 0)


def widest(table: Table, N: int, pair: tuple[str, str], alignment: int = 16) -> int:
    """Bytes of the widest vector of the package that divides rows and addresses."""
    sizes = {kernel.spec.vector_bytes for kernel in table.generic}
    units = (N * ITEMSIZE[pair[0]], alignment)
    return max(size for size in sizes if all(unit % size == 0 for unit in units))


@pytest.mark.parametrize("name", sorted(load_targets()))
def test_rows_are_read_in_the_widest_vectors_that_divide_them(name: str) -> None:
    """Up to 8192 columns on every GPU; whole words in words up to 16384 where there is room."""
    target = find_target(name)
    for pair in DTYPES:
        table = generic_table(generic_variants(target, [pair]), target)
        for N in range(1, 8193):
            vector, columns = served(table, N, pair)
            assert columns >= N
            assert vector == widest(table, N, pair), N
            assert vector >= 4 or N % 2, N
        if target.smem_per_cta >= 200 << 10 and pair[0] != "fp32":
            assert all(served(table, N, pair)[0] >= 4 for N in range(8194, 16385, 2))


@pytest.mark.parametrize("name", sorted(load_targets()))
def test_rows_of_narrow_vectors_have_a_kernel_for_about_their_length(name: str) -> None:
    """One for rows several times as long keeps most of its threads idle."""
    target = find_target(name)
    for pair in DTYPES:
        table = generic_table(generic_variants(target, [pair]), target)
        for N in (129, 257, 513, 1025, 2049, 3073, 4097):
            for columns in (N, N + 1):
                assert served(table, columns, pair)[1] <= 3 * N, (pair, columns)


@pytest.mark.parametrize("pair", DTYPES)
def test_addresses_that_rule_out_a_vector_leave_it_to_a_narrower_one(pair: tuple[str, str]) -> None:
    table = generic_table(generic_variants(H200, [pair]), H200)
    narrowest = ITEMSIZE[pair[0]]
    for alignment in (32, 16, 8, 4, 2):
        for N in (1024, 1026, 1023):
            if alignment >= narrowest:
                vector, _ = served(table, N, pair, alignment=alignment)
                assert vector == widest(table, N, pair, alignment)
    # Beside 4 bytes of x lie as many weights, which may be wider.
    weights = 4 // narrowest * ITEMSIZE[pair[1]]
    assert served(table, 1026, pair, alignment=4, weight_alignment=weights)[0] == 4
    if narrowest == 2:
        assert served(table, 1026, pair, weight_alignment=weights // 2)[0] == 2


@pytest.mark.parametrize("name", ["h200", "rtx-5090"])
def test_kernels_of_narrow_vectors_compile_without_spills(name: str) -> None:
    """For every length of rows the first choice or one that takes its place."""
    target, pair = find_target(name), ("bf16", "bf16")
    made = compile_generics(
        target, lambda variants: [compile_variant(v, target.arch) for v in variants], [pair]
    )
    table = generic_table([variant for variant, _ in made], target)
    for N in (129, 257, 513, 1025, 2049, 4097, 8191):
        for columns in (N, N + 1):
            vector, longest = served(table, columns, pair)
            assert vector == widest(table, columns, pair) and longest <= 4 * N, columns
    if target.smem_per_cta >= 200 << 10:
        assert served(table, 16382, pair) == (4, 16384)


@pytest.mark.parametrize(
    ("leasts", "wanted"),
    [((), 1281), ((1281,), 1025), ((1281, 1025), 1)],
    ids=["none refused", "the bracket refused", "the wider bracket refused, too"],
)
def test_rows_of_a_refused_bracket_go_to_the_next(leasts: tuple[int, ...], wanted: int) -> None:
    """Nothing for 1025 to 1280 columns in words; then nothing that takes them beside its own."""

    def compile(variants: list[Variant]) -> list[Compiled]:
        return [made(variant) for variant in variants]

    def made(variant: Variant) -> Compiled:
        words = variant["vector_bytes"] == 4
        gone = words and variant.N == 1280 and leasts
        # The first refusal is that of the bracket itself, others are of those that reach over it.
        if gone or (words and variant.N == 1536 and variant.least in leasts[1:]):
            return Compiled(H200.arch, "", b"", {}, "13", False, "error: planted", "planted")
        kernels = {MAIN_KERNEL: Resources(32, 0, 0, 0)}
        return replace(compiled(variant), kernels=kernels)

    generics = compile_generics(H200, compile, [("bf16", "bf16")])
    table = generic_table([variant for variant, _ in generics], H200)
    (over,) = (v for v, _ in generics if (v["vector_bytes"], v.N) == (4, 1536))
    assert over.least == wanted
    for N in (1026, 1150, 1278, 1282):
        expected = 1536 if leasts or N > 1280 else 1280
        assert served(table, N, ("bf16", "bf16")) == (4, expected)
    assert served(table, 1024 - 2, ("bf16", "bf16")) == (4, 1024)
    assert len({(v["vector_bytes"], v.N) for v, _ in generics}) == len(generics)


# ---- On a GPU ------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU and its driver; none is here"
)
EXACT: dict[str, dict[str, Any]] = {
    "777x1024:bf16": {"strategy": "column_slices"},
    "778x1024:bf16": {"strategy": "separate"},
    "779x1024:bf16": {"strategy": "semaphore"},
    "780x1024:bf16": {"strategy": "last_cta"},
}
"""What the package of the GPU tests was "tuned" for."""


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A package for the GPU that is here, and a function that opens it with nothing loaded yet."""
    properties = torch.cuda.get_device_properties(0)
    target = match_device(properties.name, properties.multi_processor_count)
    if target is None:
        pytest.skip(f"search_spaces/gpus.yaml does not know {properties.name}")
    folder = tmp_path_factory.mktemp("gpu") / "rmsnorm_backward"
    entries = []
    for shape, knobs in EXACT.items():
        problem = Problem.parse(shape)
        variant = variant_for(problem, target, **knobs)
        code = compile_variant(variant, target.arch)
        facts = dict.fromkeys(PROVENANCE_KEYS, "known")
        entries.append(Entry(problem, variant, code, "measured", facts))
    emit_package(entries, compiled_generics(target), target, folder)
    return lambda: Package(folder)


def gpu_tensors(*shape: int, dtype: torch.dtype, weight: torch.dtype) -> list[torch.Tensor]:
    x, dy = (torch.randn(*shape, device="cuda", dtype=dtype) for _ in range(2))
    scale = torch.randn(shape[-1], device="cuda", dtype=weight)
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    return [dy, x, rstd, scale]


def assert_close(got: tuple[torch.Tensor, ...], arguments: list[torch.Tensor]) -> None:
    """Against float64, within a few roundings of the output's dtype and of fp32 sums. dx is
    measured by its first term, from which the second takes away nearly everything where N is
    small."""
    dy, x, rstd, weight = (tensor.double() for tensor in arguments)
    wanted = reference_backward(dy, x, rstd, weight)
    terms = (rstd.view(-1, 1) * (dy * weight).view(-1, len(weight))).abs().view_as(x), wanted[1]
    for result, exact, term in zip(got, wanted, terms, strict=True):
        bound = 2 * torch.finfo(result.dtype).eps + 1e-5
        scale = term.abs() + exact.abs() + exact.square().mean().sqrt()
        assert ((result.double() - exact).abs() <= bound * scale).all()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("N", [1, 7, 256, 414, 1000, 1024, 1025, 3890, 4096, 8190, 8191])
@pytest.mark.parametrize(
    ("dtype", "weight"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
    ],
)
def test_gpu_any_width_agrees_with_float64(
    on_gpu: Any, N: int, dtype: torch.dtype, weight: torch.dtype
) -> None:
    package = on_gpu()
    for M in (1, 5, 777):
        arguments = gpu_tensors(M, N, dtype=dtype, weight=weight)
        assert_close(package.rmsnorm_backward(*arguments), arguments)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", EXACT)
def test_gpu_strategies_repeat_their_bits_and_restore_their_workspace(
    on_gpu: Any, shape: str
) -> None:
    package, problem = on_gpu(), Problem.parse(shape)
    arguments = gpu_tensors(problem.M, 1024, dtype=torch.bfloat16, weight=torch.bfloat16)
    first = package.rmsnorm_backward(*arguments)
    assert_close(first, arguments)
    for _ in range(20):
        again = package.rmsnorm_backward(*arguments)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
@needs_gpu
def test_gpu_layouts_are_read_where_they_lie(on_gpu: Any) -> None:
    package = on_gpu()
    dy, x, rstd, weight = gpu_tensors(777, 1024, dtype=torch.bfloat16, weight=torch.bfloat16)
    wide = torch.cat([x, x], 1)
    unaligned = torch.empty(777 * 1024 + 1, device="cuda", dtype=x.dtype)[1:].view(777, 1024)
    for layout in (
        [dy, wide[:, 1024:], rstd, weight],
        [dy, wide[:, 3:1027], rstd, weight],
        [dy[:1].expand(777, 1024), x, rstd, weight],
        [torch.ones((), device="cuda", dtype=x.dtype).expand(777, 1024), x, rstd, weight],
        [dy, x.t().contiguous().t(), rstd, weight],
        [unaligned.copy_(dy), x, rstd, weight],
        [dy, x, rstd, torch.cat([weight, weight])[1:1025]],
        [dy, x, rstd, torch.stack([weight, weight], 1)[:, 0]],
        [dy.view(7, 111, 1024), x.view(7, 111, 1024), rstd, weight],
    ):
        assert_close(package.rmsnorm_backward(*layout), layout)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("mode", ["global", "thread_local"])
@pytest.mark.parametrize("shape", EXACT)
def test_gpu_first_call_may_be_a_captured_one(on_gpu: Any, shape: str, mode: str) -> None:
    package, M = on_gpu(), Problem.parse(shape).M
    graphs = []
    for _ in range(2):
        arguments = gpu_tensors(M, 1024, dtype=torch.bfloat16, weight=torch.bfloat16)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            # The second call finds the scratch of the first one in the graph's pool.
            package.rmsnorm_backward(*arguments)
            results = package.rmsnorm_backward(*arguments)
        graphs.append((graph, arguments, results, torch.cuda.Stream()))
    for _ in range(20):
        for graph, _, _, stream in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for _, arguments, results, _ in graphs:
        assert_close(results, arguments)
        eager = package.rmsnorm_backward(*arguments)
        assert all(torch.equal(a, b) for a, b in zip(results, eager, strict=True))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", EXACT)
def test_gpu_threads_and_streams_do_not_disturb_each_other(on_gpu: Any, shape: str) -> None:
    package, M = on_gpu(), Problem.parse(shape).M
    inputs = [gpu_tensors(M, 1024, dtype=torch.bfloat16, weight=torch.bfloat16) for _ in range(4)]
    streams = [torch.cuda.default_stream(), torch.cuda.default_stream()]
    streams += [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    faults: list[str] = []

    def work(index: int) -> None:
        with torch.cuda.stream(streams[index]):
            results = [package.rmsnorm_backward(*inputs[index]) for _ in range(50)]
            streams[index].synchronize()
            if not all(torch.equal(dw, results[0][1]) for _, dw in results):
                faults.append(f"dw of thread {index} changed")
            assert_close(results[-1], inputs[index])

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, index) for index in range(4)]:
            done.result()
    assert not faults


@pytest.mark.gpu
@needs_gpu
def test_gpu_plain_thread_needs_no_setup(on_gpu: Any) -> None:
    """A thread that never used CUDA has no current context yet."""
    package = on_gpu()
    arguments = gpu_tensors(777, 1024, dtype=torch.bfloat16, weight=torch.bfloat16)
    package.warmup([(777, 1024, "bf16")])
    with ThreadPoolExecutor(1) as pool:
        results = pool.submit(package.rmsnorm_backward, *arguments).result()
    assert_close(results, arguments)


@pytest.mark.gpu
@needs_gpu
def test_gpu_of_another_kind_gets_pytorchs_kernel_and_one_warning(on_gpu: Any) -> None:
    package = on_gpu()
    package.table.target["arch"] = "sm_30a"
    arguments = gpu_tensors(777, 1024, dtype=torch.bfloat16, weight=torch.bfloat16)
    with pytest.warns(UserWarning, match="do not run on") as seen:
        assert_close(package.rmsnorm_backward(*arguments), arguments)
        package.rmsnorm_backward(*gpu_tensors(5, 64, dtype=torch.half, weight=torch.half))
    assert len(seen) == 1


# ---- Committed packages --------------------------------------------------------------------------

COMMITTED = GENERATED


@pytest.mark.parametrize("gpu", ["gb200", "h200"])
def test_committed_package_has_todays_runtime_and_whole_kernels(gpu: str, tmp_path: Path) -> None:
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
    init = (package / "__init__.py").read_bytes()
    write_code(tmp_path, Table.load(package))
    assert (tmp_path / "__init__.py").read_bytes() == init, advice
    for kernel in Table.load(package).kernels():
        assert kernel.read_cubin(package)[:4] == b"\x7fELF"
        assert (package / "kernels" / f"{kernel.file}.cu").stat().st_size > 0


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
    assert table.choose(4096, N, *dtypes).how == "generic"
