"""Type checkers, `inspect` and `dir` look at the library."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch

import normforge
import normforge.batch_invariant as batch_invariant
from generator.paths import REPOSITORY
from tests.support.patience import patience


@pytest.mark.parametrize(
    ("checker", "options"),
    [
        ("pyright", ["--pythonpath", sys.executable]),
        pytest.param("mypy", [], marks=pytest.mark.slow),
    ],
)
def test_names_have_types_and_other_names_are_refused(checker: str, options: list[str]) -> None:
    """tests/support/typed_use.py says which."""
    pytest.importorskip(checker)
    command = [sys.executable, "-m", checker, *options, "tests/support/typed_use.py"]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=patience(300)
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_overloads_state_the_defaults_of_the_function() -> None:
    """A type checker and an editor show those of the overloads, and the function has its own."""
    compared = 0
    for path in sorted((REPOSITORY / "normforge").rglob("*.py")):
        overloads: dict[str, list[ast.arguments]] = {}
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            if any(ast.unparse(one) == "overload" for one in node.decorator_list):
                overloads.setdefault(node.name, []).append(node.args)
                continue
            has = defaults(node.args)
            if (
                node.args.kwarg is not None
            ):  # which takes anything, for another that has the defaults
                overloads.pop(node.name, None)
            for overload in overloads.pop(node.name, ()):
                stated = {name: text for name, text in defaults(overload).items() if text != "..."}
                assert stated.items() <= has.items(), f"{path.name}: {node.name}"
                compared += len(stated)
        assert not overloads, path
    assert compared > 20


def defaults(arguments: ast.arguments) -> dict[str, str]:
    """The defaults of the arguments that have one, as text."""
    by_place = [*arguments.posonlyargs, *arguments.args]
    having = by_place[len(by_place) - len(arguments.defaults) :]
    pairs = [
        *zip(having, arguments.defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    return {argument.arg: ast.unparse(value) for argument, value in pairs if value is not None}


EPS = {
    **dict.fromkeys(("LayerNorm", "layer_norm", "layer_norm_forward"), 1e-5),
    **dict.fromkeys(("RMSNorm", "rms_norm", "rmsnorm_forward", "rms_norm_quantized"), None),
    **dict.fromkeys(("RMSNormGated", "rms_norm_gated", "rms_norm_rope", "qk_norm_rope"), 1e-6),
}
"""The eps that a call gets which names none: PyTorch's, and that of the models of the others."""


@pytest.mark.parametrize("name", [*normforge._MODULES, "layernorm_forward"])
def test_calls_without_an_eps_get_the_one_of_their_kind(name: str) -> None:
    library = name in normforge._MODULES
    module = importlib.import_module(f"{'normforge' if library else 'generated.h200'}.{name}")
    having = 0
    for each in module.__all__:
        function = getattr(module, each)
        if callable(function):
            eps = inspect.signature(function).parameters.get("eps")
            assert eps is None or eps.default == EPS[each], each
            having += eps is not None
    assert having


def test_signature_of_a_layer_is_that_of_its_init() -> None:
    class Own(normforge.RMSNorm):
        def __init__(self, width: int) -> None:
            super().__init__(width)

    found = inspect.signature(normforge.RMSNorm).parameters
    plain = inspect.signature(torch.nn.RMSNorm).parameters
    assert [*found][: len(plain)] == [*plain]
    assert {"bias", "weight_offset", "main_grad", "batch_invariant", "matches"} <= {*found}
    assert [*inspect.signature(Own).parameters] == ["width"]
    # skip_init asks for a parameter `device`.
    made: Any = torch.nn.utils.skip_init(normforge.RMSNorm, 64)
    assert type(made) is normforge.RMSNorm


def test_a_layer_of_a_layer_cannot_ask_for_batch_invariance_in_vain() -> None:
    class Own(normforge.RMSNorm):
        def __init__(self) -> None:
            super().__init__(64, batch_invariant=True)

    with pytest.raises(TypeError, match="Own cannot become batch-invariant"):
        Own()
    found = normforge.RMSNorm((4, 16), 1e-5, dtype=torch.float64, batch_invariant=True)
    assert type(found) is batch_invariant.RMSNorm
    assert (found.normalized_shape, found.weight.dtype) == ((4, 16), torch.float64)


def test_dir_has_every_name() -> None:
    found = dir(normforge)
    assert {*normforge.__all__, "__version__", "layernorm", "batch_invariant"} <= {*found}
    assert all(hasattr(normforge, name) for name in found)
