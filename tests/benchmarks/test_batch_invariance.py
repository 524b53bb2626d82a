"""benchmarks.batch_invariance: a right package passes, and one planted dependence is seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import batch_invariance
from benchmarks.batch_invariance import FORMS, Case, check
from normforge.serve.reference import reference_backward, reference_forward

N, SMS, CHUNK_ROWS = 8, 7, 256
ONE, MANY = ("dw of",), ("dw of micro-batches of",)
Mistake = Callable[["Package", torch.Tensor, dict[str, torch.Tensor], bool], object]


class Package:
    """Computes row by row, and dw chunk by chunk. mistake: is shown the rows and the outputs of
    every call, and whether dw was added to a buffer."""

    PROVENANCE = {"target": {"sms": SMS, "title": "GPU"}}  # noqa: RUF012

    def __init__(self, mistake: Mistake = lambda *call: None) -> None:
        self.mistake, self.margin = mistake, 0
        self.margins: list[int] = []

    def set_sm_margin(self, sms: int) -> None:
        self.margin = sms
        self.margins.append(sms)

    def rmsnorm_forward(self, x: Any, weight: Any, eps: float) -> Any:
        y, rstd = reference_forward(x.contiguous(), weight, eps)
        self.mistake(self, x, {"y": y, "rstd": rstd}, False)
        return y, rstd

    def rmsnorm_backward(
        self,
        dy: Any,
        x: Any,
        rstd: Any,
        weight: Any,
        *,
        dw_out: Any = None,
        accumulate: bool = False,
        dw_dtype: Any = torch.float32,
    ) -> Any:
        dx, _ = reference_backward(dy, x.contiguous(), rstd, weight)
        dw = dw_out if accumulate else torch.zeros(N)
        terms = dy.float() * x.float() * rstd.reshape(-1, 1)
        for chunk in terms.split(CHUNK_ROWS):
            dw += chunk.sum(0)
        self.mistake(self, x, {"dx": dx, "dw": dw}, accumulate)
        return dx, dw


def flip(out: dict[str, torch.Tensor], name: str) -> None:
    """Change the last bit of the last number of an output, in the calls that have it."""
    if name in out:
        out[name].view(-1).view(torch.uint8)[0] ^= 1


def case(monkeypatch: pytest.MonkeyPatch, package: Package) -> Case:
    monkeypatch.setattr(batch_invariance, "ELEMENTS", 1)
    monkeypatch.setattr(batch_invariance, "CHUNK_ROWS", CHUNK_ROWS)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return Case(package, N, "bf16", "cpu")


def test_a_right_package_has_no_differing_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    package = Package()
    found = check(case(monkeypatch, package), 40, 60.0)
    assert found.pop("seconds") >= 0
    of = {"N": N, "dtype": "bf16", "rows": 4096}
    assert found == {**of, "cases": 40, "differing": 0, "first": []}
    assert {*package.margins} == {*range(SMS)}, "on any number of SMs"


@pytest.mark.parametrize("name", ["y", "rstd", "dx"])
@pytest.mark.parametrize(
    "shows",
    [
        lambda package, x: len(x) < 4096,
        lambda package, x: package.margin > 0,
        lambda package, x: x.stride(0) > N,
        lambda package, x: x.storage_offset() % N == 1,
    ],
    ids=["rows", "SMs", FORMS[1], FORMS[2]],
)
def test_a_row_that_depends_on_its_batch_is_seen(
    monkeypatch: pytest.MonkeyPatch, name: str, shows: Callable[[Package, Any], bool]
) -> None:
    package = Package(lambda own, x, out, added: shows(own, x) and flip(out, name))
    found = check(case(monkeypatch, package), 40, 60.0)
    assert 5 <= found["differing"] <= 40
    assert len(found["first"]) == 3 and all(f"{name} of rows" in said for said in found["first"])


@pytest.mark.parametrize(
    ("shows", "said"),
    [
        # On these SMs only: a call is compared with one on another number of them.
        (lambda package, x, added: package.margin == 3 and not added, ONE + MANY),
        (lambda package, x, added: not x.is_contiguous() and not added, ONE + MANY),
        (lambda package, x, added: added, MANY),
    ],
    ids=["SMs", "form", "accumulated"],
)
def test_sums_that_depend_on_more_than_the_rows_are_seen(
    monkeypatch: pytest.MonkeyPatch, shows: Callable[..., bool], said: tuple[str, ...]
) -> None:
    package = Package(lambda own, x, out, added: shows(own, x, added) and flip(out, "dw"))
    tried = case(monkeypatch, package)
    random = Random(0)
    found = [fault for _ in range(60) if (fault := tried.differs(random))]
    assert {fault.split(" rows ")[0] for fault in found} == {*said}


@pytest.mark.parametrize("differing", [0, 1])
def test_the_exit_code_says_if_a_bit_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, differing: int
) -> None:
    tuned = [SimpleNamespace(N=n, dtype="bf16") for n in (64, 8, 64)]
    package = SimpleNamespace(
        PROVENANCE=Package.PROVENANCE,
        _package=SimpleNamespace(table=SimpleNamespace(tuned=tuned)),
    )

    class Pool:
        def __init__(self, *_: object, **__: object) -> None: ...

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None: ...

        map = staticmethod(map)

    def checked(name: str, n: int, dtype: str, **_: object) -> dict[str, Any]:
        return {"N": n, "dtype": dtype, "differing": differing * (n == 8)}

    monkeypatch.setattr(batch_invariance, "open_session", lambda: SimpleNamespace(facts={}))
    monkeypatch.setattr(batch_invariance, "machine", lambda facts: {})
    monkeypatch.setattr(batch_invariance, "import_module", lambda name: package)
    monkeypatch.setattr(batch_invariance, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(batch_invariance, "check_width", checked)
    out = tmp_path / "out.json"
    assert batch_invariance.main(["--out", str(out)]) == differing
    rows = json.loads(out.read_text())["rows"]
    assert [(row["N"], row["differing"]) for row in rows] == [(8, differing), (64, 0)]
