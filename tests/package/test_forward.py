"""Forward kernels in a package: which one serves a call, and what an emission keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from generator.errors import NormforgeError
from generator.kernels.cubin_cache import compile_variant
from generator.kernels.forward import (
    ANY_COLUMNS,
    ForwardVariant,
)
from generator.kernels.nvrtc import Compiled
from generator.package.emit import _check_arithmetic, emit_package
from generator.package.entries import Entry, Forwards
from generator.package.fallback_kernels import DTYPES
from generator.package.files import UNVERIFIED
from generator.package.standalone import read_package
from generator.problem import Problem
from generator.space.forward_space import fallback_forwards
from normforge.cubins import CUBINS_INDEX
from normforge.serve.forward import Forward
from normforge.serve.kernels import source_of
from normforge.table import ForwardTable
from tests.support.forward import H200, of_kind


@cache
def tuned(shape: str) -> Entry:
    variant = of_kind(shape)
    return Entry(
        *(Problem.parse(shape), variant, compile_variant(variant, H200.arch)),
        *("measured", {"reason": "test", "us": 1.0, "ratio": 1.1}),
    )


@cache
def emitted() -> tuple[Entry, tuple[tuple[ForwardVariant, Compiled], ...]]:
    """A small set of real kernels."""
    forward = tuned("4096x1024:bf16")
    fallbacks = tuple((v, compile_variant(v, H200.arch)) for v in fallback_forwards(DTYPES[:1]))
    return forward, fallbacks


@pytest.fixture
def package(tmp_path: Path) -> Path:
    forward, fallbacks = emitted()
    folder = tmp_path / "h200" / "rmsnorm_backward"
    emit_package([], [], H200, folder, Forwards((forward,), fallbacks))
    return folder


@pytest.mark.parametrize("evidence", ["measured", "predicted"])
def test_the_source_of_a_forward_says_whether_it_ran(tmp_path: Path, evidence: str) -> None:
    forward, fallbacks = emitted()
    emit_package(
        [], [], H200, tmp_path, Forwards((replace(forward, evidence=evidence),), fallbacks)
    )
    sources = {path.stem: path.read_text() for path in (tmp_path / "kernels").iterdir()}
    said = {name: text.startswith(UNVERIFIED) for name, text in sources.items()}
    assert said.pop(forward.variant.id) is (evidence == "predicted")
    assert all(said.values()), "nobody timed the kernels for any rows"


@pytest.mark.parametrize("kind", ["tuned", "fallback"])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"error": "no room"}, "was not compiled: no room"),
        ({"cubin": b""}, "was not compiled: it has no cubin"),
        ({"arch": "sm_100a"}, "is for sm_100a and .* is sm_90a"),
    ],
)
def test_a_forward_that_cannot_run_is_refused(
    tmp_path: Path, kind: str, wrong: dict[str, Any], says: str
) -> None:
    forward, fallbacks = emitted()
    (variant, compiled), *others = fallbacks
    if kind == "tuned":
        forward = replace(forward, compiled=replace(forward.compiled, **wrong))
    else:
        fallbacks = ((variant, replace(compiled, **wrong)), *others)
    with pytest.raises(NormforgeError, match=says):
        emit_package([], [], H200, tmp_path, Forwards((forward,), fallbacks))
    assert list(tmp_path.iterdir()) == []


def test_package_holds_forward_kernels_that_its_runtime_finds(package: Path) -> None:
    forward, fallbacks = emitted()
    table = ForwardTable.load(package)
    assert table is not None
    kernels = list(table.kernels())
    assert len(kernels) == 1 + len(fallbacks)
    for kernel in kernels:
        assert kernel.read_cubin(package)
    (source,) = (package / "kernels").iterdir()
    assert source.stem == kernels[0].file
    assert source.read_text().count("__global__") == 2
    choice = table.choose(9000, 1024, "bf16", "bf16")
    assert choice.how == "nearest" and choice.kernel is not None and choice.tuned is not None
    assert (choice.kernel.file, choice.tuned.evidence) == (forward.variant.id, "measured")
    y, _ = Forward(source_of(package, "rmsnorm_backward"))(torch.ones(2, 8))
    assert y.shape == (2, 8)


def test_without_the_machine_code_of_a_forward_nothing_is_exported(package: Path) -> None:
    table, path = ForwardTable.load(package), package / CUBINS_INDEX
    assert table is not None
    index = json.loads(path.read_text())
    for kernel in table.kernels():
        path.write_text(json.dumps({name: at for name, at in index.items() if name != kernel.file}))
        with pytest.raises(NormforgeError, match=f"cannot be exported .*{kernel.file}"):
            read_package(package)


def test_choice_follows_width_alignment_and_dtype(package: Path) -> None:
    table = ForwardTable.load(package)
    assert table is not None

    def choose(N: int, dtype: str = "bf16", *, at: int = 16, weight_at: int = 16) -> Any:
        choice = table.choose(4096, N, dtype, dtype, at, weight_at)
        kernel = choice.kernel
        return choice.how, kernel and (kernel.spec.N, kernel.spec.vector_bytes)

    assert choose(1024) == ("tuned", (1024, 16))
    assert choose(1024, at=2) == ("fallback", (1024, 2))
    assert choose(1024, weight_at=4) == ("fallback", (1024, 2))
    assert choose(1025) == ("fallback", (2048, 2))
    assert choose(1000) == ("fallback", (1024, 16))
    assert choose(96) == ("fallback", (128, 16))
    assert choose(1152) == ("fallback", (2048, 16))
    assert choose(8192)[1] == (8192, 16)
    assert choose(8200)[1] == (ANY_COLUMNS, 16)
    assert choose(8201)[1] == (ANY_COLUMNS, 2)
    assert choose(100_003)[1] == (ANY_COLUMNS, 2)
    assert choose(1024, "fp32") == ("none", None)


def test_emission_without_forwards_keeps_them_and_a_rule_never_replaces_a_measurement(
    package: Path,
) -> None:
    before = (package / "forward.json").read_text()
    emit_package([], [], H200, package)
    assert (package / "forward.json").read_text() == before
    forward, fallbacks = emitted()
    predicted = replace(forward, evidence="predicted", provenance={"reason": "rule"})
    other = replace(predicted, problem=Problem.parse("64x1024:bf16"))
    emit_package([], [], H200, package, Forwards((predicted, other), fallbacks))
    tuned = json.loads((package / "forward.json").read_text())["tuned"]
    assert [(e["M"], e["evidence"]) for e in tuned] == [(64, "predicted"), (4096, "measured")]


def test_one_source_of_a_form_is_written_and_stays_while_its_kernel_does(package: Path) -> None:
    def source() -> str:
        (found,) = (package / "kernels").iterdir()
        return found.stem

    forward, fallbacks = emitted()
    first, second = tuned("4096x512:bf16"), tuned("4096x256:bf16")
    assert source() == forward.variant.id
    emit_package([], [], H200, package, Forwards((second, first), fallbacks))
    assert source() == forward.variant.id
    table = ForwardTable.load(package)
    assert table is not None and len(table.tuned) == 3
    other = replace(forward, variant=second.variant, compiled=second.compiled)
    emit_package([], [], H200, package, Forwards((other,), fallbacks))
    assert source() == min(first.variant.id, second.variant.id)


@pytest.mark.parametrize("name", ["cluster", "threads_per_row", "vector_bytes", "form"])
def test_forwards_beside_batch_invariant_kernels_add_in_one_order(package: Path, name: str) -> None:
    table = ForwardTable.load(package)
    assert table is not None
    (entry,) = table.tuned
    changed = replace(entry.kernel, config={**entry.kernel.config, name: "another"})
    other = replace(entry, M=64, kernel=changed)
    kernel = SimpleNamespace(spec=SimpleNamespace(run_rows=16))
    invariant: Any = SimpleNamespace(kernels=lambda: [kernel], tuned=())
    for beside in (replace(entry, M=64), replace(other, N=2048), replace(other, dtype="fp16")):
        _check_arithmetic(invariant, replace(table, tuned=(entry, beside)))
    with pytest.raises(NormforgeError, match="y of 64x1024:bf16 would have other bits than those"):
        _check_arithmetic(invariant, replace(table, tuned=(entry, other)))


def test_package_without_a_forward_table_loads_and_a_damaged_one_says_so(package: Path) -> None:
    (package / "forward.json").write_text("{}")
    with pytest.raises(ValueError, match=r"forward\.json is damaged"):
        Forward(source_of(package, "rmsnorm_backward"))
    with pytest.raises(NormforgeError, match="no readable forward table"):
        emit_package([], [], H200, package)
    (package / "forward.json").unlink()
    assert Forward(source_of(package, "rmsnorm_backward")).table is None
