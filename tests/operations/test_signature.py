"""An operation of the library: its tensors, and its mathematics in PyTorch."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from generator.problem import Problem
from normforge import operations
from normforge.operations import (
    LAYERNORM_BACKWARD,
    OPERATIONS,
    RMSNORM_BACKWARD,
    RowOperation,
    Signature,
)
from normforge.operations.formula import evaluate, in_dtype, terms_of
from normforge.operations.tensor import (
    Tensor,
    added_columns,
    added_rows,
    columns,
    copied_rows,
    group,
    number,
    quantized,
    row,
    row_out,
    rows,
    rows_out,
    scales,
    summed_rows,
    sums,
)

M, N = 7, 128
FINE = (rows("a"), rows_out("o"))

# ---- What no row kernel can have -----------------------------------------------------------------

REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "an unknown role": (
        (*FINE, Tensor("p", "pages")),
        {},
        "'pages' is no tensor of a signature: its role is one of rows, row, columns, sums",
    ),
    "no tensor": ((*FINE, "b"), {}, "'b' is no tensor of a signature"),
    "a name of the kernel": ((*FINE, row("rank")), {}, "cannot be called 'rank'"),
    "a name of a loop": ((*FINE, row("u")), {}, "cannot be called 'u'"),
    "no name of C++": ((*FINE, row("b-c")), {}, "cannot be called 'b-c'"),
    "a name twice": ((*FINE, columns("a")), {}, "two tensors are called 'a'"),
    "no rows": ((row("r"), rows_out("o")), {}, "reads at least one tensor of rows"),
    "only rows that are added": (
        (added_rows("r", option="residual"), rows_out("o")),
        {},
        "reads at least one tensor of rows",
    ),
    "no output": ((rows("a"), sums("s")), {}, "writes at least one tensor of rows"),
    "only a copy": (
        (rows("a"), copied_rows("c", "o", option="residual")),
        {},
        "writes at least one tensor of rows",
    ),
    "two sums": ((*FINE, sums("s"), sums("t")), {}, "one tensor of sums at most, got s and t"),
    "two columns": (
        (*FINE, columns("g"), columns("h")),
        {},
        "one tensor of columns at most, got g and h",
    ),
    "two columns that are added": (
        (*FINE, columns("g"), added_columns("h"), added_columns("k")),
        {},
        "adds one tensor of columns at most",
    ),
    "columns that are added alone": (
        (*FINE, added_columns("h")),
        {},
        "adds one tensor of columns at most, to what others are a factor of",
    ),
    "fewer later sums": (
        FINE,
        {"row_sums": 2, "later_sums": 1},
        "no later sums or 2, got 1",
    ),
    "two that are added": (
        (*FINE, added_rows("b", "residual"), added_rows("c", "residual")),
        {},
        "adds one tensor of rows at most",
    ),
    "pairs of a number of a row": (
        (*FINE, Tensor("r", "row", paired=True)),
        {},
        "r cannot be read in pairs: rows that are read early and columns can",
    ),
    "scales of nothing": ((*FINE, scales("s", 32, "e8m0")), {}, "these are of what is quantized"),
    "no scales": ((*FINE, quantized("q")), {}, "what is quantized has scales"),
    "two that are quantized": (
        (*FINE, quantized("q"), quantized("p"), scales("s", 32, "e8m0")),
        {},
        "one tensor of quantized at most, got q and p",
    ),
    "scales of another kind": (
        (*FINE, quantized("q"), scales("s", 32, "e5m2")),
        {},
        "s are fp32 or e8m0, of blocks of at least 16 columns, got e5m2 of 32",
    ),
    "scales of few columns": (
        (*FINE, quantized("q"), scales("s", 8, "fp32")),
        {},
        "s are fp32 or e8m0, of blocks of at least 16 columns, got fp32 of 8",
    ),
    "a sum of what is read late": (
        (*FINE, added_rows("b", "residual"), summed_rows("h", FINE[0].name, "b")),
        {},
        "h is the sum of two tensors of rows that are read early: name these",
    ),
    "a sum of one": (
        (*FINE, summed_rows("h", FINE[0].name, FINE[0].name)),
        {},
        "h is the sum of two tensors of rows that are read early: name these",
    ),
    "less than no row sum": (FINE, {"row_sums": -1}, "0 to 4 row sums, got -1"),
    "too many row sums": (FINE, {"row_sums": 5}, "0 to 4 row sums, got 5"),
    "rows in no row sum": (FINE, {"row_sums": 0, "summed": True}, "leave out summed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_row_kernel_can_have_is_one_sentence(name: str) -> None:
    tensors, options, said = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        Signature(*tensors, **options)
    assert "\n" not in str(error.value)
    assert ". " not in str(error.value)


def test_no_tensor_has_the_name_of_another_argument() -> None:
    """Other arguments are those that the structure of every kernel has."""
    others = ("counters", "zeroed", "scratch", "rows", "gaps", "columns", "group")
    of_groups = ("heads", "group_factor", "period_factor", "period", "wide_groups", "together")
    for name in (*others, "dw_mode", "weight_offset", *of_groups):
        with pytest.raises(ValueError, match=f"cannot be called '{name}'"):
            Signature(*FINE, row(name))


def test_tensors_are_found_by_what_kernels_do_with_them() -> None:
    behind, first, second, written = row("r", behind=True), row("q"), row("s"), row_out("k")
    added, copied = added_rows("d", option="residual"), copied_rows("c", "o", option="residual")
    a, b, o, p, g, t = (*map(rows, "ab"), *map(rows_out, "op"), columns("g"), sums("t", count=2))
    signature = Signature(copied, first, a, o, behind, added, b, g, written, second, p, t)
    assert signature.leading == (copied, first, a, o, added, b, g, written, second, p, t)
    assert signature.behind == (behind,)
    assert signature.inputs == (first, a, behind, added, b, g, second)
    assert (signature.early, signature.late) == ((a, b), (added,))
    assert signature.statistics == (behind, first, second)
    assert signature.row_outputs == (written,)
    assert (signature.outputs, signature.copies) == ((o, p), (copied,))
    assert (signature.columns, signature.sums, signature.column_sums) == (g, t, 2)
    assert signature.strided == (a, b, added, o, p)
    assert signature.in_heads == (a, b)
    packed = rows_out("z", packed=True)
    assert Signature(*FINE, packed).in_heads == (FINE[0], packed)
    assert signature["b"] is b
    with pytest.raises(KeyError):
        signature["z"]
    assert (signature.groups, signature.paired, signature.pairs) == ((), (), False)
    assert Signature(*FINE).column_sums == 0


def test_columns_that_are_added_are_zeros_where_a_call_has_none() -> None:
    signature = operations.LAYERNORM_FORWARD.signature
    weight, bias = signature["weight"], signature["bias"]
    assert (signature.columns, signature.added_columns) == (weight, bias)
    assert signature.all_columns == (weight, bias)
    x = torch.randn(M, N, dtype=torch.float64)
    given = {"x": x, "eps": 1e-5, "weight": None, "bias": None}
    plain = evaluate(operations.LAYERNORM_FORWARD, given)["y"]
    torch.testing.assert_close(plain, torch.nn.functional.layer_norm(x, (N,)))
    b = torch.randn(N, dtype=torch.float64)
    found = evaluate(operations.LAYERNORM_FORWARD, {**given, "bias": b}, offset=0.5)["y"]
    torch.testing.assert_close(found, 1.5 * plain + b)


def test_a_signature_knows_of_pairs_of_columns() -> None:
    shared, paired = group("c"), rows("p", paired=True)
    signature = Signature(*FINE, shared)
    assert (signature.groups, signature.paired, signature.pairs) == ((shared,), (), True)
    assert signature.strided == (*FINE, shared)
    assert shared in signature.leading and shared.cpp == "const void* c;"
    signature = Signature(*FINE, paired)
    assert (signature.groups, signature.paired, signature.pairs) == ((), (paired,), True)
    assert Signature(*FINE, columns("g", paired=True)).pairs


def test_a_signature_knows_what_is_quantized() -> None:
    eighths, their_scales = quantized("q"), scales("s", 128, "fp32")
    signature = Signature(*FINE, eighths, their_scales)
    assert (signature.quantized, signature.scales) == (eighths, their_scales)
    assert signature.leading == (*FINE, eighths, their_scales)
    assert (signature.outputs, signature.strided) == ((FINE[1],), FINE)
    assert (eighths.cpp, their_scales.cpp) == ("unsigned char* q;", "float* s;")
    assert scales("s", 32, "e8m0").cpp == "unsigned char* s;"
    assert (Signature(*FINE).quantized, Signature(*FINE).scales) == (None, None)


def test_a_signature_knows_the_sum_that_its_terms_are_of() -> None:
    other, total = rows("b"), summed_rows("h", FINE[0].name, "b")
    signature = Signature(*FINE, other, total, number("eps"))
    assert signature.stream is total and signature.outputs == (FINE[1], total)
    assert signature.of_terms == ("eps", "h")
    late = Signature(*FINE, columns("g"), added_rows("b", "residual"))
    assert late.stream is None and late.of_terms == (FINE[0].name, "g")


def test_a_signature_made_from_another_one_differs_in_what_is_said() -> None:
    before = RMSNORM_BACKWARD.signature
    assert before.counting(dw=2).column_sums == 2
    assert before.counting(dw=1) == before
    more = before.with_tensor(row("mean"), row_sums=2)
    assert more.tensors == (*before.tensors, row("mean"))
    assert (more.row_sums, more.summed, before.row_sums) == (2, True, 1)
    assert replace(RMSNORM_BACKWARD, name="other_backward").signature is before


# ---- What does not fit together ------------------------------------------------------------------


def takes(*names: str) -> Any:
    return eval(f"lambda {', '.join(names)}: None")


NEEDED = ("x", "dy", "rstd", "weight")
UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "a name": ({"name": "RMSNorm"}, "a name has small letters, digits and underscores"),
    "terms of fewer tensors": (
        {"terms": takes(*NEEDED[:3])},
        "terms() takes x, dy, rstd, and the signature has x, dy, rstd, weight",
    ),
    "terms of another name": (
        {"terms": takes(*NEEDED[:3], "gamma")},
        "terms() takes x, dy, rstd, gamma, and the signature has x, dy, rstd, weight",
    ),
    "terms that add the residual": (
        {"terms": takes(*NEEDED, "dresidual")},
        "terms() takes x, dy, rstd, weight, dresidual, and the signature has",
    ),
    "magnitudes of fewer tensors": (
        {"magnitudes": takes("x", "dy")},
        "magnitudes() takes x, dy, and the signature has x, dy, rstd, weight",
    ),
    "a gradient that is an input": (
        {"gradients": {"x": "dy", "weight": "dw"}},
        "gradients names 'dy', which is no output",
    ),
    "another order of the forward": (
        {"forward": takes("weight", "x")},
        "forward() takes weight, x, and gradients names x, weight",
    ),
    "something quantized without its mathematics": (
        {"quantize": lambda y, numbers: (y, y)},
        "quantize() is for what the signature says is quantized: give both",
    ),
    "no gradients": ({"gradients": {}}, "forward() takes x, weight, and gradients names nothing"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_parts_that_do_not_fit_together_are_one_sentence(name: str) -> None:
    changes, said = UNFIT[name]
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        replace(RMSNORM_BACKWARD, **changes)
    assert "\n" not in str(error.value)
    of = changes.get("name", RMSNORM_BACKWARD.name)
    assert str(error.value).startswith(f"operation {of}: ")


def test_a_name_belongs_to_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "OPERATIONS", dict(OPERATIONS))
    other = replace(LAYERNORM_BACKWARD, name="other_backward")
    for _ in range(2):  # a second package of it as well
        operations.register(other)
    assert operations.signature_of("other_backward") is LAYERNORM_BACKWARD.signature
    assert other.function == "other"
    operations.register(replace(RMSNORM_BACKWARD))
    assert operations.OPERATIONS["rmsnorm_backward"] is RMSNORM_BACKWARD
    with pytest.raises(ValueError, match="there is an operation called rmsnorm_backward"):
        operations.register(replace(LAYERNORM_BACKWARD, name="rmsnorm_backward"))
    assert operations.OPERATIONS["rmsnorm_backward"] is RMSNORM_BACKWARD


# ---- The mathematics -----------------------------------------------------------------------------

each_operation = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
BACKWARDS = {name: operation for name, operation in OPERATIONS.items() if operation.forward}
each_backward = pytest.mark.parametrize("operation", BACKWARDS.values(), ids=BACKWARDS)


def drawn(operation: RowOperation, offset: float = 0.0) -> tuple[dict[str, Any], ...]:
    """The inputs of an operation in float64, and what autograd gives through its forward, to whose
    columns `offset` is added."""
    assert operation.forward is not None
    signature, generator = operation.signature, torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shapes = {
        argument: (M, N) if signature[gradient].role == "rows" else (N,)
        for argument, gradient in operation.gradients.items()
    }
    leaves = {argument: random(*shape).requires_grad_() for argument, shape in shapes.items()}
    shifted = {
        argument: leaf if leaf.dim() == 2 else leaf + offset for argument, leaf in leaves.items()
    }
    result, saved = operation.forward(**shifted)
    dy = random(M, N)
    exact = torch.autograd.grad(result, list(leaves.values()), dy)
    given = {
        name: leaves.get(name, value).detach() if torch.is_tensor(value) else value
        for name, value in saved.items()
    }
    incoming = [tensor.name for tensor in signature.early if tensor.name not in saved]
    assert len(incoming) == operation.incoming
    parts = {name: dy * share for name, share in zip(incoming, (2.0, -1.5, 0.5), strict=False)}
    parts[incoming[0]] += dy - sum(parts.values())
    numbers = dict.fromkeys((t.name for t in signature.numbers if t.name not in saved), 0.0)
    return given | parts | numbers, dict(zip(operation.gradients.values(), exact, strict=True))


def first_of(sums_of: torch.Tensor) -> torch.Tensor:
    """The gradient of the weight, where that of the bias stands behind it."""
    return sums_of[0] if sums_of.dim() == 2 and len(sums_of) == 2 else sums_of


@each_backward
@pytest.mark.parametrize("offset", [0.0, 1.5])
def test_terms_are_the_gradient_of_the_forward(operation: RowOperation, offset: float) -> None:
    given, exact = drawn(operation, offset)
    found = evaluate(operation, given, offset=offset)
    narrow = {t.name for t in operation.signature.tensors if t.kind}
    assert exact.keys() == found.keys() - narrow
    for name, gradient in exact.items():
        assert found[name].dtype == torch.float64
        torch.testing.assert_close(first_of(found[name]), gradient, rtol=1e-11, atol=1e-11)


@each_backward
def test_terms_stand_side_by_side_as_kernels_write_them(operation: RowOperation) -> None:
    """An output's broadcast to its shape. Of sums there is a tensor of rows for every sum."""
    given, _ = drawn(operation)
    signature = operation.signature
    terms = terms_of(operation, given, torch.float64)
    assert terms.keys() == {t.name for t in signature.outputs} | {signature.sums.name}
    assert [part.shape for part in terms[signature.sums.name]] == [(M, N)] * signature.column_sums
    for output in signature.outputs:
        assert torch.broadcast_shapes(*(part.shape for part in terms[output.name])) == (M, N)


@pytest.mark.parametrize("name", [name for name, one in BACKWARDS.items() if one.magnitudes])
def test_magnitudes_are_of_the_parts_of_what_is_added_up(name: str) -> None:
    """They are those of the terms where nothing cancels, and more where something does."""
    operation = BACKWARDS[name]
    assert operation.magnitudes is not None
    given, _ = drawn(operation)
    arguments = in_dtype(operation.signature, given, torch.float64, 0.0)
    (term,) = operation.terms(**arguments)["dw"]
    (magnitude,) = operation.magnitudes(**arguments)
    assert magnitude.shape == term.shape and (magnitude >= term.abs() * (1 - 1e-12)).all()
    assert (magnitude > 2 * term.abs()).any()
    gradients = {name: value for name, value in arguments.items() if re.fullmatch("dy[0-9]*", name)}
    alone = {**arguments, **{name: torch.zeros_like(value) for name, value in gradients.items()}}
    for gradient in gradients if len(gradients) > 1 else ():
        one = {**alone, gradient: gradients[gradient]}
        torch.testing.assert_close(
            operation.magnitudes(**one)[0], operation.terms(**one)["dw"][0].abs()
        )


def test_the_second_sum_of_layernorm_is_the_gradient_of_its_bias() -> None:
    given, _ = drawn(LAYERNORM_BACKWARD)
    dw = evaluate(LAYERNORM_BACKWARD, given)["dw"]
    assert dw.shape == (2, N)
    torch.testing.assert_close(dw[1], given["dy"].sum(0))


@each_backward
def test_options_change_what_they_are_for_alone(operation: RowOperation) -> None:
    given, _ = drawn(operation)
    columns_of, plain = operation.signature.columns, evaluate(operation, given)
    for late in operation.signature.late:
        added = evaluate(operation, {**given, late.name: torch.ones(M, N, dtype=torch.float32)})
        assert added["dx"].dtype == torch.float64  # x has this dtype
        assert torch.equal(added["dx"], plain["dx"] + 1) and torch.equal(added["dw"], plain["dw"])
    ones = torch.ones(N, dtype=torch.float64)
    without = evaluate(operation, {**given, columns_of.name: None}, offset=0.5)
    with_ones = evaluate(operation, {**given, columns_of.name: ones}, offset=0.5)
    assert all(torch.equal(without[name], with_ones[name]) for name in plain)
    for wanted in (["dx"], ["dw"], []):
        some = evaluate(operation, given, wanted=wanted)
        assert [*some] == wanted
        assert all(torch.equal(some[name], plain[name]) for name in wanted)


@each_backward
def test_numbers_of_a_row_come_in_any_shape_and_rows_in_any_dtype(operation: RowOperation) -> None:
    given, _ = drawn(operation)
    plain = evaluate(operation, given)
    numbers = {tensor.name: given.pop(tensor.name) for tensor in operation.signature.numbers}
    shaped = {
        name: tensor.reshape(M, 1, 1, N) if tensor.shape == (M, N) else tensor.flatten()
        for name, tensor in given.items()
    }
    again = evaluate(operation, shaped | numbers)
    assert again["dx"].shape == (M, 1, 1, N)
    assert torch.equal(again["dx"].view(M, N), plain["dx"])
    assert torch.equal(again["dw"], plain["dw"])
    narrow = {
        name: tensor.to(torch.bfloat16 if tensor.shape[-1] == N else torch.float32)
        for name, tensor in given.items()
    }
    found = evaluate(operation, narrow | numbers)
    wide = {found[name].dtype for name in operation.gradients.values()}
    assert wide == {torch.float32}  # rounded by whoever asks


def test_a_rotated_norm_is_what_its_backward_is_of() -> None:
    given, _ = drawn(operations.RMSNORM_ROPE_BACKWARD)
    del given["dy"]
    assert operations.RMSNORM_ROPE_BACKWARD.forward is not None
    wanted, _ = operations.RMSNORM_ROPE_BACKWARD.forward(given["x"], given["weight"])
    found = evaluate(operations.RMSNORM_ROPE_FORWARD, given)
    torch.testing.assert_close(found["y"], wanted)
    n = torch.nn.functional.rms_norm(given["x"], (N,), given["weight"], given["eps"])
    cos, sin = (torch.cat((given[name],) * 2, -1) for name in ("cos", "sin"))
    turned = torch.cat((-n[:, N // 2 :], n[:, : N // 2]), -1)  # rotate_half, as models have it
    torch.testing.assert_close(found["y"], n * cos + turned * sin)
    some = given | {name: given[name][..., :1] for name in ("cos", "sin")}
    found = evaluate(operations.RMSNORM_ROPE_FORWARD, some)
    turned = n[:, :2] * some["cos"] + torch.stack((-n[:, 1], n[:, 0]), -1) * some["sin"]
    torch.testing.assert_close(found["y"], torch.cat((turned, n[:, 2:]), -1))


@pytest.mark.parametrize("kind", operations.GATED_FORWARDS)
def test_a_gated_norm_is_what_its_backward_is_of(kind: tuple[str, bool]) -> None:
    forward, backward = operations.GATED_FORWARDS[kind], operations.GATED_BACKWARDS[kind]
    given, _ = drawn(backward)
    del given["dy"]
    assert backward.forward is not None
    wanted, _ = backward.forward(given["x"], given["z"], given["weight"])
    found = evaluate(forward, given)
    assert found.keys() == {"y"} and forward.signature.sums is None
    assert torch.equal(found["y"], wanted)


# ---- What the tuner makes of it ------------------------------------------------------------------


@each_operation
def test_a_problem_knows_what_its_kernels_add_up(operation: RowOperation) -> None:
    sums_of = Problem.parse("7x24:bf16", operation.name).sums
    signature = operation.signature
    assert sums_of.row_sums == signature.row_sums
    assert sums_of.column_sums == signature.column_sums
    assert sums_of.statistics == len(signature.statistics)
