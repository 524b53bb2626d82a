"""Operations that users bring: two files in a folder, from the signature to gradients."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from generator import operations as known
from generator.emulate import find_compiler
from generator.emulate.check import check_variant
from generator.errors import NormforgeError
from generator.kernels import render
from generator.kernels.compile_pool import CompilePool
from generator.kernels.cubin_cache import compile_variant
from generator.kernels.resource_gate import refuse
from generator.kernels.strategies import NO_SUMS, STRATEGIES
from generator.kernels.variant import Variant
from generator.operations import own
from generator.paths import REPOSITORY
from generator.problem import Problem
from normforge import operations as library
from normforge.operations.formula import evaluate
from normforge.own import _SERVED, OwnPackage, _operator_of
from normforge.serve.rows import RowServer
from normforge.spec import plan_launch
from tests.support.forward import H200
from tests.support.samples import plain_variant

EXAMPLES = REPOSITORY / "examples" / "own_operation"
NAMES = ("softmax_backward", "modulated_rmsnorm_backward")
CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget behind each test what it registers."""
    monkeypatch.setenv(own.OWN_OPERATIONS, "")
    render._file.cache_clear()  # its keys are names, and a test has versions
    render.environment.cache_clear()
    before = (dict(known.OPERATIONS), dict(library.OPERATIONS), dict(own.FILES))
    yield
    for table, was in zip((known.OPERATIONS, library.OPERATIONS, own.FILES), before, strict=True):
        table.clear()
        table.update(was)


def add(path: Path) -> str:
    return known.add_operation(path, known.OPERATIONS)


def variants(name: str) -> list[tuple[Problem, Variant]]:
    """A variant of every pipeline, strategy and kind of row."""
    found = []
    sums = library.signature_of(name).column_sums
    strategies = [s for s in STRATEGIES if s.deterministic] if sums else [NO_SUMS]
    for i, strategy in enumerate(strategies):
        for pipeline in ("bulk", "async", "direct"):
            problem = Problem.parse(("64x1024:bf16", "64x512:fp32", "50x1024:fp16")[i % 3], name)
            knobs: dict[str, Any] = {"strategy": strategy.name, "pipeline": pipeline}
            if not sums:
                knobs["grid"] = "rows" if pipeline == "bulk" else "full"
            found.append((problem, plain_variant(problem, H200, **knobs)))
    return found


@needs_compiler
@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_kernel_computes_it_under_many_schedules(name: str) -> None:
    add(EXAMPLES / f"{name}.py")
    for problem, variant in variants(name):
        check = check_variant(variant, problem, schedules=4)
        assert check.passed, (variant, check.problems, check.note)
        outputs = known.operation_of(problem).outputs(problem)
        assert check.errors.keys() == {out.name for out in outputs}


LAYER_SCALE = """
from normforge.operations import RowOperation, Signature, columns, rows, rows_out, sums

OPERATION = RowOperation(
    name="layer_scale_backward",
    signature=Signature(
        rows("x"), rows("dy"), columns("gamma"), rows_out("dx"), sums("dgamma"), row_sums=0
    ),
    terms=lambda x, dy, gamma: {"dx": (dy * gamma,), "dgamma": (dy * x,)},
    forward=lambda x, gamma: (x * gamma, {"x": x, "gamma": gamma}),
    gradients={"x": "dx", "gamma": "dgamma"},
)
"""
OF_ROW_SUMS = {
    "row_sums": "{% block factors %}\n      float f = {{ row_sums[0] }};\n{% endblock %}\n",
    "row_terms": "{% block row_terms %}\n{% endblock %}\n",
    "inverse_columns": "{% block factors %}\n      float f = inverse_columns;\n{% endblock %}\n",
}
LAYER_SCALE_KERNEL = """{% extends "row_kernel.cu.j2" %}
{% block outputs %}
          {{ dx }} = __fmul_rn({{ dy }}, {{ gamma }});
          {{ dgamma[0] }} = __fmaf_rn({{ x }}, {{ dy }}, {{ dgamma[0] }});
{% endblock %}
"""


def layer_scale(folder: Path) -> str:
    """An operation with sums over the rows and none over a row."""
    (folder / "layer_scale_backward.py").write_text(LAYER_SCALE)
    (folder / "layer_scale_backward.cu.j2").write_text(LAYER_SCALE_KERNEL)
    return add(folder / "layer_scale_backward.py")


@needs_compiler
def test_an_operation_may_have_no_sums_over_a_row(tmp_path: Path) -> None:
    name = layer_scale(tmp_path)
    clusters = [
        (problem, plain_variant(problem, H200, **knobs))
        for problem in [Problem.parse("40x8192:bf16", name)]
        for pipeline in ("bulk", "async", "producer")
        for knobs in [
            {"cluster": 2, "threads_per_row": 256, "pipeline": pipeline, "strategy": "separate"}
        ]
    ]
    assert all(render.render(v).count("blocks.end_batch(partial)") == 1 for _, v in clusters)
    for problem, variant in (*variants(name), *clusters):
        check = check_variant(variant, problem, schedules=4)
        assert check.passed, (variant, check.problems, check.note)
        assert check.errors.keys() == {"dx", "dgamma"}


def test_a_sum_of_inputs_is_for_operations_of_the_library(tmp_path: Path) -> None:
    total = 'rows_out("h").__class__("h", "rows", output=True, sum_of=("x", "dy"))'
    text = LAYER_SCALE.replace('rows_out("dx")', f'rows_out("dx"), {total}')
    text = (
        text.replace("lambda x, dy, gamma:", "lambda h, gamma:")
        .replace("dy * x", "h")
        .replace("dy *", "h *")
    )
    (tmp_path / "layer_scale_backward.py").write_text(text)
    (tmp_path / "layer_scale_backward.cu.j2").write_text(LAYER_SCALE_KERNEL)
    with pytest.raises(NormforgeError, match="or a sum of inputs is for operations of the library"):
        add(tmp_path / "layer_scale_backward.py")


@pytest.mark.parametrize("word", OF_ROW_SUMS)
def test_a_template_without_row_sums_may_not_ask_for_them(tmp_path: Path, word: str) -> None:
    (tmp_path / "layer_scale_backward.py").write_text(LAYER_SCALE)
    text = LAYER_SCALE_KERNEL + OF_ROW_SUMS[word]
    (tmp_path / "layer_scale_backward.cu.j2").write_text(text)
    with pytest.raises(NormforgeError, match=f"has {word}, and the signature says row_sums=0"):
        add(tmp_path / "layer_scale_backward.py")


@pytest.mark.parametrize("name", NAMES)
def test_terms_are_the_gradients_of_the_forward(name: str) -> None:
    operation = library.OPERATIONS[add(EXAMPLES / f"{name}.py")]
    assert operation.forward is not None
    signature = operation.signature
    given = {
        argument: torch.randn(
            (7, 24) if signature[gradient].role == "rows" else 24, dtype=torch.float64
        ).requires_grad_()
        for argument, gradient in operation.gradients.items()
    }
    result, saved = operation.forward(**given)
    dy = torch.randn_like(result)
    exact = torch.autograd.grad(result, list(given.values()), dy)
    incoming = next(t.name for t in signature.early if t.name not in saved)
    found = evaluate(operation, {**saved, incoming: dy})
    for gradient, expected in zip(operation.gradients.values(), exact, strict=True):
        torch.testing.assert_close(found[gradient], expected, rtol=1e-9, atol=1e-9)


TRAIN = """
import sys, torch
sys.path.insert(0, {folder!r})
import {name} as package

shapes = {{"rows": (3, 5, 64), "columns": (64,), "row": (3, 5, 1)}}
torch.manual_seed(0)
given = [torch.randn(shapes[kind], dtype=torch.float64).requires_grad_() for kind in {kinds!r}]
forward = getattr(package, {function!r})
assert torch.autograd.gradcheck(forward, given)
eager = torch.autograd.grad(forward(*given).square().sum(), given)
compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
graph = torch.autograd.grad(compiled(*given).square().sum(), given)
for one, other in zip(eager, graph):
    torch.testing.assert_close(one, other)
empty = [torch.zeros((0, 64) if one.dim() > 1 else 64).requires_grad_() for one in given]
forward(*empty).sum().backward()
assert all(one.grad.shape == one.shape and not one.grad.any() for one in empty)
narrow = [one.detach().bfloat16().requires_grad_() for one in given]
forward(*narrow).sum().backward()
assert all(one.grad.dtype == torch.bfloat16 for one in narrow)
inputs = [1e-6 if kind == "number" else torch.rand(shapes[kind]) for kind in {inputs!r}]
torch.library.opcheck(getattr(torch.ops.normforge, "own_{name}").v2, (*inputs, {name!r}))
print(package.explain(64, 1024, "bf16")["kernel"])
"""


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kinds"),
    [("softmax_backward", ["rows"]), ("modulated_rmsnorm_backward", ["rows", "rows", "columns"])],
)
def test_a_package_trains(tmp_path: Path, name: str, kinds: list[str]) -> None:
    """tune.py, where the file lies; the package has no other use for that folder."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for file in EXAMPLES.glob(f"{name}*"):
        shutil.copy(file, folder)
    line = [sys.executable, "tune.py", "--op", str(folder / f"{name}.py"), "--gpu", "h200"]
    line += ["--shapes", "64x1024:bf16", "--trials", "3", "--out", str(tmp_path / "out"), "--json"]
    done = subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (shape,) = json.loads(done.stdout)["shapes"]
    assert any("CPU emulator" in check for check in shape["checks"])
    shutil.rmtree(folder)
    add(EXAMPLES / f"{name}.py")
    train = TRAIN.format(
        folder=str(tmp_path / "out"),
        inputs=[tensor.role for tensor in library.signature_of(name).inputs],
        **{"name": name, "kinds": kinds, "function": name.removesuffix("_backward")},
    )
    done = subprocess.run(
        [sys.executable, "-c", train], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == shape["variant"]


# ---- What is refused, in one sentence ------------------------------------------------------------

REFUSED = {
    "a name of ours": ("py", 'name="softmax_backward"', 'name="rmsnorm_backward"', "there is an"),
    "another file name": ("py", 'name="softmax_backward"', 'name="mine"', "is called mine.py"),
    "no operation": ("py", "OPERATION =", "OTHER =", "call it OPERATION"),
    "a file that fails": ("py", "import torch\n", "import torch\n1 / 0\n", "division by zero"),
    "an unknown role": (
        "py",
        'rows("y")',
        'rows("y").__class__("y", "pages")',
        "its role is one of rows, row, columns, sums",
    ),
    "a reserved name": ("py", '"dx"', '"rank"', "cannot be called 'rank'"),
    "a name twice": ("py", 'rows("dy")', 'rows("y")', "two tensors are called 'y'"),
    "no output": ("py", ', rows_out("dx")', "", "at least one tensor of rows"),
    "terms of others": ("py", "def terms(y:", "def terms(q:", "terms() takes q, dy"),
    "no term of an output": ("py", '{"dx": (y', '{"dz": (y', "terms() has no 'dx'"),
    "another shape": (
        "py",
        "(y * dy, -y * (y * dy).sum(-1, keepdim=True))",
        "((y * dy).sum(-1),)",
        "terms() gives dx the shape (5,), and it is (5, 24)",
    ),
    "a function that packages have": (
        "py",
        'name="softmax_backward"',
        'name="explain_backward"',
        "called explain: choose",
    ),
    "a word of C++": ("py", 'rows("y")', 'rows("for")', "cannot be called 'for'"),
    "another gradient": (
        "py",
        "(y * dy, -y",
        "(y * dy, y",
        "not the gradient of forward() in x",
    ),
    "a forward that saves another name": ("py", '{"y": y}', '{"q": y}', "saves 'q'"),
    "a forward that saves nothing": ("py", '{"y": y}', "{}", "to the incoming gradient"),
    "an output never written": ("cu.j2", "{{ dx }} =", "const float dx =", "never writes {{ dx }}"),
    "no row sum": ("cu.j2", "row_sums[0]", "y", "never adds to {{ row_sums[0] }}"),
    "pairs of columns": ("py", 'rows("y")', 'rows("y", paired=True)', "of the library alone"),
    "an output that is asked for": (
        "py",
        'rows_out("dx")',
        'rows_out("dx", extra=True)',
        "written if asked for or a sum of inputs is for operations of the library alone",
    ),
    "a broken template": ("cu.j2", "{% endblock %}", "{% endblok %}", "is no template"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_with_an_operation_is_said_before_anything_runs(
    tmp_path: Path, name: str
) -> None:
    suffix, old, new, said = REFUSED[name]
    for kind in ("py", "cu.j2"):
        text = (EXAMPLES / f"softmax_backward.{kind}").read_text()
        assert kind != suffix or old in text
        changed = text.replace(old, new) if kind == suffix else text
        (tmp_path / f"softmax_backward.{kind}").write_text(changed)
    with pytest.raises(NormforgeError) as error:
        add(tmp_path / "softmax_backward.py")
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert "softmax_backward" not in library.OPERATIONS
    assert "softmax_backward" not in known.OPERATIONS


def test_flags_are_for_operations_of_the_library() -> None:
    operation = library.RowOperation(
        name="flagged",
        signature=library.Signature(library.rows("x"), library.rows_out("y"), library.flag("f")),
        terms=lambda x, f: {"y": (x,)},
        forward=lambda x: (x, {}),
        gradients={"x": "y"},
    )
    (fault,) = own._faults(operation, Path("flagged.py"))
    assert "flags are for operations of the library alone" in fault


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NormforgeError, match=r"there is no file .*/mine\.py"):
        add(tmp_path / "mine.py")


def test_a_missing_template_is_named(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "softmax_backward.py", tmp_path)
    with pytest.raises(NormforgeError, match=r"softmax_backward\.cu\.j2 is not beside it"):
        add(tmp_path / "softmax_backward.py")


SHADOWED = {
    'rows("y")': 'rows("x")',
    "(y: torch": "(x: torch",
    '{"y": y}': '{"x": y}',
    "(y * dy, -y * (y * dy)": "(x * dy, -x * (x * dy)",
    "{{ y }}": "{{ x }}",
}


def test_a_changed_value_under_the_name_of_an_argument_is_what_is_saved(tmp_path: Path) -> None:
    """forward() saves softmax(x) as x."""
    for kind in ("py", "cu.j2"):
        text = (EXAMPLES / f"softmax_backward.{kind}").read_text()
        for old, new in SHADOWED.items():
            text = text.replace(old, new)
        (tmp_path / f"softmax_backward.{kind}").write_text(text)
    operation = library.OPERATIONS[add(tmp_path / "softmax_backward.py")]
    package = OwnPackage.__new__(OwnPackage)
    package.operation = operation
    served = RowServer(operation, lambda device: None)  # type: ignore[arg-type,return-value]
    package.backward = served_by(served)  # type: ignore[method-assign]
    x = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(package.call, x)


WITH_A_NUMBER_OF_EACH_ROW = {
    "import RowOperation, Signature, rows, rows_out": (
        "import RowOperation, Signature, row_out, rows, rows_out"
    ),
    'rows_out("dx"), row_sums=1': 'row_out("size"), rows_out("dx"), row_sums=2',
    "keepdim=True))}": 'keepdim=True)), "size": ((y * y).sum(-1, keepdim=True),)}',
    "{% block outputs %}": (
        "{% block factors %}\n      {{ size }} = {{ row_sums[1] }};\n{% endblock %}\n"
        "{% block outputs %}"
    ),
    "{{ row_sums[0] }});\n{% endblock %}\n{% block factors": (
        "{{ row_sums[0] }});\n          {{ row_sums[1] }} = __fmaf_rn({{ y }}, {{ y }}, "
        "{{ row_sums[1] }});\n{% endblock %}\n{% block factors"
    ),
}


@needs_compiler
def test_an_operation_may_write_a_number_of_each_row(tmp_path: Path) -> None:
    for kind in ("py", "cu.j2"):
        text = (EXAMPLES / f"softmax_backward.{kind}").read_text()
        for old, new in WITH_A_NUMBER_OF_EACH_ROW.items():
            text = text.replace(old, new)
        (tmp_path / f"softmax_backward.{kind}").write_text(text)
    name = add(tmp_path / "softmax_backward.py")
    problem = Problem.parse("37x1024:bf16", name)
    variant = plain_variant(replace(problem, M=4096), H200, strategy="none", pipeline="async")
    check = check_variant(variant, problem, schedules=2)
    assert check.problems == () and check.errors.keys() == {"dx", "size"}
    package = OwnPackage.__new__(OwnPackage)
    package.operation, package.name = library.OPERATIONS[name], "numbers_of_rows"
    package.serve = RowServer(package.operation, lambda device: None)  # type: ignore[arg-type,return-value]
    _SERVED.add(package.name, package)
    package._operator = _operator_of(package.operation)
    y, dy = torch.softmax(torch.randn(2, 3, 8), -1), torch.randn(2, 3, 8)
    found = package.backward(y=y, dy=dy)
    assert found.keys() == {"dx", "size"} and found["size"].shape == (2, 3, 1)
    torch.testing.assert_close(found["size"], y.square().sum(-1, keepdim=True))
    with pytest.raises(TypeError, match="softmax_backward takes no 'dyy'"):
        package.backward(y=y, dy=dy, dyy=dy)


def served_by(server: RowServer) -> Any:
    return lambda **tensors: server(tensors)


def test_columns_that_the_forward_computes_have_the_dtype_of_columns(tmp_path: Path) -> None:
    for kind in ("py", "cu.j2"):
        text = (EXAMPLES / f"modulated_rmsnorm_backward.{kind}").read_text()
        text = text.replace('"weight": weight}', '"weight": weight + 0}')
        (tmp_path / f"modulated_rmsnorm_backward.{kind}").write_text(text)
    name = add(tmp_path / "modulated_rmsnorm_backward.py")
    for text, dtype in (("5x24:bf16", torch.bfloat16), ("5x24:bf16:fp32", torch.float32)):
        problem = Problem.parse(text, name)
        assert known.operation_of(problem).make_inputs(problem, CPU).weight.dtype == dtype
    operation, wide = library.OPERATIONS[name], torch.rand(24, requires_grad=True)
    package = OwnPackage.__new__(OwnPackage)
    package.operation = operation
    given = [
        wide if operation.signature[gradient].role == "sums" else torch.rand(5, 24).bfloat16()
        for gradient in operation.gradients.values()
    ]
    node = package.call(*given).grad_fn
    assert node is not None
    saved = dict(zip(node.names, node.saved_tensors, strict=True))  # type: ignore[attr-defined]
    assert saved["weight"].dtype == torch.float32 and saved["weight"] is not wide


def test_a_result_that_the_backward_needs_is_saved_itself() -> None:
    """A copy of the same numbers would take as much memory again."""
    package = OwnPackage.__new__(OwnPackage)
    package.operation = library.OPERATIONS[add(EXAMPLES / "softmax_backward.py")]
    y = package.call(torch.randn(4, 9).bfloat16().requires_grad_())
    (saved,) = y.grad_fn.saved_tensors  # type: ignore[union-attr]
    assert saved.data_ptr() == y.data_ptr()


@pytest.mark.parametrize("count", [0, 3])
def test_a_column_has_one_or_two_sums(count: int) -> None:
    with pytest.raises(ValueError, match="counts one or two sums"):
        library.Signature(library.rows("x"), library.rows_out("y"), library.sums("s", count=count))


def test_a_grid_of_as_many_ctas_as_rows_need_is_not_refused_for_its_size() -> None:
    add(EXAMPLES / "softmax_backward.py")
    problem = Problem.parse("65536x1024:bf16", "softmax_backward")
    knobs: dict[str, Any] = {"strategy": "none", "pipeline": "direct", "grid": "rows"}
    variant = plain_variant(problem, H200, **knobs)
    compiled = compile_variant(variant, H200.arch)
    assert refuse(variant, compiled, problem, H200) is None
    assert plan_launch(variant.spec(H200.sms), problem.M).grid > H200.sms * 32


@needs_compiler
def test_a_kernel_that_disagrees_with_the_formula_is_found(tmp_path: Path) -> None:
    for kind in ("py", "cu.j2"):
        text = (EXAMPLES / f"softmax_backward.{kind}").read_text()
        text = text.replace("-{{ row_sums[0] }}", "{{ row_sums[0] }}")
        (tmp_path / f"softmax_backward.{kind}").write_text(text)
    add(tmp_path / "softmax_backward.py")
    problem, variant = variants("softmax_backward")[0]
    check = check_variant(variant, problem, schedules=2)
    assert any("float64 gives" in found for found in check.problems)


@pytest.mark.parametrize("text", ["64x64:bf16:fp32", "64x64:bf16+offset", "64x64:bf16+residual"])
def test_a_problem_has_the_options_of_its_signature_only(text: str) -> None:
    name = add(EXAMPLES / "softmax_backward.py")
    with pytest.raises(NormforgeError, match="softmax_backward has no"):
        Problem.parse(text, name)


def test_processes_that_compile_know_the_operation(tmp_path: Path) -> None:
    """Though they import no PyTorch otherwise."""
    problem = Problem.parse("64x1024:bf16", add(EXAMPLES / "softmax_backward.py"))
    variant = plain_variant(problem, H200, strategy=NO_SUMS.name, grid="full")
    with CompilePool(H200.arch, 1, tmp_path) as pool:
        assert pool.submit(variant).result().error == ""
