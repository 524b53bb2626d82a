"""Plain torch.compile of models with operators of packages: additions become part of them, by the
pass that an operator puts into Inductor's place for one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

from generator.paths import REPOSITORY
from normforge.api import Package
from normforge.frontends.graph_pass import make_backend
from normforge.frontends.inductor import SLOT, folding_pass
from tests.support.entry_points import randn, write_layer_norm_package, write_package
from tests.support.layer_classes import model_of, step

FOLDED = "additions into norms"


@pytest.fixture
def package(tmp_path: Path, own_cache: None) -> Package:
    return write_package(tmp_path / "package")


@pytest.fixture(autouse=True)
def empty_place() -> Iterator[None]:
    torch._dynamo.reset()
    with config.patch({SLOT: None}):
        yield


def block(norm: Any) -> Any:
    """Return a function whose norm takes a sum that goes on, with another gradient behind it."""

    def run(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x + r
        return h + norm(h, w).tanh()

    return run


def leaves() -> list[torch.Tensor]:
    return [
        randn(*shape, seed=s).requires_grad_() for s, shape in enumerate([(4, 16)] * 2 + [(16,)])
    ]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if FOLDED in message]


def test_additions_become_part_of_operators(
    package: Package, caplog: pytest.LogCaptureFixture
) -> None:
    run, given = block(package.rms_norm), leaves()
    wanted = torch.autograd.grad(run(*given).sum(), given)
    with caplog.at_level("INFO"):
        found = torch.autograd.grad(torch.compile(run, fullgraph=True)(*given).sum(), given)
    torch.testing.assert_close(found, wanted)
    # Before the norm, and behind its backward.
    assert told(caplog) == ["folded 1 additions into norms"] * 2
    assert getattr(config, SLOT) is folding_pass()


def test_norms_with_a_mean_take_the_gradient_of_the_stream(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, own_cache: None
) -> None:
    package = write_layer_norm_package(tmp_path / "package")

    def run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return x + package.layer_norm(x, w, b).tanh()

    x, _, w = leaves()
    given = [x, w, w.detach().clone().requires_grad_()]
    wanted = torch.autograd.grad(run(*given).sum(), given)
    with caplog.at_level("INFO"):
        found = torch.autograd.grad(torch.compile(run, fullgraph=True)(*given).sum(), given)
    torch.testing.assert_close(found, wanted)
    assert told(caplog) == ["folded 1 additions into norms"]


def test_a_pass_of_somebody_else_stays(package: Package, caplog: pytest.LogCaptureFixture) -> None:
    class Theirs(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            pass

        def uuid(self) -> str:
            return "theirs"

    given, theirs = leaves(), Theirs()
    with config.patch({SLOT: theirs}), caplog.at_level("INFO"):
        torch.compile(block(package.rms_norm), fullgraph=True)(*given)
        assert getattr(config, SLOT) is theirs
        with pytest.raises(ValueError, match="where there is a pass already"):
            make_backend(package.ops)(torch.fx.symbolic_trace(lambda x: x), [given[0]])
    assert told(caplog) == []


def test_the_backend_has_its_own_pass(package: Package, caplog: pytest.LogCaptureFixture) -> None:
    """Inductor's place holds the pass for others, which the backend does not refuse."""
    run, given = block(package.rms_norm), leaves()
    torch.compile(run, fullgraph=True)(*given)
    torch._dynamo.reset()
    with caplog.at_level("INFO"):
        torch.compile(run, backend=make_backend(package.ops), fullgraph=True)(*given)
    assert told(caplog) == []
    assert sum("additions folded: 1" in message for message in caplog.messages) >= 1


def test_its_key_in_caches_says_which_kernels_add(package: Package) -> None:
    before = folding_pass().uuid()
    package.add_gradients_by(lambda operation: f"there is no {operation}")
    after = folding_pass().uuid()
    assert before != after == folding_pass().uuid()


def test_eager_code_does_not_load_inductor(tmp_path: Path) -> None:
    write_package(tmp_path / "package")
    line = f"""
import sys, torch
from pathlib import Path
from normforge.api import Package
package = Package(Path({str(tmp_path / "package")!r}), "eager")
model = torch.nn.Sequential(torch.nn.RMSNorm(16))
assert package.patch(model) == ["0"]
model(torch.randn(2, 16, requires_grad=True)).sum().backward()
assert "torch._inductor.config" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", line], check=True, cwd=REPOSITORY)


@pytest.mark.slow
def test_a_patched_llama_has_no_additions_around_its_norms(
    package: Package, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = model_of("Llama"), torch.arange(12).reshape(2, 6)
    wanted = step(model, ids)
    package.patch(model)
    model.model.forward = torch.compile(model.model.forward)
    with caplog.at_level("INFO"):
        torch.testing.assert_close(step(model, ids), wanted, atol=1e-4, rtol=1e-4)
    # Of five norms on the stream, the first has nothing added before it, and the last no second
    # gradient behind it.
    assert told(caplog) == ["folded 4 additions into norms"] * 2
