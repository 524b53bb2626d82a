"""Packages as repositories of Hugging Face's `kernels`."""

from __future__ import annotations

import ast
import errno
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tune
from generator.errors import NormforgeError
from generator.package.hub.export import export_package
from generator.package.standalone import export_standalone, library_files
from generator.paths import GENERATED, LIBRARY, REPOSITORY
from generator.target import Target
from normforge.cubins import CUBINS, CUBINS_INDEX
from normforge.table import TABLE
from tests.support.entry_points import Training, equal_bits, randn
from tests.support.packages import entry, forget, put, snapshot
from tests.support.patience import patience

BINDINGS = "runtime/launch/cuda_api.py"


class LlamaNorm(torch.nn.Module):
    """The norm of model files."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(1 + 0.1 * randn(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)


class OtherNorm(LlamaNorm):
    """The norm with the other name of eps."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.eps = self.variance_epsilon
        del self.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.between, self.two = LlamaNorm(64), torch.nn.Linear(64, 64), OtherNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.between(self.one(x)))


def results(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """y, dx and the gradients of all parameters."""
    x = x.detach().requires_grad_()
    y = model(x)
    parameters = list(model.parameters())
    found = torch.autograd.grad((y * randn(*y.shape, seed=1)).sum(), [x, *parameters])
    return [y.detach(), *found]


@pytest.fixture
def exported(package: Path, tmp_path: Path) -> Path:
    """A repository with two tuned kernels and all fallback kernels."""
    put(package, entry("4096x1024:bf16"), entry("4096x512:bf16:fp32", "predicted"))
    export_package(package, tmp_path / "exported")
    return tmp_path / "exported"


@pytest.fixture
def load() -> Iterator[Any]:
    """Imports the build of a repository, as no other module of the process."""
    before = list(sys.path)

    def load(repository: Path) -> Any:
        forget_it()
        sys.path.insert(0, str(repository / "build"))
        return importlib.import_module("torch-cuda")

    def forget_it() -> None:
        sys.path[:] = before
        forget("torch-cuda")

    yield load
    forget_it()


# ---- The folder ----------------------------------------------------------------------------------


def test_repository_has_the_package_and_what_kernels_asks_for(
    exported: Path, package: Path
) -> None:
    assert {path.name for path in exported.iterdir()} == {"README.md", "LICENSE", "build"}
    assert [path.name for path in (exported / "build").iterdir()] == ["torch-cuda"]
    build, emitted = snapshot(exported / "build" / "torch-cuda"), snapshot(package)
    export_standalone(package, package.parent / "alone")
    alone = snapshot(package.parent / "alone")
    for name in ("pyproject.toml", "LICENSE", "py.typed"):  # pip does not see this folder
        del alone[name]
    assert emitted.keys() < alone.keys()
    assert build.keys() == alone.keys() | {"layers.py", "metadata.json"}
    changed = {name for name in alone if build[name] != alone[name]}
    assert changed == {"__init__.py", BINDINGS}
    assert build["__init__.py"].startswith(alone["__init__.py"])
    metadata = json.loads(build["metadata.json"])
    identity = metadata.pop("id")
    assert identity.startswith("_normforge_rmsnorm_h200_") and identity.isidentifier()
    assert metadata == {
        "name": "normforge-rmsnorm-h200",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda", "archs": ["9.0a"]},
    }


def test_model_card_says_what_it_is_and_how_to_load_it(exported: Path) -> None:
    card = (exported / "README.md").read_text()
    for part in (
        *("license: apache-2.0", "# normforge-rmsnorm-h200", "NVIDIA H200", "sm_90a"),
        *("1, timed and checked on that GPU; 1, chosen by a model", "get_kernel(", "kernelize("),
        *('{"RMSNorm": {"cuda": {mode: layer}}}', "Apache-2.0, in the file LICENSE"),
    ):
        assert part in card, part
    blocks = card.split("```python\n")[1:]
    assert len(blocks) == 2
    for block in blocks:
        ast.parse(block.partition("```")[0])
    assert (exported / "LICENSE").read_text() == (REPOSITORY / "LICENSE").read_text()


def test_equal_packages_give_equal_repositories(
    exported: Path, package: Path, tmp_path: Path
) -> None:
    export_package(package, tmp_path / "again")
    assert snapshot(tmp_path / "again") == snapshot(exported)
    put(package, entry("4096x1024:bf16", text="other"))
    export_package(package, tmp_path / "again")
    one, two = (
        json.loads((folder / "build" / "torch-cuda" / "metadata.json").read_text())["id"]
        for folder in (exported, tmp_path / "again")
    )
    assert one != two, "two contents must not be one module"


def absolute_imports(path: Path) -> set[str]:
    """Packages that a file imports by their names, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(str(node.module).split(".")[0])
    return found


def test_it_imports_pytorch_the_standard_library_and_itself(exported: Path) -> None:
    files = list((exported / "build").rglob("*.py"))
    # The package, its layers and its library, which has an `__init__.py` more than it has here.
    assert len(files) == len([path for path in library_files() if path.suffix == ".py"]) + 3
    outside = {name for path in files for name in absolute_imports(path)}
    assert outside - sys.stdlib_module_names == {"torch"}
    assert "cuda" in absolute_imports(LIBRARY / "launch" / "cuda_api.py")  # the check sees it


# ---- Without `kernels` ---------------------------------------------------------------------------

PROGRAM = """
import sys, torch
for module in [m for m in sys.modules if m.split(".")[0] == "cuda"]:
    del sys.modules[module]  # newer PyTorch imports the bindings itself
sys.modules.update(dict.fromkeys(("cuda", "generator", "normforge", "numpy", "jinja2")))
import importlib
package = importlib.import_module("torch-cuda")
norm = package.RMSNorm(64, eps=1e-6)
x = torch.randn(4, 64, requires_grad=True)
norm(x).sum().backward()
assert package.explain(4096, 1024, "bf16")["how"] == "tuned"
assert package._package.table.tuned[0].kernel.read_cubin(package._package.folder)
assert not torch.cuda.is_initialized()
try:
    package._package._source(None).loaded.get(package._package.table.tuned[0].kernel).load(0)
except RuntimeError as error:
    print(error)
"""


def test_import_needs_neither_cuda_python_nor_this_repository(exported: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-B", "-c", PROGRAM],
        cwd=exported,
        env={**os.environ, "PYTHONPATH": str(exported / "build")},
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # A driver, if there is one, refuses to load what these tests take for machine code.
    said = ("there is no CUDA driver (libcuda.so.1: ", "CUDA_ERROR_")
    assert done.stdout.startswith(said), done.stdout


def test_layer_is_what_kernelize_demands(exported: Path, load: Any) -> None:
    layer = load(exported).layers.RMSNorm
    plain = type("Plain", (torch.nn.Module,), {})
    assert layer.__init__ is torch.nn.Module.__init__
    assert set(dir(layer)) - set(dir(plain)) == {"has_backward", "can_torch_compile"}
    assert layer.has_backward is layer.can_torch_compile is True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_computes_what_pytorch_does(exported: Path, load: Any, dtype: torch.dtype) -> None:
    layer = load(exported).layers.RMSNorm
    for kind in (LlamaNorm, OtherNorm, lambda width: torch.nn.RMSNorm(width, eps=1e-3)):
        module = kind(64).to(dtype)
        eps = module.variance_epsilon if kind is LlamaNorm else module.eps

        def formula(x: torch.Tensor, module: Any = module, eps: float = eps) -> torch.Tensor:
            return torch.nn.functional.rms_norm(x, (64,), module.weight, eps)

        x = (0.01 * randn(5, 64)).to(dtype)  # eps counts at this size
        formula.parameters = module.parameters  # type: ignore[attr-defined]
        wanted = results(formula, x)
        module.forward = layer.forward.__get__(module)
        torch.testing.assert_close(results(module, x), wanted)


def test_layer_refuses_a_weight_of_several_dimensions(exported: Path, load: Any) -> None:
    module = torch.nn.RMSNorm((4, 8))
    module.forward = load(exported).layers.RMSNorm.forward.__get__(module)
    with pytest.raises(ValueError, match="normalises one dimension, and the weight has 2"):
        module(randn(3, 4, 8))


# ---- With `kernels` ------------------------------------------------------------------------------


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    reason = "needs Hugging Face's kernels 0.17 (pip install kernels); it is not here"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("kernels", "0.17", reason=reason)


def test_kernels_loads_a_repository(
    kernels: Any, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")  # the build is for this version
    module = kernels.get_local_kernel(exported)
    assert Path(module.__file__).parent == exported / "build" / "torch-cuda"
    assert module.RMSNorm.__module__ == module.__name__  # pickle finds it there
    assert module.layers.RMSNorm.has_backward
    (loaded,) = (one for one in kernels.get_loaded_kernels() if one.module is module)
    assert loaded.metadata.name.python_name == "normforge_rmsnorm_h200"
    norm, x = module.RMSNorm(64), randn(3, 64)
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (64,)))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_kernelized_model_trains_as_before(kernels: Any, exported: Path, compiled: bool) -> None:
    for kind in (LlamaNorm, OtherNorm):
        kernels.replace_kernel_forward_from_hub(kind, "RMSNorm")
    mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
    asked = mode if compiled else kernels.Mode.TRAINING
    model, x = Model(), randn(3, 5, 64)
    wanted = results(model, x)
    build = exported / "build" / "torch-cuda"  # itself: PyTorch has no CUDA here
    layer = kernels.LocalLayerRepository(build, layer_name="RMSNorm")
    with kernels.use_kernel_mapping({"RMSNorm": {"cpu": {mode: layer}}}, inherit_mapping=False):
        model = kernels.kernelize(model, mode=asked, device="cpu", use_fallback=False)
    served = {type(module).forward is not module.forward.__func__ for module in model.children()}
    assert model.one.forward.__func__ is model.two.forward.__func__ and served == {True, False}
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    run.parameters = model.parameters
    torch.testing.assert_close(results(run, x), wanted)


def test_norms_of_transformers_are_kernelized(kernels: Any, exported: Path) -> None:
    """The recipe of docs/generated-code.md: a transformers that wants another version of `kernels`
    marks no class for it."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    norms = [m for m in model.modules() if type(m).__name__ == "LlamaRMSNorm"]
    tokens, before = torch.arange(12).view(2, 6), [norm.forward.__func__ for norm in norms]

    def trained() -> list[torch.Tensor]:
        model.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    wanted = trained()
    mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
    build = exported / "build" / "torch-cuda"
    layer = kernels.LocalLayerRepository(build, layer_name="RMSNorm")
    with kernels.use_kernel_mapping({"RMSNorm": {"cpu": {mode: layer}}}, inherit_mapping=False):
        model = kernels.kernelize(model, mode=mode, device="cpu")
    after = {norm.forward.__func__ for norm in norms}
    assert len(norms) == 5 and len(after) == 1 and not after & {*before}
    torch.testing.assert_close(trained(), wanted)


# ---- What goes wrong -----------------------------------------------------------------------------


def refused(package: Path, folder: Path, says: str, gpu: str | None = None) -> None:
    before = snapshot(folder.parent)
    with pytest.raises(NormforgeError, match=says) as error:
        export_package(package, folder, gpu)
    assert "\n" not in str(error.value)
    assert snapshot(folder.parent) == before, "something was written"


def test_earlier_export_is_replaced_as_a_whole(exported: Path, package: Path) -> None:
    before = snapshot(exported)
    (exported / "build" / "torch-cuda" / "old.py").write_text("")
    export_package(package, exported)
    assert snapshot(exported) == before
    empty = exported.parent / "empty"
    empty.mkdir()
    export_package(package, empty)
    assert snapshot(empty) == before


@pytest.mark.parametrize("name", [".git/config", "build/torch-cpu/x.py", "notes.txt"])
def test_folder_with_anything_else_is_left_alone(exported: Path, package: Path, name: str) -> None:
    (exported / name).parent.mkdir(parents=True, exist_ok=True)
    (exported / name).write_text("years of work")
    refused(package, exported, "is not empty and no earlier export: choose another .* --hf")


def test_repository_of_somebody_else_is_left_alone(exported: Path, package: Path) -> None:
    metadata = exported / "build" / "torch-cuda" / "metadata.json"
    for text in ('{"id": "_activation_cuda_1234567"}', "[]", "{", ""):
        metadata.write_text(text)
        refused(package, exported, "is not empty and no earlier export")
    metadata.unlink()
    refused(package, exported, "is not empty and no earlier export")


def test_package_that_cannot_be_exported(package: Path, tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    refused(package, folder, "there is no package at .*rmsnorm_backward: choose one with --gpu")
    with_layers = "has no layers to export, only rmsnorm_backward"
    refused(package.with_name("layernorm_backward"), folder, with_layers)
    put(package, entry("4096x1024:bf16"))
    refused(package, folder, "is for h200, not for gb200", gpu="gb200")
    content = (package / CUBINS).read_bytes()
    (package / CUBINS).write_bytes(content[: len(content) // 2])
    refused(package, folder, f"{package} cannot be exported .*cannot read")
    (package / CUBINS).write_bytes(content)
    (package / TABLE).write_text("{")
    refused(package, folder, f"{package} cannot be exported .*damaged")


@pytest.mark.parametrize("name", [BINDINGS, CUBINS, CUBINS_INDEX])
def test_full_disk_leaves_the_earlier_export(
    exported: Path, package: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    copy = shutil.copyfile

    def fail(source: Path, target: Path, **options: Any) -> None:
        if str(target).endswith(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        copy(source, target, **options)

    monkeypatch.setattr(shutil, "copyfile", fail)
    refused(package, exported, "No space left on device.* what was there is unchanged")


def test_command_line_exports_a_committed_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, title in (([], "NVIDIA H200 SXM 141GB"), (["--gpu", "gb200"], "NVIDIA GB200")):
        folder = tmp_path / "new" / title
        assert tune.main(["export", "--hf", str(folder), *arguments]) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"Repository: {folder}, for {title}") and said.count("\n") == 1
        assert title in (folder / "README.md").read_text()


# ---- On a GPU ------------------------------------------------------------------------------------

SIZES = {"width": 1024, "heads": 8, "tokens": 32}


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic", "served_by_kernels")
@pytest.mark.parametrize("how", ["eager", "native", "compiled"])
def test_gpu_training_has_the_bits_of_the_committed_package(
    here: Target, tmp_path: Path, load: Any, how: str
) -> None:
    package = GENERATED / here.name / "rmsnorm_backward"
    if not package.exists():
        pytest.skip(f"needs a GPU with a committed package; {here} has none")
    export_package(package, tmp_path / "exported")
    committed = importlib.import_module(f"generated.{here.name}.rmsnorm_backward")
    module = load(tmp_path / "exported")
    if how == "native":
        module.use_native()

    def ours(width: int) -> torch.nn.Module:
        norm = LlamaNorm(width, eps=1e-6)
        torch.nn.init.ones_(norm.weight)
        norm.forward = module.layers.RMSNorm.forward.__get__(norm)  # type: ignore[method-assign]
        return norm

    def train(norm: Any) -> list[torch.Tensor]:
        wrap = torch.compile if how == "compiled" else lambda model: model
        return Training(norm, False, "cuda", torch.bfloat16, wrap, **SIZES).train(10)

    wanted = train(lambda width: committed.RMSNorm(width, eps=1e-6))
    assert equal_bits(train(ours), wanted)
    assert float(wanted[9]) < float(wanted[0])
    bindings = sys.modules["torch-cuda.runtime.launch.cuda_api"]
    assert bindings.__file__ == str(tmp_path / "exported" / "build" / "torch-cuda" / BINDINGS)
