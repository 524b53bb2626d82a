"""Packages that stand alone: what an exported folder can do, and those of older versions."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest

import normforge
import tune
from generator.errors import NormforgeError
from generator.kernels.render import headers
from generator.package import standalone
from generator.package.standalone import (
    INCLUDE,
    RUNTIME,
    export_standalone,
    library_files,
    stands_alone,
)
from generator.paths import GENERATED, LIBRARY, REPOSITORY
from normforge.cubins import CUBINS
from normforge.table import Table
from tests.support.fresh import INDUCTOR, run_fresh
from tests.support.packages import BEFORE, entry, put, snapshot
from tests.support.wheels import wheel_of


def run(program: str, *paths: Path, **environment: str) -> str:
    """Return what a program prints that finds modules in some folders, and the library nowhere."""
    done = run_fresh(program, paths[0], paths, imported=INDUCTOR, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@pytest.fixture
def exported(package: Path, tmp_path: Path) -> Path:
    put(package, entry("4096x1024:bf16"), entry("4096x512:bf16:fp32", "predicted"))
    export_standalone(package, tmp_path / "exported")
    return tmp_path / "exported"


# ---- What it holds -------------------------------------------------------------------------------


def test_export_has_the_kernels_the_library_and_the_headers(exported: Path, package: Path) -> None:
    found, emitted = snapshot(exported), snapshot(package)
    for name, content in emitted.items():
        assert name == "__init__.py" or found.pop(name) == content
    for name, text in headers().items():
        assert found.pop(f"{INCLUDE}/{name}") == text.encode()
    for path in library_files():
        copy = found.pop(f"{RUNTIME}/{path}")
        assert str(path) == "identity.py" or copy == (LIBRARY / path).read_bytes()
    assert found.pop("LICENSE") == (REPOSITORY / "LICENSE").read_bytes()
    assert found.keys() == {"__init__.py", f"{RUNTIME}/__init__.py", "pyproject.toml", "py.typed"}


def test_equal_packages_give_equal_exports_and_others_another_namespace(
    exported: Path, package: Path, tmp_path: Path
) -> None:
    before = snapshot(exported)
    export_standalone(package, exported)
    assert snapshot(exported) == before
    put(package, entry("4096x1024:bf16", text="other"))
    export_standalone(package, exported)
    identity = f"{RUNTIME}/identity.py"
    assert snapshot(exported)[identity] != before[identity]


def test_an_export_with_another_library_has_another_namespace(
    exported: Path, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may have both, and operators of one name would be those of the first."""
    before = snapshot(exported)[f"{RUNTIME}/identity.py"]
    for path in library_files():
        (tmp_path / "library" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(LIBRARY / path, tmp_path / "library" / path)
    with (tmp_path / "library" / "spec.py").open("a") as file:
        file.write("# another version\n")
    monkeypatch.setattr(standalone, "LIBRARY", tmp_path / "library")
    export_standalone(package, exported)
    assert snapshot(exported)[f"{RUNTIME}/identity.py"] != before


# ---- What it can do ------------------------------------------------------------------------------

USE = """
import sys, torch
for module in [m for m in sys.modules if m.split(".")[0] == "cuda"]:
    del sys.modules[module]  # newer PyTorch imports the bindings itself
sys.modules.update(dict.fromkeys(("cuda", "generator", "normforge", "numpy", "jinja2")))
import {name} as package
norm = package.RMSNorm(64, eps=1e-6)
x = torch.randn(4, 64, requires_grad=True)
norm(x).sum().backward()
assert norm.weight.grad is not None and package.RMSNorm.__module__ == "{name}"
facts = package.explain(4096, 1024, "bf16")
assert facts["how"] == "tuned" and open(facts["source"]).read()
inner = package._package
assert inner._source(None).backward.tuned[0].kernel.read_cubin(inner.folder)
compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
assert torch.equal(compiled(x), norm(x))
assert not torch.cuda.is_initialized()
print("done")
"""


def test_it_is_imported_under_any_name_and_needs_neither_library_nor_cuda_python(
    exported: Path, tmp_path: Path
) -> None:
    for name in ("norms", "models.layers.norms"):
        folder = tmp_path / "project" / Path(*name.split("."))
        shutil.copytree(exported, folder)
        assert run(USE.format(name=name), tmp_path / "project") == "done"


TOGETHER = """
import sys, torch
from importlib import import_module
import normforge
packages = [normforge, *map(import_module, ("one", "two", "again"))]
spaces = {package.operators.name for package in packages}
assert len(spaces) == 4, spaces
assert "normforge" in spaces and all(name.startswith("normforge") for name in spaces), spaces
torch.manual_seed(0)
x = torch.randn(4, 64, requires_grad=True)
wanted = torch.nn.functional.rms_norm(x, (64,), None, 1e-6)
for package in packages:
    for norm in (package.rms_norm, torch.compile(package.rms_norm, backend="aot_eager")):
        y = norm(x, None, 1e-6)
        torch.testing.assert_close(y, wanted)
        y.sum().backward()
titles = [package.explain(4096, 4096, "bf16")["gpu"] for package in packages]
assert titles == ["NVIDIA H100 SXM5 80GB HBM3", *2 * ["NVIDIA H200 SXM 141GB"], titles[-1]], titles
print("done")
"""


def test_several_in_one_process_beside_the_library_have_operators_of_their_own(
    tmp_path: Path,
) -> None:
    for name, gpu in (("one", "h200"), ("two", "h200"), ("again", "gb200")):
        export_standalone(GENERATED / gpu / "rmsnorm_backward", tmp_path / name)
    assert run(TOGETHER, tmp_path, REPOSITORY, NORMFORGE_GPU="h100") == "done"


def test_it_can_be_installed_beside_others(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", "77", reason="building needs setuptools 77")
    site, modules = tmp_path / "site", []
    for gpu in ("h200", "gb200"):
        folder = tmp_path / gpu
        export_standalone(GENERATED / gpu / "rmsnorm_backward", folder)
        sources = len(list((folder / "kernels").iterdir()))
        name, files = wheel_of(folder, site)
        module, version = f"normforge_{gpu}_rmsnorm_backward", normforge.__version__
        modules.append(module)
        assert name == f"{module}-{version}-py3-none-any.whl"
        assert {file.split("/")[0] for file in files} == {module, f"{module}-{version}.dist-info"}
        assert f"{module}-{version}.dist-info/licenses/LICENSE" in files
        wanted = ("py.typed", "runtime/native/native.cpp", "include/elements.cuh")
        assert {f"{module}/{file}" for file in wanted} <= {*files}
        assert len([file for file in files if file.endswith(".cu")]) == sources
    for module in modules:
        program = USE.format(name=module).replace("4096, 1024", "4096, 4096")
        assert run(program, site) == "done"


EXPORT = """
import torch
from importlib import import_module
package = import_module("{name}")
program = torch.export.export(package.RMSNorm(16), (torch.ones(4, 16),))
torch.export.save(program, "{file}")
print("done")
"""
LOAD = """
import torch, {name}
model = torch.export.load("{file}").module()
assert torch.allclose(model(torch.ones(4, 16)), torch.ones(4, 16))
print("done")
"""


@pytest.mark.parametrize("names", [("rmsnorm_backward", ""), ("norms", ""), ("own_", "own_")])
def test_batch_invariant_norms_are_those_of_the_package_beside_it(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    """They lie in one folder, or are installed under names with the same beginning."""
    name, prefix = names
    plain = f"{prefix}rmsnorm_backward" if prefix else name
    for operation, module in (
        ("rmsnorm_backward", plain),
        ("rmsnorm_invariant_backward", f"{prefix}rmsnorm_invariant_backward"),
    ):
        export_standalone(GENERATED / "gb200" / operation, tmp_path / module)
    program = f"""
from {plain} import RMSNorm
from {prefix}rmsnorm_invariant_backward import RMSNorm as Invariant
assert type(RMSNorm(64, batch_invariant=True)) is Invariant
print("done")
"""
    assert run(program, tmp_path) == "done"


def test_an_export_that_was_installed_is_exported_again(exported: Path, package: Path) -> None:
    for left in ("build/lib/x.py", "normforge_h200_rmsnorm_backward.egg-info/PKG-INFO"):
        (exported / left).parent.mkdir(parents=True)
        (exported / left).write_text("")
    export_standalone(package, exported)
    assert not (exported / "build").exists()


def test_a_graph_finds_the_package_under_another_name(exported: Path, tmp_path: Path) -> None:
    for name in ("norms", "others"):
        shutil.copytree(exported, tmp_path / "project" / name)
    file = tmp_path / "model.pt2"
    assert run(EXPORT.format(name="norms", file=file), tmp_path / "project") == "done"
    assert run(LOAD.format(name="others", file=file), tmp_path / "project") == "done"


# ---- By the tuner --------------------------------------------------------------------------------


def test_a_package_that_stands_alone_goes_on_doing_so(package: Path) -> None:
    put(package, entry("4096x1024:bf16"), fallback=[])
    assert not stands_alone(package)
    put(package, entry("4096x1024:bf16"), fallback=[], standalone=True)
    assert stands_alone(package)
    put(package, entry("8192x1024:bf16"), fallback=[])
    assert stands_alone(package) and len(Table.load(package).tuned) == 2


def test_command_line_exports_a_committed_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, title, layer in (
        ([], "NVIDIA H200 SXM 141GB", "RMSNorm"),
        (["--op", "layernorm_backward"], "NVIDIA H200 SXM 141GB", "LayerNorm"),
        (["--gpu", "gb200", "--op", "rmsnorm_invariant_backward"], "NVIDIA GB200", "RMSNorm"),
    ):
        folder = tmp_path / "new" / f"norms_{len(arguments)}"
        assert tune.main(["export", "--standalone", str(folder), *arguments]) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"Package: {folder}, for {title}") and said.count("\n") == 1
        program = f"import {folder.name} as package; package.{layer}(64); print('done')"
        assert run(program, folder.parent) == "done"


# ---- Of older versions ---------------------------------------------------------------------------


@pytest.fixture
def before(tmp_path: Path) -> Path:
    with tarfile.open(BEFORE) as archive:
        archive.extractall(tmp_path / "project", filter="data")
    return tmp_path / "project" / "before_library"


def test_a_package_of_the_version_before_the_library_works_as_it_is(before: Path) -> None:
    program = USE.format(name="before_library")
    old_attribute = program.replace("inner._source(None).backward", "inner.table")
    assert run(old_attribute, before.parent) == "done"
    beside = """
import torch, normforge, before_library
x = torch.randn(4, 64, requires_grad=True)
for norm in (normforge.rms_norm, before_library.rms_norm):
    torch.compile(norm, backend="aot_eager")(x, None, 1e-6).sum().backward()
with before_library.installed():
    pass
with normforge.installed():
    pass
print("done")
"""
    assert run(beside, before.parent, REPOSITORY, NORMFORGE_GPU="h200") == "done"


def test_it_is_extended_and_stands_alone_with_todays_library(before: Path) -> None:
    old = {tuned.shape: tuned for tuned in Table.load(before).tuned}
    cubins = {shape: tuned.kernel.read_cubin(before) for shape, tuned in old.items()}
    put(before, entry("8192x1024:bf16"), fallback=[])
    found = {tuned.shape: tuned for tuned in Table.load(before).tuned}
    assert found.keys() == {*old, "8192x1024:bf16"}
    for shape, cubin in cubins.items():
        assert found[shape].kernel.read_cubin(before) == cubin
        source = (before / "kernels" / f"{found[shape].kernel.file}.cu").read_text()
        assert '\n#include "elements.cuh"\n' in source  # the templates still make this code
    assert {path.name for path in (before / INCLUDE).iterdir()} == headers().keys()
    assert run(USE.format(name="before_library"), before.parent) == "done"


def test_it_is_exported_with_its_headers_in_its_sources(before: Path, tmp_path: Path) -> None:
    export_standalone(before, tmp_path / "exported")
    for path in (tmp_path / "exported" / "kernels").iterdir():
        text = path.read_text()
        assert '#include "../include' not in text and "struct Packet {" in text


def test_a_kept_source_of_older_templates_gets_its_headers_pasted(before: Path) -> None:
    (revision,) = (before / INCLUDE).iterdir()
    header = revision / "elements.cuh"
    header.write_text("constexpr int kOfAnotherDay = 1;\n" + header.read_text())
    put(before, entry("8192x1024:bf16"), fallback=[])
    texts = [path.read_text() for path in (before / "kernels").iterdir()]
    pasted = [text for text in texts if "kOfAnotherDay" in text]
    assert len(pasted) == 2 and len(texts) == 3
    assert not any('#include "../include' in text for text in pasted)


# ---- What goes wrong -----------------------------------------------------------------------------


def refused(package: Path, folder: Path, says: str, gpu: str | None = None) -> None:
    before = snapshot(folder.parent)
    with pytest.raises(NormforgeError, match=says) as error:
        export_standalone(package, folder, gpu)
    assert "\n" not in str(error.value)
    assert snapshot(folder.parent) == before, "something was written"


def test_what_cannot_be_exported_is_one_sentence(package: Path, tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    refused(package, folder, "there is no package at .*: choose one with --gpu or --out")
    put(package, entry("4096x1024:bf16"), fallback=[])
    refused(package, folder, "is for h200, not for gb200", gpu="gb200")
    (package / CUBINS).write_bytes(b"")
    refused(package, folder, "cannot be exported .*cannot read")


@pytest.mark.parametrize("name", ["notes.txt", "runtime.py"])
def test_folder_of_somebody_else_is_left_alone(exported: Path, package: Path, name: str) -> None:
    (exported / name).write_text("years of work")
    says = "is not empty and no earlier export: choose another folder with --standalone"
    refused(package, exported, says)


def test_a_package_without_the_library_says_what_to_do(package: Path) -> None:
    put(package, entry("4096x1024:bf16"), fallback=[])
    program = """
try:
    import rmsnorm_backward
except ImportError as error:
    print(error)
"""
    said = run(program, package.parent)
    assert said.startswith("rmsnorm_backward needs the library normforge (")
    assert "python tune.py export --standalone" in said and "\n" not in said


def test_a_package_that_was_tuned_is_no_export(
    exported: Path, package: Path, tmp_path: Path
) -> None:
    tuned = tmp_path / "tuned" / "rmsnorm_backward"
    put(tuned, entry("4096x1024:bf16"), fallback=[], standalone=True)
    refused(package, tuned, "is not empty and no earlier export")
    export_standalone(tuned, exported)  # an export may be exported itself


def test_options_of_trials_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["export", "--standalone", str(tmp_path / "x"), "--shape", "4096x4096:bf16"]
    assert tune.main(given) == 2
    assert "--shape and --storage are for trials" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_every_file_of_the_library_is_known() -> None:
    """A module that chooses between packages has no place in one of them."""
    copied = {str(path) for path in library_files()}
    here = {str(path.relative_to(LIBRARY)) for path in LIBRARY.rglob("*.py")}
    chooses = {f"{name}.py" for name in ("__init__", "packages", "rmsnorm", "batch_invariant")}
    chooses |= {"gated.py", "gated_packages.py", "rope.py", "rope_packages.py"}
    chooses |= {"quantized.py", "quantized_packages.py", "this_gpu.py"}
    assert here - copied == chooses | {"generated.py", "layernorm.py", "torchtitan.py"}
