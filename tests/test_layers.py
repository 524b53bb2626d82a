"""Packages import in one direction only, the library nothing of the generator, modules not each
other, and tests no tests; files and functions are short."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from generator.package.standalone import library_files
from generator.paths import LIBRARY, REPOSITORY

GENERATOR = REPOSITORY / "generator"
LAYERS = (
    *(
        "errors paths disk processes text_table",
        "problem shape_lists target result own_files collected",
        "operations",
    ),
    *("kernels", "space", "evaluate", "studies", "package", "emulate", "search", "tuner"),
    *("report", "cli"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names.split()}
LIBRARY_LAYERS = (
    *(
        "identity cubins spec older_tables this_gpu torch_internals operations shape_names",
        "table",
        "collected",
        "launch",
    ),
    *("serve native frontends api", "own", "packages"),
    *(
        "gated_packages rope_packages quantized_packages",
        "gated rmsnorm rope quantized layernorm batch_invariant torchtitan",
    ),
)
LIBRARY_LEVEL = {name: at for at, names in enumerate(LIBRARY_LAYERS) for name in names.split()}
MOST_LINES = 300
MOST_TEST_LINES = 600
MOST_LINES_OF_A_FUNCTION = 60


def modules(folder: Path = GENERATOR) -> dict[str, Path]:
    """Every module of the generator by its dotted name."""
    found = {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> list[tuple[str, int, bool]]:
    """List what a module imports from the generator: module, line, and whether it does so at its
    top level. A package counts only where nothing below it is meant."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text())
    top = set(tree.body) | {
        node
        for block in tree.body
        if isinstance(block, ast.If | ast.Try)
        for node in ast.walk(block)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [node.module])])
            names = [(base, alias.name) for alias in node.names]
        else:
            continue
        for base, alias in names:
            target = f"{base}.{alias}" if f"{base}.{alias}" in known else base
            if target in known:
                found.append((target, node.lineno, node in top))
    return found


def level(module: str, levels: dict[str, int] = LEVEL) -> int:
    return levels[module.split(".")[1]]


def against_the_order(folder: Path = GENERATOR, levels: dict[str, int] = LEVEL) -> list[str]:
    """Every import from a package that is not left of the importing one."""
    known = modules(folder)
    return [
        f"{path.relative_to(folder.parent)}:{line} imports {target}, which is to its right"
        for name, path in known.items()
        for target, line, _ in imports(name, path, known)
        if folder.name not in (name, target)
        if level(target, levels) > level(name, levels)
    ]


def test_imports_go_one_way() -> None:
    assert against_the_order() == []
    assert against_the_order(LIBRARY, LIBRARY_LEVEL) == []


def test_what_an_operation_is_needs_nothing_else_of_the_library() -> None:
    """A user's own file imports it, and the generator, which says much without PyTorch."""
    known = modules(LIBRARY)
    for name, path in known.items():
        if name.startswith("normforge.operations"):
            targets = {target for target, _, _ in imports(name, path, known)}
            assert all(target.startswith("normforge.operations") for target in targets), name
    code = "import sys, generator, normforge.operations; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)


def test_the_library_imports_nothing_of_the_generator() -> None:
    known = modules() | modules(LIBRARY)
    found = [
        f"{path.relative_to(REPOSITORY)}:{line} imports {target}"
        for name, path in modules(LIBRARY).items()
        for target, line, _ in imports(name, path, known)
        if target.split(".")[0] == "generator"
    ]
    assert found == []


def test_what_a_package_has_a_copy_of_imports_nothing_that_it_has_not() -> None:
    """It names no module from its top, which has another name there."""
    known = modules(LIBRARY)
    copied = {path.relative_to(LIBRARY) for path in known.values()} & {*library_files()}
    assert len(copied) > 50
    for name, path in known.items():
        if path.relative_to(LIBRARY) not in copied:
            continue
        for target, line, _ in imports(name, path, known):
            there = target == "normforge" or known[target].relative_to(LIBRARY) in copied
            assert there, f"{path}:{line} imports {target}"
        assert "normforge." not in absolute_names(path), path


def absolute_names(path: Path) -> str:
    """The modules that a file imports by their whole names."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [f"{alias.name}." for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.append(f"{node.module}.")
    return " ".join(found)


@pytest.mark.parametrize("folder", [GENERATOR, LIBRARY], ids=lambda folder: folder.name)
def test_no_two_modules_import_each_other(folder: Path) -> None:
    known = modules(folder)
    graph = {
        name: {target for target, _, top in imports(name, path, known) if top and target != name}
        for name, path in known.items()
    }
    for name, path in known.items():
        if path.name == "__init__.py":  # a package imports what it offers from below
            graph[name] = set()
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")


def test_an_import_against_the_order_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "generator"
    (folder / "kernels").mkdir(parents=True)
    (folder / "search").mkdir()
    (folder / "kernels" / "render.py").write_text("def f():\n    from generator.search import x\n")
    (folder / "search" / "x.py").write_text("")
    (folder / "errors.py").write_text("")
    assert against_the_order(folder) == [
        "generator/kernels/render.py:2 imports generator.search.x, which is to its right"
    ]


def test_the_command_line_stays_in_its_module() -> None:
    said = [
        str(path.relative_to(REPOSITORY))
        for name, path in modules().items()
        if "argparse" in path.read_text() and level(name if "." in name else "x.cli") < LEVEL["cli"]
    ]
    assert said == ["generator/emulate/__main__.py"]  # a command of its own


def files_of(folder: Path) -> dict[str, Path]:
    """Every Python file below a folder of the repository by its name there."""
    return {str(path.relative_to(folder.parent)): path for path in sorted(folder.rglob("*.py"))}


def sources() -> dict[str, Path]:
    """Every Python file of the project but its tests, its examples and what is generated."""
    found = {"tune.py": REPOSITORY / "tune.py"}
    for folder in ("generator", "normforge", "benchmarks"):
        found |= files_of(REPOSITORY / folder)
    return found


def imported_tests(path: Path) -> list[tuple[int, str]]:
    """Test modules that a file imports, also in the programs that it runs: line and module."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = re.findall(r"^ *(?:from|import) +(tests[\w.]*)", node.value, re.MULTILINE)
        else:
            continue
        modules = (re.match(r"(?:\.|tests\.)[\w.]*?\btest_\w+", name) for name in names)
        found += [(node.lineno, match.group()) for match in modules if match]
    return sorted(set(found))


def imports_of_tests(folder: Path = REPOSITORY / "tests") -> list[str]:
    return [
        f"{name}:{line} imports {module}; what tests share belongs in tests/support"
        for name, path in files_of(folder).items()
        for line, module in imported_tests(path)
    ]


def test_no_test_imports_a_test() -> None:
    assert imports_of_tests() == []


def test_an_import_of_a_test_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    (folder / "space").mkdir(parents=True)
    here = "tests"  # spelled out, these lines would be found in this file
    shared = f"from {here}.space.test_rules import SPACE"
    sharing = [shared, f"import {here}.test_target", "from .test_x import y"]
    program = f'P = """\nimport time\n{shared}\n"""'
    fine = ["from tests.support.samples import SPACE", "from tests import support"]
    (folder / "space" / "test_space.py").write_text("\n".join([*sharing, program, *fine]))
    found = [line.split(";")[0] for line in imports_of_tests(folder)]
    assert found == [
        "tests/space/test_space.py:1 imports tests.space.test_rules",
        "tests/space/test_space.py:2 imports tests.test_target",
        "tests/space/test_space.py:3 imports .test_x",
        "tests/space/test_space.py:4 imports tests.space.test_rules",
    ]


def too_long(files: dict[str, Path], most: int) -> dict[str, int]:
    lines = {name: len(path.read_text().splitlines()) for name, path in files.items()}
    return {name: count for name, count in lines.items() if count > most}


def unnamed_encodings(tree: ast.AST) -> list[str]:
    """Calls that open a file for text in whatever encoding the locale has."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", "") or getattr(node.func, "id", "")
        dot = isinstance(node.func, ast.Attribute)
        text = name == "open" or (dot and name in ("read_text", "write_text"))
        if not text or (call := ast.unparse(node)).startswith("os.open("):
            continue
        given = (*node.args, *(word.value for word in node.keywords))
        modes = {argument.value for argument in given if isinstance(argument, ast.Constant)}
        modes = {mode for mode in modes if re.fullmatch(r"[rwxa+bt]+", str(mode))}
        in_bytes = any("b" in mode for mode in modes) or (call.startswith("lzma.") and not modes)
        if name == "open" and in_bytes:
            continue
        if all(keyword.arg != "encoding" for keyword in node.keywords):
            found.append(call)
    return found


def test_text_has_an_encoding_whatever_the_locale() -> None:
    trees = {name: ast.parse(path.read_text("utf-8")) for name, path in sources().items()}
    assert {name: calls for name, tree in trees.items() if (calls := unnamed_encodings(tree))} == {}
    planted = "p.open(); p.read_text(); p.write_text(t); p.open('rb'); os.open(p, 0); lzma.open(p)"
    planted += "; lzma.open(p, 'rt'); p.open('w'); p.read_text(encoding='utf-8'); open(p)"
    planted += "; archive.open('table.json'); open(p, mode='xb')"
    assert len(unnamed_encodings(ast.parse(planted))) == 7


def lone_supers(tree: ast.AST) -> int:
    """Count calls of `super()` that no attribute follows at once: from Python 3.12 on torch.compile
    refuses to trace them."""
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        if getattr(node.func, "id", "") == "super" and not (node.args or node.keywords)
    ]
    followed = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return len(calls) - sum(node.value in calls for node in followed)


def test_super_is_followed_by_an_attribute() -> None:
    trees = {name: ast.parse(path.read_text("utf-8")) for name, path in sources().items()}
    assert {name: count for name, tree in trees.items() if (count := lone_supers(tree))} == {}
    assert (
        lone_supers(ast.parse("a = super() if b else c; super().d(); (super()).e; f(super())")) == 2
    )


def test_a_file_is_read_in_one_sitting() -> None:
    assert too_long(sources(), MOST_LINES) == {}
    assert too_long(files_of(REPOSITORY / "tests"), MOST_TEST_LINES) == {}


def long_functions(files: dict[str, Path]) -> dict[str, int]:
    """Functions of too many lines, with their signatures and without their docstrings."""
    found = {}
    for name, path in files.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            lines = (node.end_lineno or 0) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            if lines > MOST_LINES_OF_A_FUNCTION:
                found[f"{name}: {node.name}"] = lines
    return found


def test_a_function_fits_on_a_screen() -> None:
    assert long_functions(sources()) == {}


def test_a_long_function_is_named(tmp_path: Path) -> None:
    body = ["    x = 1"] * MOST_LINES_OF_A_FUNCTION
    docstring = '    """What it does.\n\n    At length."""'
    path = tmp_path / "module.py"
    path.write_text("\n".join(["def short():", docstring, *body[1:], "def long():", *body]))
    assert long_functions({"module.py": path}) == {"module.py: long": 61}
