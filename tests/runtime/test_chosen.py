"""`import normforge`: every call by the package of the GPU that its tensors are on."""

from __future__ import annotations

import json
import shutil
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from generator.paths import REPOSITORY
from normforge import packages, this_gpu
from normforge.api import Package
from normforge.frontends.operators import Operators
from normforge.packages import Chosen, chosen
from normforge.serve import checks
from normforge.serve.options import PLAIN, Arguments
from normforge.table import TABLE, ForwardTable, Table
from normforge.this_gpu import Gpu
from tests.support.fake_driver import SPEC, entry, tensors
from tests.support.fresh import INDUCTOR, run_fresh

GPUS = (
    Gpu("NVIDIA H200", (9, 0)),
    Gpu("NVIDIA H100 80GB HBM3", (9, 0)),
    Gpu("NVIDIA H200", (9, 0)),
    Gpu("NVIDIA T4", (7, 5)),
)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One with these GPUs, the first of which it uses, and packages for two of them."""
    for gpu in ("h100", "h200"):
        target = {"name": gpu, "title": gpu.upper(), "arch": "sm_90a", "sms": 132}
        kernel = entry(4096, replace(SPEC, name=f"of_the_{gpu}"))
        folder = tmp_path / "generated" / gpu / "rmsnorm_backward"
        folder.mkdir(parents=True)
        (folder / TABLE).write_text(json.dumps(Table(target, (kernel,)).to_json()))
        (folder / "forward.json").write_text(json.dumps(ForwardTable(target).to_json()))
    monkeypatch.setattr(packages, "_HERE", tmp_path)
    monkeypatch.delenv("NORMFORGE_GPU", raising=False)
    monkeypatch.setattr(packages, "find_gpu", lambda: GPUS[0])
    monkeypatch.setattr(packages, "gpu_of", GPUS.__getitem__)

    def properties(device: int) -> Any:
        major, minor = GPUS[device].capability
        facts = {"name": GPUS[device].name, "major": major, "minor": minor}
        return type("Properties", (), {**facts, "multi_processor_count": 132})

    monkeypatch.setattr(checks.torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return monkeypatch


def test_kernels_are_those_of_the_gpu_of_the_tensors(machine: Any) -> None:
    package, given = Package(Chosen("rmsnorm_backward")), Arguments(*tensors(4096))
    read: list[Path] = []
    for device in (0, 1, 2):
        loaded = package._source(device).loaded
        machine.setattr(loaded, "get", lambda k: k)
        call = package._with_kernel(given, PLAIN, device)
        assert call.kernel.spec.name == f"of_the_{('h200', 'h100', 'h200')[device]}"
        read.append(package._source(device).folder)
    assert package._source(0) is package._source(2) and read[0] == read[2] != read[1]


@pytest.mark.parametrize("current", [0, 1])
def test_the_gpu_is_the_current_one(monkeypatch: pytest.MonkeyPatch, current: int) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, value in (("is_initialized", True), ("is_available", True)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(this_gpu, "gpu_of", GPUS.__getitem__)
    assert this_gpu.find_gpu() == GPUS[current]


def test_a_gpu_is_known_by_name_capability_and_sms(machine: Any) -> None:
    assert this_gpu.gpu_of(3) == Gpu("NVIDIA T4", (7, 5), 132)


def test_backwards_of_sums_have_the_kernels_of_the_gpu(machine: Any, tmp_path: Path) -> None:
    folder = tmp_path / "generated" / "h200" / "rmsnorm_sum2_backward"
    folder.mkdir()
    target = {"name": "h200", "title": "H200", "arch": "sm_90a", "sms": 132}
    kernel = entry(4096, replace(SPEC, operation=folder.name))
    (folder / TABLE).write_text(json.dumps(Table(target, (kernel,)).to_json()))
    made: Any = packages._choose("rmsnorm_backward")
    beside = made.ops.sum_backward
    assert beside.server(2).explain(4096, 1024, "bf16")["how"] == "tuned"
    assert "rmsnorm_sum3_backward" in beside.server(3).missing


def test_a_gpu_without_kernels_is_served_by_pytorch_beside_one_that_has_some(machine: Any) -> None:
    package = Package(Chosen("rmsnorm_backward"))
    with pytest.warns(UserWarning, match="no kernels for NVIDIA T4"):
        choice = package._best(3, (4096, 1024, "bf16", "bf16"), False, "")
    assert choice.kernel is None and "sm_90a" in choice.reason
    assert package._source(1).backward.target["name"] == "h100"
    given = Arguments(*tensors(4096))
    machine.setattr(package, "_find", lambda g, o: package._with_kernel(g, o, 3))
    with pytest.warns(UserWarning, match="using PyTorch's own kernel"):
        assert package._prepare_routed(given, PLAIN)(*tensors(4096)) is None
    machine.setattr(torch.version, "cuda", None)  # a GPU of another maker
    assert package._source(2) is package._source(0)


def test_a_process_whose_gpu_has_no_kernels_is_told_at_once(machine: Any) -> None:
    machine.setattr(packages, "find_gpu", lambda: GPUS[3])
    with pytest.warns(UserWarning, match=r"no kernels for NVIDIA T4 .*PyTorch's operators serve"):
        package = Package(Chosen("rmsnorm_backward"))
    x = torch.randn(4, 8, requires_grad=True)
    torch.testing.assert_close(package.rms_norm(x, None), torch.nn.functional.rms_norm(x, (8,)))


def test_kernels_of_a_similar_gpu_are_said_once(machine: Any) -> None:
    machine.setattr(packages, "gpu_of", lambda device: Gpu("NVIDIA GH200 480GB", (9, 0)))
    source = Chosen("rmsnorm_backward")
    with pytest.warns(UserWarning, match="runs the kernels that were tuned for H100") as told:
        assert source(0) is source(1)
    assert len(told) == 1 and told[0].filename == __file__


def test_threads_get_one_set_of_functions(machine: Any) -> None:
    class Slow(Package):
        def __init__(self, *given: Any) -> None:
            time.sleep(0.05)
            super().__init__(*given)

    machine.setattr(packages, "_chosen", {})
    machine.setitem(packages._LIBRARY, "rmsnorm_backward", (Slow, "normforge.rmsnorm"))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(chosen, ["rmsnorm_backward"] * 4))
    assert {id(package) for package in found} == {id(found[0])}
    assert Operators.served("") is found[0].ops  # type: ignore[comparison-overlap]


def test_two_modules_of_one_name_are_two_packages(machine: Any, tmp_path: Path) -> None:
    folders = [
        shutil.copytree(tmp_path / "generated" / gpu / "rmsnorm_backward", tmp_path / "own" / gpu)
        for gpu in ("h100", "h200")
    ]
    one, two, again = (
        packages.open_package(str(folder / "__init__.py"), "norms", "rmsnorm_backward")
        for folder in (*folders, folders[0])
    )
    assert one.name == again.name == "norms" and two.name == str(folders[1])
    one.install()
    try:
        with pytest.raises(RuntimeError, match="another package of Normforge is installed"):
            two.install()
        again.install()  # the same, loaded again
    finally:
        again.uninstall()


def test_the_variable_chooses_for_all_gpus(machine: Any) -> None:
    """A GPU that those kernels do not run on is then served by PyTorch."""
    machine.setenv("NORMFORGE_GPU", "h100")
    source = Chosen("rmsnorm_backward")
    kernels = [source(device) for device in (None, 0, 1, 3)]
    assert {id(each) for each in kernels} == {id(kernels[0])}
    assert kernels[0].backward.target["name"] == "h100"
    assert Package(source)._best(3, (4096, 1024, "bf16", "bf16"), False, "").kernel is None


def test_what_is_asked_without_a_tensor_is_of_the_current_gpu(machine: Any) -> None:
    package = Package(Chosen("rmsnorm_backward"))
    assert package.explain(4096, 1024, "bf16")["gpu"] == "H200"
    machine.setattr(torch.cuda, "is_initialized", lambda: True)
    machine.setattr(torch.cuda, "current_device", lambda: 1)
    assert package.explain(4096, 1024, "bf16")["gpu"] == "H100"
    assert package.provenance["target"]["name"] == "h100"
    assert package.folder.parent.name == "h100"


def test_a_graph_finds_the_packages_of_this_library_alone(machine: Any) -> None:
    ops = packages._operators_of("h100/rmsnorm_backward")
    assert ops.package == "h100/rmsnorm_backward"
    for name in ("h300/rmsnorm_backward", "../h100/rmsnorm_backward", "h100/softmax", "softmax"):
        with pytest.raises(LookupError):
            packages._operators_of(name)


def test_kernels_of_another_operation_are_refused(machine: Any, tmp_path: Path) -> None:
    """Their formula would serve the CPU, and wrong gradients would come without a word."""
    machine.setattr(packages, "_chosen", {})
    folder = tmp_path / "generated" / "h200" / "rmsnorm_backward"
    file = str(folder / "__init__.py")
    with pytest.raises(ImportError, match="norms is a package of softmax_backward, which this ver"):
        packages.open_package(file, "norms", "softmax_backward")
    with pytest.raises(ValueError, match="has kernels of rmsnorm_backward, and here layernorm_b"):
        packages.open_package(file, "norms", "layernorm_backward")
    other = tmp_path / "generated" / "h200" / "layernorm_backward"
    shutil.copytree(folder, other)
    with pytest.raises(ValueError, match="has kernels of rmsnorm_backward, and here layernorm_b"):
        chosen("layernorm_backward")


@pytest.mark.parametrize("operation", packages._LIBRARY)
def test_every_operation_is_chosen_once_and_its_layers_are_found_by_pickle(operation: str) -> None:
    package: Any = chosen(operation)
    assert chosen(operation) is package
    (layer,) = (getattr(package, n) for n in ("RMSNorm", "LayerNorm") if hasattr(package, n))
    assert getattr(import_module(layer.__module__), layer.__name__) is layer


SWITCH = """
import pickle, normforge
plain = normforge.RMSNorm(16)
stored = pickle.dumps(plain)
normforge.use_batch_invariant()
invariant = normforge.RMSNorm(16)
assert type(pickle.loads(stored)) is type(plain) is not type(invariant)
for norm in (plain, invariant):
    assert type(pickle.loads(pickle.dumps(norm))) is type(norm)
print(type(plain).__module__, type(invariant).__module__)
"""


def test_pickles_do_not_follow_the_switch_to_batch_invariant_norms(tmp_path: Path) -> None:
    assert run(SWITCH, tmp_path, "h200") == "normforge.rmsnorm normforge.batch_invariant"


FOREIGN = """
import sys
import warnings
sys.path.insert(0, "{folder}")
import generator, normforge, torch
assert generator.__file__.startswith("{folder}")
print(torch.ops.normforge.rms_norm.v2.name())
"""


def test_a_module_of_the_tuners_name_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "generator").mkdir()
    (tmp_path / "generator" / "__init__.py").write_text("")
    assert run(FOREIGN, tmp_path, "h200") == "normforge::rms_norm.v2"


SAVE = """
import pickle, torch, normforge, normforge.layernorm, normforge.batch_invariant
torch.manual_seed(0)
model = torch.nn.Sequential(
    normforge.RMSNorm(16), normforge.layernorm.LayerNorm(16), normforge.batch_invariant.RMSNorm(16)
)
x = torch.randn(4, 16)
pickle.dump((model, x, model(x)), open("{folder}/model.pkl", "wb"))
torch.save((x, model(x)), "{folder}/numbers.pt")
torch.export.save(torch.export.export(model, (x,)), "{folder}/model.pt2")
print(normforge.explain(4096, 4096, "bf16")["gpu"])
"""
LOAD = """
import pickle, torch
{imports}
model, x, wanted = pickle.load(open("{folder}/model.pkl", "rb"))
assert torch.equal(model(x), wanted)
model(x).sum().backward()
print(normforge.explain(4096, 4096, "bf16")["gpu"])
"""
LOAD_GRAPH = """
import torch
import normforge  # no name of it is used before the graph has run
program = torch.export.load("{folder}/model.pt2")
x, wanted = torch.load("{folder}/numbers.pt")
found = program.module()(x)
assert torch.equal(found, wanted)
found.sum().backward()
names = [str(node.target) for node in program.graph.nodes]
assert names.count("normforge.rms_norm.v2") == 2, names
print(normforge.explain(4096, 4096, "bf16")["gpu"])
"""


def run(script: str, folder: Path, gpu: str) -> str:
    program = script.replace("{folder}", str(folder))
    done = run_fresh(program, folder, [REPOSITORY], imported=INDUCTOR, NORMFORGE_GPU=gpu)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_pickled_and_exported_models_run_with_the_tables_of_another_gpu(tmp_path: Path) -> None:
    saved = run(SAVE, tmp_path, "h200")
    for script in (LOAD.replace("{imports}", "import normforge"), LOAD_GRAPH):
        loaded = run(script, tmp_path, "h100,h200")  # there is no LayerNorm for the H100
        assert loaded.startswith("NVIDIA H100") and saved.startswith("NVIDIA H200")


SAVE_NAMED = """
import torch
from generated.h200 import layernorm_backward, rmsnorm_backward, rmsnorm_invariant_backward
from generated.h200 import rmsnorm_rope_backward, rope

class Every(torch.nn.Module):
    def forward(self, x, weight, cos, sin):
        return [
            layernorm_backward.layer_norm(x, weight),
            rmsnorm_backward.rms_norm(x, weight),
            rmsnorm_invariant_backward.rms_norm(x, weight),
            rmsnorm_rope_backward.rms_norm_rope(x, weight, cos, sin),
            rope.apply_rope(x, cos, sin),
        ]

torch.manual_seed(0)
x, *others = torch.randn(2, 4, 16), torch.randn(16), torch.randn(2, 16), torch.randn(2, 16)
given = (x.requires_grad_(), *others)
torch.save((given, Every()(*given)), "{folder}/numbers.pt")
torch.export.save(torch.export.export(Every(), given), "{folder}/model.pt2")
"""
LOAD_NAMED = """
import sys, torch, normforge
program = torch.export.load("{folder}/model.pt2")
given, wanted = torch.load("{folder}/numbers.pt")
found = program.module()(*given)
assert all(map(torch.equal, found, wanted))
sum(found).sum().backward()
asked = [a for n in program.graph.nodes for a in n.args if n.op == "call_function"]
print(*sorted(name for name in asked if isinstance(name, str)))
from normforge import gated_packages, quantized_packages  # no export has operators of these
for served, operation in (
    (gated_packages.SERVED, "gated_rmsnorm_backward"),
    (quantized_packages.SERVED, "rmsnorm_fp8_forward"),
):
    assert served("h200/" + operation).name == "h200/" + operation
assert not any(name.startswith("generated") for name in sys.modules)
"""


def test_a_graph_brings_the_packages_of_the_gpu_that_it_names(tmp_path: Path) -> None:
    run(SAVE_NAMED, tmp_path, "h200")
    operations = ["layernorm_backward", "rmsnorm_backward", "rmsnorm_invariant_backward"]
    operations += ["rmsnorm_rope_backward", "rope"]
    assert run(LOAD_NAMED, tmp_path, "h100").split() == [f"h200/{name}" for name in operations]


@pytest.mark.parametrize("order", ["", "FASTEST_FIRST", "PCI_BUS_ID"])
@pytest.mark.parametrize("names", [["NVIDIA H200"] * 2, ["NVIDIA L40S", "NVIDIA H200"]])
def test_nvml_is_believed_where_it_counts_gpus_as_cuda_does(
    monkeypatch: pytest.MonkeyPatch, order: str, names: list[str]
) -> None:
    """CUDA has the fastest GPU first, unless it is told to count along the bus as NVML does."""
    nvml = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(names),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": lambda uuid: int(uuid[-1]),
        "nvmlDeviceGetName": lambda handle: names[handle],
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
    }
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(**nvml))
    monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    assert this_gpu._first_visible("GPU-1") == Gpu(names[1], (9, 0))
    if order == "PCI_BUS_ID" or len(set(names)) == 1:
        assert this_gpu._first_visible("1") == Gpu(names[1], (9, 0))
    else:
        with pytest.raises(LookupError, match="the fastest GPU first"):
            this_gpu._first_visible("1")


@pytest.mark.parametrize("folders", [["h20", "h200"], ["h200", "h20"]])
def test_a_gpu_has_the_package_of_its_whole_name(folders: list[str]) -> None:
    known = {name: packages.Tuned(Path(name), "sm_90a", name.upper()) for name in folders}
    told: list[str] = []
    for name, title in (("h200", "NVIDIA H200"), ("h20", "NVIDIA H20-3e"), ("h20", "H20")):
        assert packages.choose(known, Gpu(title, (9, 0)), warn=told.append) == name
    assert told == []
    assert packages.choose(known, Gpu("NVIDIA GH200", (9, 0)), warn=told.append) == folders[0]
    assert len(told) == 1


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3 MIG 3g.40gb"])
def test_a_card_of_the_same_name_with_other_sms_is_said(machine: Any, name: str) -> None:
    machine.setattr(packages, "gpu_of", lambda device: Gpu(name, (9, 0), 114))
    source = Chosen("rmsnorm_backward")
    with pytest.warns(UserWarning, match=f"{name} has 114 SMs, .* tuned for the 132 of H100"):
        assert source(0).backward.target["name"] == "h100"
    for sms in (132, 0):  # 0: not known
        machine.setattr(packages, "gpu_of", lambda device, sms=sms: Gpu(name, (9, 0), sms))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert Chosen("rmsnorm_backward")(0).backward.target["name"] == "h100"
