"""Rules for all tests: which need a GPU, and how hypothesis draws its examples."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import warnings
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from optuna.storages import BaseStorage

from generator.space.load import load_space
from generator.space.space import Space
from generator.studies.storage import JOURNAL_NAME, open_storage
from generator.target import Target, find_target, match_device
from tests.support import searches

# The same examples in every run, on machines of any speed; `--hypothesis-profile=explore` draws
# new ones.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("fixed")

# Inductor compiles little here: less than its pool of processes takes to start.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Tensors are small here: threads that share the work spend most of their time waiting for it, each
# on a core that another worker of pytest could use. The processes that tests start do the same.
if "OMP_NUM_THREADS" not in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)

# The server of a worker's processes starts once, for whichever test comes first: a fork of it has
# everything imported.
multiprocessing.set_forkserver_preload(
    ["tests.support.fake_run", "optuna.storages.journal", "sklearn.ensemble"]
)


@cache
def why_no_gpu() -> str:
    """Return why tests marked `gpu` cannot run on this machine, "" when they can."""
    if torch.version.cuda is None:
        return f"needs a CUDA GPU: PyTorch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "needs a CUDA GPU: PyTorch sees none"
    properties = torch.cuda.get_device_properties(0)
    if match_device(properties.name, properties.multi_processor_count) is None:
        return f"needs a GPU of search_spaces/gpus.yaml: {properties.name} is not there"
    return ""


def part_of(text: str) -> tuple[int, int]:
    """Return K and N of the option `--part K/N`. Raises ArgumentTypeError for anything else."""
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"expected K/N with K from 1 to N, not {text}")
    return int(part), int(parts)


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "run every Nth test alone, from the Kth of those that would run"
    parser.addoption("--part", metavar="K/N", type=part_of, default=(1, 1), help=what)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    mark(items)  # before pytest leaves out what `-m` does not ask for
    yield
    part, parts = config.getoption("--part")
    left = [item for place, item in enumerate(items) if place % parts != part - 1]
    items[:] = items[part - 1 :: parts]
    if left:
        config.hook.pytest_deselected(items=left)


def mark(items: list[pytest.Item]) -> None:
    """Mark as slow what a sample leaves out, and as skipped what needs a GPU that is not here."""
    sampled: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled"):
            sampled[item.nodeid.partition("[")[0]].append(item)
    for every in sampled.values():
        marker = every[0].get_closest_marker("sampled")
        assert marker is not None
        count = min(marker.args[0], len(every))
        kept = {i * len(every) // count for i in range(count)}
        for place, item in enumerate(every):
            if place not in kept:
                item.add_marker(pytest.mark.slow)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (reason := why_no_gpu()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def space() -> Space:
    """The search space of the project."""
    return load_space()


@pytest.fixture
def storage(tmp_path: Path) -> BaseStorage:
    """An empty file of studies."""
    return open_storage(tmp_path / JOURNAL_NAME)


@pytest.fixture
def quick_proposals() -> Iterator[None]:
    with searches.quick_proposals():
        yield


@pytest.fixture(scope="session")
def target() -> Target:
    """A target that has everything but 32-byte vectors."""
    return find_target("h200")


@pytest.fixture(scope="session")
def here() -> Target:
    """The GPU of this machine; only for tests marked `gpu`."""
    properties = torch.cuda.get_device_properties(0)
    found = match_device(properties.name, properties.multi_processor_count)
    assert found is not None
    return found


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything but the norms is deterministic too, and fresh memory is filled with NaN."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def served_by_kernels() -> Iterator[None]:
    """A fallback to PyTorch would pass most of these tests: it warns, and that is an error here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*using (PyTorch's own|the formula)")
        yield
