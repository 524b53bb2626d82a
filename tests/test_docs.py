"""Links of the pages lead somewhere."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

from benchmarks.pages.functions import FUNCTION, as_markdown, described, public_name
from benchmarks.pages.text import read
from generator.operations import OPERATIONS
from generator.paths import GENERATED, REPOSITORY
from generator.target import load_targets
from normforge.table import Table

PAGES = sorted(
    page for folder in (".", "docs", "benchmarks") for page in (REPOSITORY / folder).glob("*.md")
)


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def described_paths() -> list[str]:
    """Return the paths in the library of what docs/api.md describes."""
    page = (REPOSITORY / "docs" / "api.md").read_text()
    return [found[2] for found in FUNCTION.finditer(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    """`generator/...`, `templates/...` and `tests/...` in a page, up to a * or a placeholder."""
    named = re.findall(
        r"`((?:generator|templates|search_spaces|tests|benchmarks)/[\w./-]+)`", page.read_text()
    )
    missing = [name for name in named if not (REPOSITORY / name).exists()]
    assert [name for name in missing if name != "templates/dw/dw_relay.cuh"] == []


def test_every_function_of_a_package_is_on_its_page() -> None:
    """docs/api.md describes what packages export."""
    ends = [operation.front_end for operation in OPERATIONS.values() if operation.front_end]
    exported = {name for end in ends for name in ("PROVENANCE", end.norm, *end.functions) if name}
    described = {public_name(path).rpartition(".")[2] for path in described_paths()}
    described -= {"collect", "use_batch_invariant"}  # normforge has these, and no package
    assert exported == described


def test_what_that_page_describes_is_there_under_the_name_that_it_gives() -> None:
    names = [public_name(path) for path in described_paths()]
    assert len({*names}) == len(names)
    for path, name in zip(described_paths(), names, strict=True):
        assert inspect.getdoc(pkgutil.resolve_name(path)), path
        if name != "PROVENANCE":  # of a package
            assert pkgutil.resolve_name(f"normforge.{name}"), name


def test_a_signature_on_that_page_has_the_names_and_defaults_of_the_function() -> None:
    """Functions with overloads are left out."""
    for path in described_paths():
        found, text = pkgutil.resolve_name(path), described(path)
        if isinstance(found, property) or "\n\n" in text.split("```")[1].strip():
            continue
        if isinstance(found, type) and "__init__" not in vars(found):
            continue
        code = re.sub(r" -> .*", "", text.split("```python\n")[1].split("\n```")[0], flags=re.S)
        told = ast.parse(f"def {code}: ...").body[0]
        assert isinstance(told, ast.FunctionDef)
        parameters = inspect.signature(found).parameters
        names = {argument.arg for argument in ast.walk(told.args) if isinstance(argument, ast.arg)}
        assert names == parameters.keys() - {"self"}, path
        needed = told.args.args[: len(told.args.args) - len(told.args.defaults)]
        assert {argument.arg for argument in needed} == {
            name
            for name, parameter in parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            and name != "self"
        }, path


def test_a_docstring_becomes_paragraphs_and_lists() -> None:
    text = """What it does
    in two lines.

    Args:
        x, y: rows; see
            docs/method.md.
        w: columns.

    Returns:
        A sum,
            in fp32.

    It ends here."""
    assert as_markdown(inspect.cleandoc(text)) == (
        "What it does in two lines.\n\n"
        "**Arguments**\n\n- `x`, `y`: rows; see [method](method.md).\n- `w`: columns.\n\n"
        "**Returns** A sum, in fp32.\n\nIt ends here."
    )


def test_the_site_can_follow_the_links_of_the_readme() -> None:
    """It is the index of the site, which holds the pages of docs/ and the images that they show."""
    spec = importlib.util.spec_from_file_location("hooks", REPOSITORY / "docs" / "site_hooks.py")
    assert spec is not None and spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    readme = (REPOSITORY / "README.md").read_text()
    index = hooks.as_page(hooks.as_index(readme))
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", index)]
    images = hooks.IMAGE.findall(readme)
    assert images and {link for link in links if link.startswith("benchmarks/")} == {*images}
    assert all((REPOSITORY / image).exists() for image in images)
    pages = {link for link in links if link} - {*images}
    assert pages == {page.name for page in (REPOSITORY / "docs").glob("*.md")}
    assert "`CONTRIBUTING.md`" in index and "docs/" not in re.sub(r"`[^`]*`|^    .*$", "", index)
    assert (
        hooks.as_page("[a](../README.md#b), [c](../tests/d.py)") == "[a](index.md#b), `tests/d.py`"
    )


GPUS = ("h200", "h100", "gb200")
ROWS = {
    "RMSNorm, forward and backward": "rmsnorm_backward",
    "batch-invariant RMSNorm": "rmsnorm_invariant_backward",
    "LayerNorm, backward": "layernorm_backward",
    "LayerNorm, forward": "layernorm_forward",
    "gated RMSNorm": "gated_rmsnorm_backward",
    "RMSNorm and rotary embedding": "rmsnorm_rope_backward",
    "rotary embedding alone": "rope",
    "RMSNorm's backward of added gradients, in compiled models": "rmsnorm_sum3_backward",
    "RMSNorm to FP8, forward": "rmsnorm_fp8_forward",
    "RMSNorm to MXFP8, forward": "rmsnorm_mxfp8_forward",
    "backward of RMSNorm with dx in FP8, too": "rmsnorm_fp8_backward",
}
"""Rows of the README's table of support, and the operations that they are about."""


def dtypes_tuned(gpu: str, operation: str) -> str:
    """With which dtypes a package has tuned kernels, as the README says it."""
    folder = GENERATED / gpu / operation
    if not folder.exists():
        return "none"
    tuned = Table.load(folder).tuned
    wanted = "predicted" if gpu == "gb200" else "measured"
    assert {entry.evidence for entry in tuned} == {wanted}
    found = {(entry.dtype, entry.weight_dtype) for entry in tuned}
    return ", ".join(
        dtype if dtype == weight else f"{dtype} with an {weight} weight"
        for dtype, weight in sorted(found)
    )


def test_the_table_of_support_is_that_of_the_packages() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    table = re.search(r"^\| dtypes with.*?(?=\n\n)", readme, re.M | re.S)[0]
    header, _, *lines = table.splitlines()
    assert header == "| dtypes with tuned kernels | H200 | H100 | GB200 (predicted, never timed) |"
    told = {}
    for line in lines:
        name, *cells = re.sub(r"\]\([^)]*\)|\[", "", line).strip("| ").split(" | ")
        told[name] = cells
    assert told == {
        name: [dtypes_tuned(gpu, operation) for gpu in GPUS] for name, operation in ROWS.items()
    }
    listed = re.search(r"and other GPUs: ([^\[]*), and \[", " ".join(readme.split()))[1].split(", ")
    known = {name.upper().replace("-", " ") for name in load_targets()}
    assert listed and known.issuperset(listed)


def test_the_first_screen_of_the_readme_has_no_measured_number() -> None:
    """Ratios stand under "How fast", behind what Normforge is, how it is used, and its limits."""
    readme = (REPOSITORY / "README.md").read_text()
    first, _ = readme.split("\n## How fast\n")
    assert "<!-- numbers" not in first and "%" not in first
    assert (
        first.index("git clone --depth 1")
        < first.index("h100_rotation.svg")
        < first.index("| dtypes")
    )


def test_pages_name_the_versions_of_pytorch_that_are_tested() -> None:
    """pip lets the oldest of them in."""
    ends = (REPOSITORY / ".ci" / "pytorch_versions.txt").read_text()
    pins = (REPOSITORY / "requirements.txt").read_text()
    (oldest, first), (newest, last) = re.findall(r"^torch==(\S+)  # Python (\S+)$", ends, re.M)
    (usual,) = re.findall(r"^torch==(\S+)$", pins, flags=re.M)
    least = oldest.rpartition(".")[0]
    assert f'"torch>={least}"' in (REPOSITORY / "pyproject.toml").read_text()
    packages = (REPOSITORY / "docs" / "generated-code.md").read_text()
    (measured,) = {
        read(name)["environment"]["torch"].partition("+")[0] for name in ("h200", "forward_h200")
    }
    assert f"PyTorch {least} or newer. Measured on GPUs with {measured}. CI runs" in packages
    assert (
        f"all CPU tests with {usual}, and those of the runtime with {oldest} and {newest} |"
        in packages
    )
    page = " ".join((REPOSITORY / "CONTRIBUTING.md").read_text().split())
    assert f"PyTorch from {least} and" in page
    assert f"CI runs everything with PyTorch {usual} (" in page
    assert f"also with {oldest} (Python {first}) and {newest} (Python {last})." in page
    project = (REPOSITORY / "pyproject.toml").read_text()
    assert f'requires-python = ">={first}"' in project


def test_the_recipe_for_kernelize_names_the_versions_that_are_tested() -> None:
    pins = (REPOSITORY / ".ci" / "pytorch_versions.txt").read_text()
    versions = dict(re.findall(r"^(kernels|transformers)==([^\s;]+)", pins, flags=re.M))
    page = " ".join((REPOSITORY / "docs" / "generated-code.md").read_text().split())
    said = "Tested with transformers {transformers} and `kernels` {kernels};"
    assert said.format(**versions) in page


def test_ci_runs_the_test_command_of_the_readme() -> None:
    (line,) = re.findall(
        r"^    (python3 .*pytest.*)$", (REPOSITORY / "README.md").read_text(), re.M
    )
    set_up, install, test = line.split(" && ")
    assert (set_up, install) == (
        "python3 -m venv .venv",
        ".venv/bin/pip install -r requirements.txt",
    )
    assert test in (REPOSITORY / ".ci" / "run").read_text().splitlines()
    assert test in (REPOSITORY / "CONTRIBUTING.md").read_text()
