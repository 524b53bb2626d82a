"""The arguments that the host packs are the structure that kernels take."""

from __future__ import annotations

import ctypes
import re
import subprocess
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generator.emulate import find_compiler
from generator.kernels.render import environment, render, without_comments
from generator.paths import template_named
from generator.problem import Problem
from generator.target import find_target
from normforge.launch.kernel_arguments import (
    DW_ADDED,
    DW_IN_WEIGHT_DTYPE,
    ArgumentLayout,
    Extent,
    argument_layout,
    extent_of,
    of_groups,
)
from normforge.launch.row_layout import RowLayout, division_factor, gap_factor
from normforge.operations import OPERATIONS, RMSNORM_BACKWARD, Signature
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
    rows,
    rows_out,
    scales,
    sums,
)
from normforge.spec import Launch
from tests.support.fake_driver import argument_names
from tests.support.samples import plain_variant

WORKSPACE = ("counters", "zeroed", "scratch")
KINDS = {
    "long long": ctypes.c_longlong,
    "unsigned": ctypes.c_uint,
    "int": ctypes.c_int,
    "float": ctypes.c_float,
}


def struct_of(signature: Signature) -> str:
    """The structure in the row kernel's template, of a signature."""
    text = template_named("row_kernel.cu.j2").read_text()
    start = text.index("struct Arguments {")
    template = environment(comments=False).from_string(text[start : text.index("\n};", start) + 3])
    return without_comments(template.render(signature=signature))


def as_compiled(struct: str) -> type[ctypes.Structure]:
    """A structure of C++ with every member at its natural alignment."""
    members: list[tuple[str, Any]] = []
    body = struct.partition("{")[2].rpartition("}")[0]
    for declaration in filter(None, map(str.strip, body.split(";"))):
        if "*" in declaration:
            members.append((declaration.rpartition("* ")[2], ctypes.c_uint64))
            continue
        found = re.fullmatch(r"(long long|unsigned|int|float) (\w+(?:, \w+)*)", declaration)
        assert found, declaration
        members += [(name, KINDS[found[1]]) for name in found[2].split(", ")]
    return type("Arguments", (ctypes.Structure,), {"_fields_": members})


def addressed(signature: Signature) -> list[Tensor]:
    """Return the tensors that a call is given by address."""
    return [tensor for tensor in signature.tensors if tensor.role not in ("number", "flag")]


def places(structure: type[ctypes.Structure]) -> dict[str, tuple[int, int]]:
    """Return where each member begins and ends."""
    found = {name: getattr(structure, name) for name, *_ in structure._fields_}
    return {name: (at.offset, at.offset + at.size) for name, at in found.items()}


def packed(layout: ArgumentLayout) -> tuple[bytes, dict[str, Any]]:
    """A block with another value for every argument, and these by name. second: those of the
    second kernel, but for the address of the sums."""
    signature = layout.signature
    launch = Launch(9, 9, 3, 32, counters=100, zeroed=64, scratch=9216, partials=13)
    extent = Extent(
        rows=1 << 40,
        strides=tuple((1 << 33) + 7 * i for i in range(len(signature.strided))),
        gaps=tuple(-5 - i for i in range(len(signature.in_heads))),
        gap_factor=0xFFFFFFF1,
        columns=1003,
        group=launch.group,
        dw_mode=DW_ADDED,
        weight_offset=0.625,
        numbers=tuple(0.125 + i for i in range(len(signature.numbers))),
        of_groups=(1 << 32, 1 << 31, 77, 1, 78) if signature.groups else (),
    )
    block = layout.block(launch, extent, 1 << 20, 1 << 50)
    leading = [(1 << 48) + 64 * i for i in range(len(signature.leading))]
    behind = [(1 << 47) + 64 * i for i in range(len(signature.behind))]
    layout.pack(block, leading, behind)
    values = (
        *leading,
        *(1 << 20, (1 << 20) + launch.zeroed_offset, 1 << 50, extent.rows),
        *(*extent.strides, *extent.gaps),
        *(extent.gap_factor, extent.columns, extent.group, extent.dw_mode, extent.weight_offset),
        *behind,
        *extent.numbers,
        *extent.of_groups,
    )
    assert len(set(values)) == len(values)
    columns = signature.column_sums * extent.columns
    second = (1 << 50, launch.partials, columns, DW_ADDED, extent.group)
    named = dict(zip(argument_names(signature), values, strict=True))
    return block.raw, named | {"second": second}


# ---- Of the operations that there are ------------------------------------------------------------

PROGRAM = """
#include <cstddef>
#include <cstdio>
using Element = unsigned short;
using WeightElement = float;
using ResidualElement = double;
{struct}
void show(const void* value) {{ std::printf("%zu\\n", reinterpret_cast<size_t>(value)); }}
void show(long long value) {{ std::printf("%lld\\n", value); }}
void show(unsigned value) {{ std::printf("%u\\n", value); }}
void show(int value) {{ std::printf("%d\\n", value); }}
void show(float value) {{ std::printf("%g\\n", value); }}
int main() {{
  Arguments args;
  if (std::fread(&args, sizeof args, 1, stdin) != 1) return 1;
  std::printf("%zu\\n", sizeof args);
{lines}
}}
"""


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_compiler_reads_what_the_host_packs(name: str, tmp_path: Path) -> None:
    signature = OPERATIONS[name].signature
    layout = argument_layout(signature)
    problem = Problem.parse("4096x1024:bf16", name)
    strategy = "separate" if signature.sums else "none"
    source = render(plain_variant(problem, find_target("h200"), strategy=strategy))
    (struct,) = re.findall(r"^struct Arguments \{.*?^\};", source, re.DOTALL | re.MULTILINE)
    assert without_comments(struct) == struct_of(signature)
    names = argument_names(signature)
    lines = [
        f'  std::printf("{arg} %zu ", offsetof(Arguments, {arg})); show(args.{arg});'
        for arg in names
    ]
    (tmp_path / "arguments.cpp").write_text(PROGRAM.format(struct=struct, lines="\n".join(lines)))
    compiler = find_compiler()
    assert compiler is not None
    subprocess.run(
        [compiler, "-std=c++17", "-o", "arguments", "arguments.cpp"], cwd=tmp_path, check=True
    )
    block, values = packed(layout)
    done = subprocess.run([tmp_path / "arguments"], input=block, capture_output=True, check=True)
    size, *said = done.stdout.decode().splitlines()
    assert layout.main.size == layout.second_at == int(size) <= layout.size
    found = {arg: (int(at), float(value)) for arg, at, value in map(str.split, said)}
    assert [*found] == [*names]
    assert {arg: value for arg, (_, value) in found.items()} == {n: values[n] for n in names}
    assert {t.name: found[t.name][0] for t in addressed(signature)} == layout.places
    assert {t.name: found[t.name][0] for t in signature.numbers} == layout.numbers_at
    assert tuple(found[arg][0] for arg in WORKSPACE) == layout.workspace_at
    assert layout.scratch_at[0] == found["scratch"][0]


# ---- Of any signature ----------------------------------------------------------------------------


@st.composite
def signatures(draw: st.DrawFn) -> Signature:
    """Any order of 1 to 4 rows, up to 2 numbers of a row and 2 tensors of columns, a residual, 1 to
    3 outputs, up to 3 sums of every column, up to 3 numbers of the call, up to 2 tensors of groups,
    and what is quantized."""
    outputs = draw(st.integers(1, 3))
    tensors = [rows(f"in_{i}") for i in range(draw(st.integers(1, 4)))]
    tensors += [rows_out(f"out_{i}", packed=draw(st.booleans())) for i in range(outputs)]
    for i in range(draw(st.integers(0, 2))):
        tensors.append(row(f"of_row_{i}", behind=draw(st.booleans())))
    tensors += [number(f"of_call_{i}") for i in range(draw(st.integers(0, 3)))]
    shared = [columns("shared"), added_columns("added_shared")]
    tensors += shared[: draw(st.integers(0, 2))]
    tensors += [group(f"of_group_{i}") for i in range(draw(st.integers(0, 2)))]
    if draw(st.booleans()):
        of = f"out_{draw(st.integers(0, outputs - 1))}"
        tensors += [added_rows("more", option="residual")]
        tensors += [copied_rows("wide", of, option="residual")] * draw(st.booleans())
    tensors += [quantized("narrow"), scales("of_blocks", 32, "e8m0")] * draw(st.booleans())
    if count := draw(st.integers(0, 2)):
        tensors.append(sums("total", count=count))
    ordered = draw(st.permutations(tensors))
    row_sums, later = draw(st.integers(1, 4)), draw(st.booleans())
    options = {"row_sums": row_sums, "later_sums": row_sums * later}
    return Signature(*ordered, **options, summed=draw(st.booleans()))


@settings(max_examples=100)
@given(signatures())
def test_layout_of_any_signature_is_that_of_its_structure(signature: Signature) -> None:
    layout, structure = ArgumentLayout(signature), as_compiled(struct_of(signature))
    found = places(structure)
    assert tuple(found) == argument_names(signature)
    assert {t.name: found[t.name][0] for t in addressed(signature)} == layout.places
    assert {t.name: found[t.name][0] for t in signature.numbers} == layout.numbers_at
    assert tuple(found[name][0] for name in WORKSPACE) == layout.workspace_at
    assert layout.behind_at == tuple(layout.places[t.name] for t in signature.behind)
    # The second kernel's behind the main one's, aligned, and no two in one place.
    assert layout.second_at % 8 == 0 and ctypes.sizeof(structure) <= layout.second_at < layout.size
    sums_of = layout.places[signature.sums.name] if signature.sums else None
    both = layout.parameters[1]
    assert (len(both) == 6 and both[1] == sums_of) if signature.sums else both == ()
    of_second = [(at, at + (8 if i == 0 else 4)) for i, at in enumerate(both) if i != 1]
    spans = sorted([*found.values(), *of_second])
    assert all(one[1] <= other[0] for one, other in pairwise(spans))
    assert spans[-1][1] <= layout.size


@settings(max_examples=50)
@given(signatures())
def test_block_of_any_signature_holds_every_value(signature: Signature) -> None:
    layout = ArgumentLayout(signature)
    block, values = packed(layout)
    main = as_compiled(struct_of(signature)).from_buffer_copy(block)
    names = argument_names(signature)
    assert {name: getattr(main, name) for name in names} == {name: values[name] for name in names}
    if signature.sums:
        of_sums = values[signature.sums.name]
        wanted = (values["second"][0], of_sums, *values["second"][1:])
        kinds = (ctypes.c_uint64,) * 2 + (ctypes.c_int,) * 4
        read = zip(kinds, layout.parameters[1], strict=True)
        assert tuple(kind.from_buffer_copy(block, at).value for kind, at in read) == wanted
        assert layout.scratch_at == (layout.workspace_at[2], layout.parameters[1][0])


def test_rows_step_as_their_tensors_do() -> None:
    """Rows are in the order of the signature, whatever the order of the layouts; a tensor without
    one is dense."""
    signature = RMSNORM_BACKWARD.signature
    assert [tensor.name for tensor in signature.strided] == ["x", "dy", "dresidual", "dx"]
    packed_rows = {"dy": RowLayout(64, 4, 720), "x": RowLayout(32, 4, 512)}
    extent = extent_of(signature, 24, 16, {"dresidual": RowLayout(48), **packed_rows}, group=3)
    assert extent == Extent(
        *(24, (32, 64, 48, 16), (512 - 4 * 32, 720 - 4 * 64), gap_factor(24, 4), 16, 3),
        dw_mode=DW_IN_WEIGHT_DTYPE,
        weight_offset=0.0,
    )
    assert extent.values == (24, 32, 64, 48, 16, 384, 464, gap_factor(24, 4), 16, 3, 0, 0.0)
    some = extent_of(signature, 24, 16, {"x": packed_rows["x"]}, group=3)
    assert some.gaps == (512 - 4 * 32, 0)  # a dense tensor goes along
    dense = extent_of(signature, 24, 16, {}, group=0)
    assert (dense.strides, dense.gaps, dense.gap_factor) == ((16,) * 4, (0, 0), 0)


@pytest.mark.parametrize("heads", [1, 3, 32, 40])
@pytest.mark.parametrize("groups", [1, 7, 100])
def test_what_a_group_shares_is_found_by_two_products(heads: int, groups: int) -> None:
    count = 97 * heads - heads // 2  # of rows; the last group is not full
    factor, of_period, period, wide, run = of_groups(count, heads, groups, wide=True)
    assert run == heads
    assert wide == 1 and period == (0 if groups >= 97 else groups)
    for at in range(count):
        found = at * factor >> 32
        assert found == at // heads
        assert found - (found * of_period >> 32) * period == found % groups


@given(st.integers(1, 1 << 32), st.integers(1, 1 << 20), st.randoms(use_true_random=False))
def test_a_factor_divides_every_number_or_there_is_none(
    numbers: int, divisor: int, random: Random
) -> None:
    factor = division_factor(numbers, divisor)
    if not factor:
        assert numbers * divisor > 1 << 32 and (1 << 32) % divisor
        return
    chosen = [random.randrange(numbers) for _ in range(20)]
    edges = [(numbers - 1) // divisor * divisor - i for i in range(2)]
    for one in (*chosen, *(edge for edge in edges if edge >= 0), numbers - 1):
        assert one * factor >> 32 == one // divisor
        assert one * factor < 1 << 64


@pytest.mark.parametrize(
    ("heads", "inner", "run"), [(8, 0, 8), (8, 8, 8), (32, 8, 8), (8, 32, 8), (12, 8, 4)]
)
def test_runs_have_neither_the_end_of_a_group_nor_a_gap(heads: int, inner: int, run: int) -> None:
    assert of_groups(96, heads, 4, wide=False, inner=inner)[-1] == run
    found = {heads * i for i in range(1, 97)} | ({inner * i for i in range(1, 97)} - {0})
    assert all(end % run == 0 for end in found)


def test_rows_beyond_what_kernels_number_are_refused() -> None:
    with pytest.raises(ValueError, match="kernels cannot number 2000000000 rows, 24 to each"):
        of_groups(2_000_000_000, 24, 1 << 27, wide=False)
    with pytest.raises(ValueError, match="160000 rows, 1 to each of 40000 groups"):
        of_groups(160_000, 1, 40_000, wide=False)


class At:
    """A tensor at an address."""

    def __init__(self, address: int) -> None:
        self.data_ptr = lambda: address


def test_addresses_are_those_of_tensors_by_their_names() -> None:
    signature = Signature(
        rows("a"), row("r", behind=True), columns("g"), rows_out("o"), row("q"), sums("t")
    )
    layout = ArgumentLayout(signature)
    given_tensors = {"t": At(5), "r": At(2), "a": At(1), "q": At(4), "g": None}
    assert layout.addresses(given_tensors) == ([1, 0, 0, 4, 5], [2])
