"""Links of the pages lead somewhere."""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

from benchmarks.pages.text import read
from generator.operations import OPERATIONS
from generator.paths import REPOSITORY

PAGES = sorted(
    page for folder in (".", "docs", "benchmarks") for page in (REPOSITORY / folder).glob("*.md")
)


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


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
    """docs/api.md names what packages export; the site fails for what it cannot find."""
    ends = [operation.front_end for operation in OPERATIONS.values() if operation.front_end]
    exported = {name for end in ends for name in ("PROVENANCE", end.norm, *end.functions)}
    page = (REPOSITORY / "docs" / "api.md").read_text()
    described = {line.split(".")[-1] for line in re.findall(r"^::: (\S+)$", page, flags=re.M)}
    described -= {"collect", "use_batch_invariant"}  # of normforge, not of one package
    assert {name.lower() for name in exported} == {name.lower() for name in described}


def test_what_that_page_describes_has_a_docstring_and_an_anchor_of_its_own() -> None:
    spec = importlib.util.spec_from_file_location("hooks", REPOSITORY / "docs" / "site_hooks.py")
    assert spec is not None and spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = (REPOSITORY / "docs" / "api.md").read_text()
    paths = re.findall(r"^::: (\S+)$", page, flags=re.M)
    for path in paths:
        found = pkgutil.resolve_name(path)
        assert inspect.getdoc(found), path
        assert isinstance(found, property) or inspect.signature(found), path
    names = [hooks.public_name(path) for path in paths]
    assert len({*names}) == len(names)
    for name in names:
        if name not in ("provenance", "LayerNorm"):
            assert pkgutil.resolve_name(f"normforge.{name}"), name


def test_the_site_breaks_lines_as_the_code_does() -> None:
    """Signatures stand in one line without a formatter."""
    pins = [REPOSITORY / folder / "requirements.txt" for folder in (".", "docs")]
    here, site = (re.search(r"^ruff==\S+", pin.read_text(), re.M) for pin in pins)
    assert here is not None and site is not None and here[0] == site[0]


def test_pages_name_the_versions_of_pytorch_that_are_tested() -> None:
    """And pip lets the oldest of them in."""
    ends = (REPOSITORY / ".ci" / "pytorch_versions.txt").read_text()
    pins = (REPOSITORY / "requirements.txt").read_text()
    oldest, newest = re.findall(r"^torch==(\S+)$", ends, flags=re.M)
    (usual,) = re.findall(r"^torch==(\S+)$", pins, flags=re.M)
    least = oldest.rpartition(".")[0]
    assert f'"torch>={least}"' in (REPOSITORY / "pyproject.toml").read_text()
    readme = (REPOSITORY / "README.md").read_text()
    (measured,) = {
        read(name)["environment"]["torch"].partition("+")[0] for name in ("h200", "forward_h200")
    }
    assert f"PyTorch {least} or newer. Measured on GPUs with {measured}. CI runs" in readme
    assert (
        f"all CPU tests with {usual}, and those of the runtime with {oldest} and {newest} |"
        in readme
    )
    page = " ".join((REPOSITORY / "CONTRIBUTING.md").read_text().split())
    assert f"PyTorch from {least} and" in page
    assert f"CI runs everything with PyTorch {usual} (" in page
    assert f"also with {oldest} and {newest}." in page


def test_the_recipe_for_kernelize_names_the_versions_that_are_tested() -> None:
    pins = (REPOSITORY / ".ci" / "pytorch_versions.txt").read_text()
    versions = dict(re.findall(r"^(kernels|transformers)==(\S+)$", pins, flags=re.M))
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
