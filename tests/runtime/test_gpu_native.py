"""Native launches on a GPU have the bits of those through Python."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from generator.operations.rmsnorm_backward import make_inputs
from generator.package.emit import emit_package
from generator.problem import Problem
from generator.target import Target
from normforge.api import Package
from normforge.frontends.layer_norm import LayerNormPackage
from normforge.operations import LAYERNORM_FORWARD
from tests.support.entry_points import Training, equal_bits
from tests.support.native import (
    OPERATIONS,
    by_backward,
    in_threads,
    installed_natively,
    layer_norm_only,
    mean_of,
    module_of,
    norm,
)
from tests.support.samples import compiled_fallbacks, compiled_forwards, planted_entry

TUNED = (
    *(
        ("68x1024:bf16", "column_slices"),
        ("777x1024:bf16", "separate"),
        ("68x1024:fp16", "mailbox"),
    ),
    *(("68x1024:fp32", "separate"), ("68x1024:bf16:fp32", "column_slices")),
)


@pytest.fixture(scope="module", params=OPERATIONS)
def operation(request: pytest.FixtureRequest) -> str:
    """The operation of the packages."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def on_gpu(here: Target, operation: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of a few tuned shapes and the fallback kernels; beside one of LayerNorm, a package
    of its forward."""
    folder = tmp_path_factory.mktemp("native")
    problems = [(Problem.parse(shape, operation), strategy) for shape, strategy in TUNED]
    entries = [planted_entry(problem, here, strategy=strategy) for problem, strategy in problems]
    fallbacks = compiled_fallbacks(here, operation)
    emit_package(entries, fallbacks, here, folder / operation)
    if operation == OPERATIONS[1]:
        name = LAYERNORM_FORWARD.name
        forwards = [Problem.parse(shape, name) for shape, _ in TUNED]
        entries = [planted_entry(problem, here, strategy="none") for problem in forwards]
        emit_package(entries, compiled_fallbacks(here, name), here, folder / name)
    return folder / operation


class Pair:
    """One package without and with the native path. fallbacks: how many backwards of nodes in C++
    went to Python."""

    def __init__(self, folder: Path) -> None:
        made: Any = LayerNormPackage if folder.name == OPERATIONS[1] else Package
        self.python, self.native = made(folder, "python"), made(folder, "native")
        self.fallbacks = 0
        start = self.native._native.start

        def started(forward: Any, gradients: Any, *others: Any) -> None:
            def counted(*given: Any) -> Any:
                self.fallbacks += 1
                return gradients(*given)

            start(forward, counted, *others)

        self.native._native.start = started
        self.native.use_native()


@pytest.fixture
def pair(on_gpu: Path) -> Pair:
    return Pair(on_gpu)


def gpu_inputs(shape: str, seed: int = 0) -> Any:
    """Return x and the weight, which a bias may be, too, and dy."""
    problem = Problem.parse(shape)
    made = make_inputs(problem, torch.device("cuda", 0))
    generator = torch.Generator("cuda").manual_seed(seed)
    dy = torch.randn(made.dy.shape, device="cuda", generator=generator).to(made.dy.dtype)
    return made.x.requires_grad_(), made.weight.requires_grad_(), dy


def gradients(package: Any, x: Any, weight: Any, dy: Any) -> list[torch.Tensor]:
    """Return the gradients of a norm, of which LayerNorm has a bias of its own."""
    leaves = (x, weight)
    if isinstance(package, LayerNormPackage):
        leaves = (*leaves, weight.detach().clone().requires_grad_())
    return list(torch.autograd.grad(norm(package, *leaves), leaves, dy))


def steps(package: Any, shape: str, count: int = 6, seed: int = 0) -> list[torch.Tensor]:
    x, weight, dy = gpu_inputs(shape, seed)
    results: list[torch.Tensor] = []
    for _ in range(count):
        results += gradients(package, x, weight, dy)
    return results


GPU_SHAPES = (
    *("68x1024:bf16", "777x1024:bf16", "68x1024:fp16", "68x1024:fp32", "68x1024:bf16:fp32"),
    *("70x1024:bf16", "3001x1024:bf16", "100000x1024:bf16", "1x1024:bf16"),
    *("500x768:bf16", "500x1001:fp16", "500x768:fp32", "500x768:bf16:fp32"),
)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_gpu_native_launches_give_the_bits_of_python(pair: Pair, shape: str) -> None:
    wanted = steps(pair.python, shape)
    found = steps(pair.native, shape)
    assert equal_bits(found, wanted)
    before = pair.fallbacks
    assert before < 6, "not one backward was native"
    assert equal_bits(steps(pair.native, shape), wanted) and pair.fallbacks == before
    x, weight, dy = gpu_inputs(shape)
    rstd = torch.rsqrt(x.detach().float().square().mean(-1, keepdim=True) + 1e-6)
    given = (dy, x.detach(), rstd, weight.detach())
    if not isinstance(pair.native, LayerNormPackage):
        direct = pair.native._native.backward(*given)
    elif (served := pair.native._native.backward(*given, mean_of(rstd))) is not None:
        direct = served[0], *served[1]
    assert equal_bits(list(direct), list(by_backward(pair.python, *given)))


@pytest.fixture(scope="module")
def forwards(here: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of forward kernels: one tuned shape, and the fallback kernels."""
    folder = tmp_path_factory.mktemp("native_forward") / "rmsnorm_backward"
    emit_package([], [], here, folder, compiled_forwards(here, "4096x256:bf16"))
    return folder


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", ["4096x256:bf16", "777x1024:bf16", "300x1000:fp16", "68x1024:bf16:fp32"]
)
def test_gpu_native_forwards_give_the_bits_of_python(forwards: Path, shape: str) -> None:
    python, native = Package(forwards, "python"), Package(forwards, "native")
    native.use_native()
    x, weight, residual = (tensor.detach() for tensor in gpu_inputs(shape))

    def served(package: Package) -> list[torch.Tensor]:
        return [
            package.rms_norm(x, weight, 1e-6),
            *package.rmsnorm_forward(x, weight, weight_offset=1.0),
            *package.ops.rms_norm(x, weight, 1e-6, 0.0, package.name),
            *package.ops.add_rms_norm(x, residual, weight, 1e-6, 0.0, package.name),
        ]

    for _ in range(3):
        found = served(native)
    assert native._forward.native is not None
    for other in (None, residual):
        assert native._forward.native(x, weight, other, 1e-6, 0.0) is not None
    assert equal_bits(found, served(python))


@pytest.mark.gpu
@layer_norm_only
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", ["68x1024:bf16", "777x1024:fp16", "300x1000:bf16"])
def test_gpu_native_layer_norms_give_the_bits_of_python(
    pair: Pair, operation: str, shape: str, biased: bool
) -> None:
    x, weight, _ = (tensor.detach() for tensor in gpu_inputs(shape))
    given = (x, weight, weight.flip(0) if biased else None, 1e-6)

    def served(package: Any) -> list[torch.Tensor]:
        of_graph = package.ops.layer_norm(x, None, *given[1:], package.name)
        return [package.layer_norm(*given), *package.layer_norm_forward(*given), *of_graph[:3]]

    for _ in range(3):
        found = served(pair.native)
    assert pair.native._native.forward(*given) is not None
    assert equal_bits(found, served(pair.python))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["68x1024:bf16", "777x1024:bf16"])
def test_gpu_compiled_backward_needs_no_python(
    pair: Pair, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, dy = gpu_inputs(shape)
    leaves = (x, weight, weight.detach().clone().requires_grad_())
    leaves = leaves if isinstance(pair.native, LayerNormPackage) else leaves[:2]
    compiled = torch.compile(partial(norm, pair.native), backend="aot_eager", fullgraph=True)

    def step() -> list[torch.Tensor]:
        return list(torch.autograd.grad(compiled(*leaves), leaves, dy))

    for _ in range(4):
        found = step()

    def fail(*_: Any) -> Any:
        raise AssertionError("Python serves the operator")

    monkeypatch.setattr(pair.native.ops, "_quick", fail)
    assert equal_bits(step(), found)
    assert equal_bits(found, steps(pair.python, shape, 1))


@pytest.mark.gpu
def test_gpu_scratch_grows_under_plans_that_are_in_use(pair: Pair) -> None:
    for shape in ("68x1024:bf16", "777x1024:bf16", "100000x1024:bf16", "500x768:bf16") * 2:
        assert equal_bits(steps(pair.native, shape), steps(pair.python, shape))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["68x1024:bf16", "777x1024:bf16"])
def test_gpu_two_streams_in_two_threads(pair: Pair, shape: str) -> None:
    wanted = [steps(pair.python, shape, 1, seed) for seed in range(2)]
    torch.cuda.synchronize()
    found: dict[int, list[torch.Tensor]] = {}

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            found[seed] = steps(pair.native, shape, 200, seed)
            torch.cuda.current_stream().synchronize()

    in_threads([lambda seed=seed: work(seed) for seed in range(2)])  # type: ignore[misc]
    assert pair.fallbacks < 50
    for seed in range(2):
        assert equal_bits(found[seed], wanted[seed] * 200)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["68x1024:bf16", "777x1024:bf16"])
def test_gpu_two_devices_in_turn(pair: Pair, shape: str) -> None:
    """The current device stays the first one; each has streams, plans and scratch of its own."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, {torch.cuda.device_count()} is here")
    wanted = [result.cpu() for result in steps(pair.python, shape, 1)]
    here = gpu_inputs(shape)
    there = [t.detach().to("cuda:1").requires_grad_(t.requires_grad) for t in here]
    for _ in range(8):
        for x, weight, dy in (here, there):
            grads = gradients(pair.native, x, weight, dy)
            rstd = torch.rsqrt(x.detach().float().square().mean(-1, keepdim=True) + 1e-6)
            given = (dy, x.detach(), rstd, weight.detach())
            direct = by_backward(pair.native, *given)
            assert torch.cuda.current_device() == 0
            assert {result.device for result in (*grads, *direct)} == {x.device}
            assert equal_bits([result.cpu() for result in grads], wanted)
            assert equal_bits(list(direct), list(by_backward(pair.python, *given)))
    assert pair.fallbacks < 8


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["68x1024:bf16", "777x1024:bf16"])
def test_gpu_native_and_python_calls_mix_on_one_stream(pair: Pair, shape: str) -> None:
    """A backward with an option goes through Python in between, on the same stream."""
    x, weight, dy = gpu_inputs(shape)
    rstd = torch.rsqrt(x.detach().float().square().mean(-1, keepdim=True) + 1e-6)
    wanted = steps(pair.python, shape, 1)
    wide = by_backward(pair.python, dy, x, rstd, weight, dw_dtype=torch.float32)
    results: list[torch.Tensor] = []
    mixed: list[Any] = []
    for _ in range(100):
        results += gradients(pair.native, x, weight, dy)
        mixed += by_backward(pair.native, dy, x, rstd, weight, dw_dtype=torch.float32)
    assert equal_bits(results, wanted * 100) and equal_bits(mixed, list(wide) * 100)
    assert pair.fallbacks < 10


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["68x1024:bf16", "777x1024:bf16"])
def test_gpu_captured_backward_goes_through_python(pair: Pair, shape: str) -> None:
    x, weight, dy = gpu_inputs(shape)

    def backward() -> list[torch.Tensor]:
        return gradients(pair.native, x, weight, dy)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        wanted = [backward() for _ in range(5)][-1]
    torch.cuda.current_stream().wait_stream(side)
    before, graph = pair.fallbacks, torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured = backward()
    assert pair.fallbacks == before + 1
    for _ in range(3):
        for result in captured:
            result.fill_(float("nan"))
        graph.replay()
        assert equal_bits(captured, wanted)
    with torch.cuda.stream(side):
        assert equal_bits(backward(), wanted)
    assert pair.fallbacks == before + 1


@pytest.mark.gpu
@pytest.mark.parametrize("threaded", [False, True])
def test_gpu_graph_that_is_kept_is_gone_through_again(pair: Pair, threaded: bool) -> None:
    x, weight, dy = gpu_inputs("777x1024:bf16")
    steps(pair.native, "777x1024:bf16")
    before = pair.fallbacks
    with torch.autograd.set_multithreading_enabled(threaded):
        y = norm(pair.native, x, weight)
        one, two = (torch.autograd.grad(y, (x, weight), dy, retain_graph=True) for _ in range(2))
    assert equal_bits(list(one), list(two))
    assert equal_bits(list(one), steps(pair.python, "777x1024:bf16", 1)[:2])
    assert pair.fallbacks == before


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_gpu_trainings_have_the_same_bits(
    pair: Pair, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The QK-norms are on slices and go through Python, the norms of the hidden size do not."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    sizes = {"width": 1024, "heads": 8, "tokens": 32}
    torch.use_deterministic_algorithms(deterministic)
    try:
        runs = [
            Training(partial(module_of, package), False, "cuda", torch.bfloat16, **sizes).train(8)
            for package in (pair.python, pair.native)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    assert equal_bits(*runs)
    assert 0 < pair.fallbacks < 8 * 9


def installed_steps(package: Any, shape: str, count: int = 6) -> list[torch.Tensor]:
    """Gradients by PyTorch's norm while the package is installed."""
    x, weight, dy = gpu_inputs(shape)
    theirs: Any = torch.nn.functional.rms_norm
    if isinstance(package, LayerNormPackage):
        theirs = torch.nn.functional.layer_norm
    results: list[torch.Tensor] = []
    with package.installed():
        for _ in range(count):
            y = theirs(x, weight.shape, weight, eps=1e-6)
            results += torch.autograd.grad(y, (x, weight), dy)
    return results


def asked(package: Any) -> list[None]:
    """Grows with every plain call of PyTorch's backward that Python serves, installed from now."""
    installation, calls = package._installation, []
    quick = installation._quick

    def counted(*given: Any) -> Any:
        calls.append(None)
        return quick(*given)

    installation._quick = counted
    return calls


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [shape for shape in GPU_SHAPES if shape.count(":") == 1])
def test_gpu_installed_native_backward_gives_the_bits_of_python(pair: Pair, shape: str) -> None:
    wanted, calls = installed_steps(pair.python, shape), asked(pair.native)
    assert equal_bits(installed_steps(pair.native, shape), wanted)
    before = len(calls)
    assert 0 < before < 6, "not one backward was native"
    assert equal_bits(installed_steps(pair.native, shape), wanted) and len(calls) == before


@pytest.mark.gpu
def test_gpu_native_path_that_starts_while_installed(on_gpu: Path) -> None:
    made: Any = LayerNormPackage if on_gpu.name == OPERATIONS[1] else Package
    package, shape = made(on_gpu), "777x1024:bf16"
    calls = asked(package)
    wanted = installed_steps(package, shape)
    with package.installed():
        package.use_native()
        assert installed_natively(package.ops.aten[-1])
        assert equal_bits(installed_steps(package, shape), wanted)
        before = len(calls)
        assert equal_bits(installed_steps(package, shape), wanted) and len(calls) == before
    assert not installed_natively(package.ops.aten[-1])


@pytest.mark.gpu
def test_gpu_trainings_of_pytorch_norms_have_the_same_bits(pair: Pair) -> None:
    """The norms of the hidden size are served natively, those of slices need not be."""
    runs, calls = [], asked(pair.native)
    for package in (pair.python, pair.native):
        with package.installed():
            module: Any = torch.nn.RMSNorm
            if isinstance(package, LayerNormPackage):
                module = torch.nn.LayerNorm
            sizes = {"width": 1024, "heads": 8, "tokens": 32}
            of_width = partial(module, eps=1e-6)
            runs.append(Training(of_width, False, "cuda", torch.bfloat16, **sizes).train(8))
    assert equal_bits(*runs)
    assert 0 < len(calls) < 8 * 9
