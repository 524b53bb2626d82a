"""Shapes as text and as files: what is read, and what is refused in one sentence."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generator.errors import NormforgeError
from generator.operations import operation_of
from generator.problem import ITEMSIZE, MAX_COLUMNS, Problem
from generator.shape_lists import SHAPES_FOLDER, load_problems
from normforge.collected import moved_bytes
from normforge.operations import OPERATIONS

any_problem = st.builds(
    lambda M, N, dtype, wide, operation: Problem(
        M, N, dtype, "fp32" if wide and operation != "rope" else dtype, operation=operation
    ),
    st.integers(1, 1 << 31),
    st.integers(1, MAX_COLUMNS),
    st.sampled_from(sorted(ITEMSIZE)),
    st.booleans(),
    st.sampled_from(sorted(OPERATIONS)),
)


def refusal(shapes: str) -> str:
    """The sentence with which `--shapes` is refused."""
    with pytest.raises(NormforgeError) as caught:
        load_problems(shapes)
    sentence = str(caught.value)
    assert sentence
    assert "\n" not in sentence
    return sentence


# ---- Text ----------------------------------------------------------------------------------------


@given(any_problem)
def test_text_of_a_problem_reads_back_as_the_problem(problem: Problem) -> None:
    assert Problem.parse(str(problem)) == problem
    assert load_problems(f" {problem} ,", problem.operation) == [problem]


def test_shapes_of_a_run_are_of_its_operation() -> None:
    found = load_problems("smoke,64x1024:bf16", "layernorm_backward")
    assert {problem.operation for problem in found} == {"layernorm_backward"}
    assert [replace(p, operation="rmsnorm_backward") for p in found] == load_problems(
        "smoke,64x1024:bf16"
    )


def test_unknown_operation_is_refused() -> None:
    assert "unknown operation 'batchnorm'" in refusal("batchnorm:64x1024:bf16")
    assert "choose with --op" in refusal("layernorm_backward:64x1024:bf16")


def test_weight_has_the_dtype_of_the_rows_unless_named() -> None:
    assert Problem.parse("8x16:bf16").weight_dtype == "bf16"
    assert Problem.parse("8x16:bf16:fp32").weight_dtype == "fp32"
    assert str(Problem.parse("8x16:fp32:fp32")) == "8x16:fp32"


def test_columns_that_are_rotated_are_all_unless_said() -> None:
    problem = Problem.parse("rmsnorm_rope_forward:8x256:bf16:fp32+offset+rotary64")
    assert (problem.rotated, replace(problem, rotation="").rotated) == (64, 256)
    assert str(problem) == "rmsnorm_rope_forward:8x256:bf16:fp32+offset+rotary64"
    assert Problem.parse(str(problem)) == problem
    (cos,) = (t for t in operation_of(problem).arguments(problem) if t.name == "cos")
    assert cos.shape == (1, 32)
    both = Problem.parse("rmsnorm_rope_forward:8x256:bf16+interleaved+rotary64")
    assert (both.rotated, both.interleaved, problem.interleaved) == (64, True, False)
    assert str(both) == "rmsnorm_rope_forward:8x256:bf16+rotary64+interleaved"
    heads = Problem.parse("rmsnorm_rope_forward:8x256:bf16+interleaved+joined64")
    assert (heads.rotated, heads.joined, heads.interleaved) == (64, True, True)
    assert not both.joined
    assert str(heads) == "rmsnorm_rope_forward:8x256:bf16+joined64+interleaved"
    assert Problem.parse(str(heads)) == heads
    assert moved_bytes(both.operation, str(both).partition(":")[2]) == 2 * 8 * 256 * 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("4096", "unknown shape list '4096'"),
        ("nonsense", "unknown shape list 'nonsense'"),
        ("defalt", "did you mean 'default'?"),
        ("4096x1024:bf16,defalt", "did you mean 'default'?"),
        ("4096x1024", "has no dtype"),
        ("4096*1024:bf16", "malformed shape"),
        ("4096x1024:", "malformed shape"),
        ("4096x:bf16", "malformed shape"),
        ("x1024:bf16", "malformed shape"),
        ("4096x1024x2:bf16", "malformed shape"),
        ("4096x1024:bf16:fp32:fp32", "malformed shape"),
        ("1e3x1024:bf16", "malformed shape"),
        ("4096.0x1024:bf16", "malformed shape"),
        ("0x10x1024:bf16", "malformed shape"),
        ("4096x1024:bf16;4096x2048:bf16", "malformed shape"),
        ("9" * 5000 + "x1024:bf16", "has more than 12 digits"),
        ("0x1024:bf16", "at least 1"),
        ("4096x0:bf16", "at least 1"),
        ("-1x1024:bf16", "at least 1"),
        ("4096x-1024:bf16", "at least 1"),
        (f"1x{MAX_COLUMNS + 1}:bf16", f"at most {MAX_COLUMNS}"),
        ("4096x1024:fp64", "unknown dtype 'fp64'"),
        ("4096x1024:float32", "unknown dtype 'float32'"),
        ("4096x1024:bf16:int8", "unknown weight dtype 'int8'"),
        ("4096x1024:bf16:fp16", "the weight is either of x's dtype"),
        ("4096x1024:fp32:bf16", "the weight is either of x's dtype"),
        ("4096x1024:bf16+residual_", "unknown option '+residual_'"),
        ("4096x1024:bf16+residual+residual_fp32", "has the option +residual twice"),
        ("4096x1024:bf16+offset+offset", "has the option +offset twice"),
        ("4096x256:bf16+rotary64", "rmsnorm_backward has no option +rotary64; leave it out"),
        ("4096x256:bf16+rotary", "unknown option '+rotary'"),
        ("4096x256:bf16+interleaved", "rmsnorm_backward has no option +interleaved"),
        ("8x64:bf16+interleaved+interleaved", "has the option +interleaved twice"),
        ("4096x256:bf16+rotary-2", "malformed shape"),
        ("rmsnorm_rope_forward:8x64:bf16+rotary7", "an even number below N"),
        ("rmsnorm_rope_forward:8x64:bf16+rotary0", "an even number below N"),
        ("rmsnorm_rope_forward:8x64:bf16+rotary032", "unknown option '+rotary032'"),
        ("rmsnorm_rope_forward:8x64:bf16+rotary\uff13\uff12", "unknown option"),
        ("rmsnorm_rope_forward:8x64:bf16+rotary64", "an even number below N"),
        ("rmsnorm_rope_forward:8x64:bf16+rotary32+rotary16", "has the option +rotary twice"),
        ("rmsnorm_rope_forward:8x64:bf16+joined64", "an even number below N of which N is a"),
        ("rmsnorm_rope_forward:8x64:bf16+joined24", "an even number below N of which N is a"),
        ("rmsnorm_rope_forward:8x63:bf16+joined21", "an even number below N of which N is a"),
        ("rmsnorm_rope_forward:8x64:bf16+joined0", "an even number below N of which N is a"),
        ("rmsnorm_rope_forward:8x64:bf16+joined32+rotary16", "leave out +rotary16"),
        ("rope:8x64:bf16+joined32", "rope has no option +joined32; leave it out"),
        ("rope:8x64:bf16:fp32", "rope has no weight dtype; leave it out"),
        ("4096x256:bf16+joined64", "rmsnorm_backward has no option +joined64; leave it out"),
        ("", "names no shape"),
        (" , ,", "names no shape"),
    ],
)
def test_text_that_is_no_shape_is_refused(text: str, says: str) -> None:
    assert says in refusal(text)


def test_refusal_of_an_unknown_list_names_the_known_ones() -> None:
    sentence = refusal("defualt")
    for path in SHAPES_FOLDER.glob("*.yaml"):
        assert path.stem in sentence


@given(st.text(max_size=400))
def test_no_text_breaks_the_reader(text: str) -> None:
    try:
        problems = load_problems(text)
    except NormforgeError as error:
        assert str(error)
    else:
        assert problems


# ---- Lists ---------------------------------------------------------------------------------------


def test_named_lists_are_the_shapes_that_the_project_promises() -> None:
    rows = (4096, 8192, 16384, 32768, 65536)
    columns = (256, 512, 1024, 2048, 3072, 4096, 8192, 16384)
    assert set(load_problems("default")) == {
        Problem(M, N, "bf16", "bf16") for M in rows for N in columns
    }
    assert set(load_problems("tilegym")) == {
        Problem(4096, N, dtype, dtype)
        for N in (1024, 2048, 4096, 8192, 16384)
        for dtype in ("bf16", "fp16", "fp32")
    }
    assert len(load_problems("smoke")) == 3


def test_entries_mix_keep_their_order_and_appear_once() -> None:
    both = load_problems("64x64:bf16, smoke,tilegym,64x64:bf16,smoke")
    assert both[0] == Problem(64, 64, "bf16", "bf16")
    assert both[1:4] == load_problems("smoke")
    assert len(both) == len(set(both)) == 1 + 3 + 15


def test_file_of_blocks_and_texts_is_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "shapes:\n"
        "  - 3x5:fp16\n"
        "  - {M: [1, 2], N: [7], dtype: [bf16], weight_dtype: [bf16, fp32]}\n"
    )
    assert [str(problem) for problem in load_problems(str(path))] == [
        "3x5:fp16",
        "1x7:bf16",
        "2x7:bf16",
        "1x7:bf16:fp32",
        "2x7:bf16:fp32",
    ]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("shapes: [", "cannot read the shape file"),
        ("\tshapes: x", "cannot read the shape file"),
        ("", "expected a list under 'shapes'"),
        ("shapes:", "expected a list under 'shapes'"),
        ("shapes: []", "expected a list under 'shapes'"),
        ("shapes: 4096x1024:bf16", "expected a list under 'shapes'"),
        ("- 4096x1024:bf16", "expected a list under 'shapes'"),
        ("shapes: [4096]", "a block has lists"),
        ("shapes: [[4096, 1024]]", "a block has lists"),
        ("shapes: [{M: [1], N: [1], dtype: [bf16], K: [1]}]", "a block has lists"),
        ("shapes: [{M: [1], N: [1]}]", "needs the lists M, N and dtype"),
        ("shapes: [{M: 4096, N: [1], dtype: [bf16]}]", "needs the lists M, N and dtype"),
        ("shapes: [{M: '12', N: [1], dtype: [bf16]}]", "needs the lists M, N and dtype"),
        ("shapes: [{M: [1], N: [1], dtype: bf16}]", "needs the lists M, N and dtype"),
        ("shapes: [{M: [], N: [1], dtype: [bf16]}]", "needs the lists M, N and dtype"),
        ("shapes: [{M: [1.5], N: [1], dtype: [bf16]}]", "malformed shape '1.5x1:bf16'"),
        ("shapes: [{M: [true], N: [1], dtype: [bf16]}]", "malformed shape 'Truex1:bf16'"),
        ("shapes: [{M: [0], N: [1], dtype: [bf16]}]", "at least 1"),
        ("shapes: [{M: [1], N: [1], dtype: [f64]}]", "unknown dtype 'f64'"),
        (
            "shapes: ['4096x1024']",
            "shape '4096x1024' has no dtype: write for example 4096x1024:bf16",
        ),
    ],
)
def test_file_that_is_ill_formed_is_refused_by_name(
    tmp_path: Path, content: str, says: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    sentence = refusal(str(path))
    assert says in sentence
    assert str(path) in sentence


def test_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "binary.yaml").write_bytes(b"shapes: [\xff\xfe]")
    for name in ("missing.yaml", "folder.yaml", "binary.yaml"):
        sentence = refusal(str(tmp_path / name))
        assert "cannot read the shape file" in sentence
        assert name in sentence


# ---- Files that a program has recorded -----------------------------------------------------------

CALLS = """\
# comment
collected:
  layernorm_backward:
    64x64:bf16: 1
  rmsnorm_backward:
    64x64:bf16: 9
    128x64:bf16: 5
    128x64:bf16+residual_fp32: 2
    128x64:fp32: 2
    128x64:bf16:fp32+offset: 1
"""


def test_recorded_problems_come_in_the_order_of_calls_times_bytes(tmp_path: Path) -> None:
    path = tmp_path / "shapes.yaml"
    path.write_text(CALLS)
    assert [str(problem) for problem in load_problems(f"8x8:bf16,{path},64x64:bf16")] == [
        "8x8:bf16",
        "128x64:bf16",
        "128x64:bf16+residual_fp32",
        "64x64:bf16",
        "128x64:fp32",
        "128x64:bf16:fp32+offset",
    ]
    layer_norms = load_problems(str(path), "layernorm_backward")
    assert [str(problem) for problem in layer_norms] == ["layernorm_backward:64x64:bf16"]
    assert "choose with --op" in refusal_of(path, "rmsnorm_invariant_backward")


def refusal_of(path: Path, operation: str) -> str:
    with pytest.raises(NormforgeError) as caught:
        load_problems(str(path), operation)
    return str(caught.value)


@pytest.mark.parametrize(
    "options", ["", ":fp32", "+offset", "+residual", "+residual_fp32", "+offset+residual"]
)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_bytes_by_which_they_are_ordered_are_those_of_the_tuner(dtype: str, options: str) -> None:
    for operation in OPERATIONS.values():
        try:
            problem = Problem.parse(f"48x64:{dtype}{options}", operation.name)
        except NormforgeError:  # an option that the operation has not
            continue
        shape = str(problem).removeprefix(f"{operation.name}:")
        known = operation_of(problem)
        groups = problem.signature.groups  # which 48 rows of 32 heads, or of one, share
        shared = len(groups) * prod(problem.group_shape) * 4
        assert moved_bytes(operation.name, shape) == known.traffic_bytes(problem) - shared
        assert (shared > 0) == ("rope" in operation.name)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("collected:", "expected operations with their calls"),
        ("collected: []", "expected operations with their calls"),
        ("collected: {rmsnorm_backward: }", "expected shapes and how often"),
        ("collected: {rmsnorm_backward: {}}", "expected shapes and how often"),
        ("collected: {rmsnorm_backward: {'64x64:bf16': 0}}", "got '64x64:bf16: 0'"),
        ("collected: {rmsnorm_backward: {'64x64:bf16': true}}", "got '64x64:bf16: True'"),
        ("collected: {rmsnorm_backward: {'64x64:bf16': 1.5}}", "got '64x64:bf16: 1.5'"),
        ("collected: {rmsnorm_backward: {64: 1}}", "got '64: 1'"),
        ("collected: {rmsnorm_backward: {'64x64:bf17': 1}}", "unknown dtype 'bf17'"),
        ("collected: {rmsnorm_backward: {'64x64': 1}}", "has no dtype"),
        ("collected: {softmax: {'64x64:bf16': 1}}", "has no calls of rmsnorm_backward, only of"),
        ("collected: {a: {'1x1:bf16': 1}}\nshapes: [64x64:bf16]", "unknown key 'shapes'"),
        (CALLS + "    64x64:bf16: 9\n", "a second time"),
    ],
)
def test_recorded_file_that_is_ill_formed_is_refused_by_name(
    tmp_path: Path, content: str, says: str
) -> None:
    path = tmp_path / "calls.yaml"
    path.write_text(content)
    sentence = refusal(str(path))
    assert says in sentence
    assert str(path) in sentence
