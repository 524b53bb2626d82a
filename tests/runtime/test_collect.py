"""Calls of a program's norms are counted and end up in a file, whatever the program is, and
whatever becomes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import normforge
from generator.paths import REPOSITORY
from generator.shape_lists import load_problems
from normforge import collected
from normforge.api import Package
from normforge.operations import RMSNORM_BACKWARD
from normforge.serve import collect, server
from normforge.serve.collect import Called, Recorder, collecting
from normforge.serve.options import composition
from normforge.serve.rows import RowServer
from tests.support.entry_points import leaf, routing_on_cpu, write_layer_norm_package
from tests.support.fresh import printed_by
from tests.support.native import (
    OPERATIONS,
    by_autograd,
    by_backward,
    in_threads,
    inputs,
    learned,
    rows,
)
from tests.support.patience import patience


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return normforge.collect(tmp_path / "shapes.yaml")


@pytest.fixture(autouse=True)
def nothing_counts_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(collect.VARIABLE, raising=False)
    assert collecting.recorder is None
    yield
    if collecting.recorder is not None:
        collecting.recorder.stop()


def counted(recorder: Recorder) -> dict[str, int]:
    """Return the counts by operation and shape."""
    recorder.write()
    found = collected.read(recorder.path.read_text()) if recorder.path.exists() else {}
    return {f"{operation} {shape}": count for (operation, shape), count in found.items()}


def train(package: Package, *shape: int, **options: Any) -> None:
    x, weight = leaf(*shape, dtype=torch.bfloat16), leaf(shape[-1], dtype=torch.bfloat16)
    y = package.rms_norm(x, weight, **options)
    (y if isinstance(y, torch.Tensor) else sum(y)).sum().backward()


# ---- What counts ---------------------------------------------------------------------------------


def test_backwards_count_by_shape_dtypes_and_options(package: Package, recorder: Recorder) -> None:
    for _ in range(3):
        train(package, 2, 3, 16)
    train(package, 6, 16, weight_offset=1.0)
    train(package, 6, 16, residual=leaf(6, 16, dtype=torch.bfloat16))
    train(package, 6, 16, residual=leaf(6, 16))  # the backward is that of their sum, in fp32
    plain = rows(6, 16), rows(6, 16), torch.ones(6)
    package.rmsnorm_backward(*plain, dresidual=torch.ones(6, 16))
    package.rmsnorm_backward(rows(4, 16), rows(4, 16), torch.ones(4), torch.ones(16))
    package.rmsnorm_backward(rows(4, 16), rows(4, 16), torch.ones(4), need_dx=False)
    package.rmsnorm_backward(torch.ones(0, 16), torch.ones(0, 16), torch.ones(0))
    package.rms_norm(rows(64, 16), rows(1, 16)[0])  # a forward alone
    assert counted(recorder) == {
        "rmsnorm_backward 6x16:bf16": 3,
        "rmsnorm_backward 6x16:bf16+offset": 1,
        "rmsnorm_backward 6x16:bf16+residual": 1,
        "rmsnorm_backward 6x16:fp32+residual": 1,
        "rmsnorm_backward 6x16:bf16+residual_fp32": 1,
        "rmsnorm_backward 4x16:bf16:fp32": 1,
        "rmsnorm_backward 4x16:bf16": 1,
    }
    train(package, 6, 16)
    assert counted(recorder)["rmsnorm_backward 6x16:bf16"] == 4
    recorder.stop()
    train(package, 6, 16)
    assert counted(recorder)["rmsnorm_backward 6x16:bf16"] == 4


def test_a_weight_per_head_is_a_call_per_head(package: Package, recorder: Recorder) -> None:
    x, weight = leaf(5, 4, 16), leaf(4, 16)
    package.rms_norm(x, weight).sum().backward()
    assert counted(recorder) == {"rmsnorm_backward 5x16:fp32": 4}


def test_a_call_that_is_made_of_several_counts_once(
    package: Package, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several calls serve one where no kernel adds a residual."""
    formula = package._find

    def find(given: Any, options: Any) -> Any:
        if given.dresidual is None:
            return formula(given, options)
        composed = composition(given, options, None)
        assert composed is not None
        return package._composed(composed, options)

    monkeypatch.setattr(package, "_find", find)
    train(package, 6, 16, residual=leaf(6, 16, dtype=torch.bfloat16))
    assert counted(recorder) == {"rmsnorm_backward 6x16:bf16+residual": 1}


def test_what_is_no_call_of_a_kernel_does_not_count(package: Package, recorder: Recorder) -> None:
    with pytest.raises(ValueError, match="dy"):
        package.rmsnorm_backward(rows(5, 16), rows(4, 16), torch.ones(4))
    x = torch.ones(4, 16, dtype=torch.float64)
    package.rmsnorm_backward(x, x, torch.ones(4, dtype=torch.float64))
    with FakeTensorMode():
        package.rmsnorm_backward(torch.ones(4, 16), torch.ones(4, 16), torch.ones(4))
    x, weight = leaf(6, 16), leaf(16)
    y = package.rms_norm(x, weight, 1e-40)  # PyTorch's operations
    y.sum().backward()
    assert counted(recorder) == {}
    assert not recorder.path.exists()


def test_calls_that_are_known_count(package: Package, recorder: Recorder) -> None:
    """They are served by `_quick`."""
    quick = (lambda *_: True, lambda dy, x, rstd, weight, mean: (x, weight))
    package._calls.recent = (quick,)
    try:
        package.rmsnorm_backward(rows(4, 16), rows(4, 16), torch.ones(4), rows(1, 16)[0])
    finally:
        package._calls.recent = ()
    assert counted(recorder) == {"rmsnorm_backward 4x16:bf16": 1}


def test_compiled_calls_count_when_they_run(package: Package, recorder: Recorder) -> None:
    weight = leaf(16)
    compiled = torch.compile(
        lambda x: package.rms_norm(x, weight).sum(), backend="aot_eager", fullgraph=True
    )
    for _ in range(3):
        compiled(leaf(6, 16)).backward()
    assert counted(recorder) == {"rmsnorm_backward 6x16:fp32": 3}


def test_installed_calls_count_also_where_there_is_no_kernel(
    package: Package, recorder: Recorder, aten: list[str]
) -> None:
    entry_point, norm = routing_on_cpu(package), torch.nn.RMSNorm(16)
    with entry_point.installed():
        norm(leaf(6, 16)).sum().backward()
    norm(leaf(6, 16)).sum().backward()
    assert counted(recorder) == {"rmsnorm_backward 6x16:fp32": 1}


def test_other_operations_count_by_their_names(
    tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms = write_layer_norm_package(tmp_path / "layer_norm")
    norms.layer_norm(leaf(6, 16), leaf(16), leaf(16)).sum().backward()
    own = RowServer(RMSNORM_BACKWARD, lambda index: None)  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(own, "_by_formula", lambda *given: {})
    own({"dy": rows(4, 16), "x": rows(4, 16), "rstd": torch.ones(4), "dresidual": rows(4, 16)})
    assert counted(recorder) == {
        "layernorm_forward 6x16:fp32": 1,
        "layernorm_backward 6x16:fp32": 1,
        "rmsnorm_backward 4x16:bf16+residual": 1,
    }


def test_rotated_norms_count_by_what_is_rotated(recorder: Recorder) -> None:
    x, angles = leaf(2, 3, 4, 16), torch.ones(3, 4)
    for rotary_dim, interleaved in ((8, False), (None, False), (None, True)):
        of_turns = (angles, angles) if rotary_dim else (angles.repeat(1, 4), angles.repeat(1, 4))
        rest = (*of_turns, 1e-6, rotary_dim, interleaved)
        normforge.rms_norm_rope(x, leaf(16), *rest).sum().backward()
    normforge.rms_norm_rope(x, leaf(16), *of_turns, weight_offset=1.0).sum().backward()
    joined = (x.flatten(-2), leaf(64), *of_turns, 1e-6, None)
    for interleaved in (False, True):
        normforge.rms_norm_rope(*joined, interleaved, heads=4).sum().backward()
    assert counted(recorder) == {
        f"rmsnorm_rope_{direction} {shape}": 1
        for direction in ("forward", "backward")
        for shape in (
            *(f"24x16:fp32{rotation}" for rotation in ("", "+rotary8", "+interleaved", "+offset")),
            *(f"6x64:fp32+joined16{pairs}" for pairs in ("", "+interleaved")),
        )
    }


def test_gated_norms_count_in_both_directions_and_by_groups(recorder: Recorder) -> None:
    x, z = leaf(6, 16), leaf(6, 16)
    normforge.rms_norm_gated(x, z, leaf(16)).sum().backward()
    normforge.rms_norm_gated(x, z, leaf(16), group_size=8).sum().backward()
    normforge.rms_norm_gated(x, z, leaf(8), group_size=8, norm_before_gate=False).sum().backward()
    with torch.no_grad():
        normforge.rms_norm_gated(x, z, None, 1e-6, "sigmoid")
    normforge.rms_norm_gated(x, z, leaf(16), 2.0**-97).sum().backward()  # a forward alone
    assert counted(recorder) == {
        "gated_rmsnorm_forward 6x16:fp32": 2,
        "gated_rmsnorm_backward 6x16:fp32": 1,
        "gated_rmsnorm_forward 6x8:fp32": 2,
        "gated_rmsnorm_backward 6x8:fp32": 2,
        "gate_first_rmsnorm_forward 12x8:fp32": 1,
        "gate_first_rmsnorm_backward 12x8:fp32": 1,
        "gated_rmsnorm_sigmoid_forward 6x16:fp32": 1,
    }


@pytest.mark.parametrize("operation", OPERATIONS, indirect=True)
def test_calls_that_are_served_in_cpp_count(
    make: Any, machine: Any, tmp_path: Path, operation: str
) -> None:
    package = make()
    learned(package)
    recorder = normforge.collect(tmp_path / "shapes.yaml")
    before = len(machine.launches)
    by_autograd(package, **inputs())
    by_backward(package, **inputs())
    assert len(machine.launches) == before, "Python served them"
    assert counted(recorder)[f"{operation} 6x1024:bf16"] == 2
    learned(package, M=8)
    assert counted(recorder)[f"{operation} 8x1024:bf16"] == 4
    machine.capturing = True  # Python serves these, once each
    by_backward(package, **inputs())
    assert len(machine.launches) > before
    assert counted(recorder)[f"{operation} 6x1024:bf16"] == 3
    forwards = {name: count for name, count in counted(recorder).items() if "forward" in name}
    if operation == OPERATIONS[0]:  # its forward is tuned with its backward
        assert forwards == {}
    else:  # those of `by_autograd` and `learned`, by the formula
        assert forwards == {f"layernorm_forward {M}x1024:bf16": n for M, n in ((6, 1), (8, 4))}


def test_threads_lose_no_call_while_the_file_is_written(
    package: Package, recorder: Recorder
) -> None:
    def work() -> None:
        for _ in range(100):
            package.rmsnorm_backward(rows(4, 16), rows(4, 16), torch.ones(4))

    def write() -> None:
        for _ in range(20):
            recorder.write()

    in_threads([work, write, work, work])
    assert counted(recorder) == {"rmsnorm_backward 4x16:bf16": 300}


def test_planted_error_in_the_counting_leaves_the_call_alone(
    package: Package, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise OverflowError

    monkeypatch.setattr(collect, "_kind", fail)
    train(package, 6, 16)
    assert counted(recorder) == {}


# ---- What becomes of it --------------------------------------------------------------------------

PROGRAM = """
import os, sys, time, torch
from tests.support.entry_points import leaf, write_package
from pathlib import Path
{before}
package = write_package(Path({folder!r}))
for _ in range({calls}):
    package.rms_norm(leaf(6, 16), leaf(16)).sum().backward()
{after}
"""


def program(folder: Path, calls: int, before: str = "", after: str = "") -> str:
    folder = folder / f"package{calls}"
    return PROGRAM.format(folder=str(folder), calls=calls, before=before, after=after)


def run_side_by_side(programs: list[str], before: str = "import os", **environment: str) -> None:
    """Run programs in processes of their own, at the same time. before: what is there already."""
    text = (
        f"import os; {before}\n"
        "children = []\n"
        f"for program in {programs!r}:\n"
        "    children.append(os.fork())\n"
        "    if not children[-1]:\n"
        "        exec(program)\n"
        "        raise SystemExit\n"
        "assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(children)"
    )
    printed_by(text, **environment)


def environment(folder: Path) -> dict[str, str]:
    return {"NORMFORGE_COLLECT": str(folder / "shapes.yaml"), "OMP_NUM_THREADS": "1"}


def count_in(path: Path) -> int:
    return sum(collected.read(path.read_text()).values())


def test_ranks_add_to_one_file_and_forks_count_for_themselves(tmp_path: Path) -> None:
    fork = (
        "package.rms_norm(leaf(6, 16), leaf(16)).sum().backward()\n"
        "import multiprocessing\n"
        "def more():\n"
        "    torch.set_num_threads(1)\n"
        "    package.rms_norm(leaf(7, 16), leaf(16)).mean().item()\n"
        "    package.rmsnorm_backward(*[torch.ones(7, 16)] * 2, torch.ones(7))\n"
        "child = multiprocessing.get_context('fork').Process(target=more)\n"
        "child.start(), child.join()\n"
        "assert child.exitcode == 0\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    more(), sys.exit()\n"
        "assert os.waitpid(child, 0)[1] == 0"
    )
    ranks = [program(tmp_path, calls, after=fork) for calls in (1, 10)]
    run_side_by_side(ranks, **environment(tmp_path))
    found = collected.read((tmp_path / "shapes.yaml").read_text())
    assert found == {
        ("rmsnorm_backward", "6x16:fp32"): 1 + 10 + 2,
        ("rmsnorm_backward", "7x16:fp32"): 4,
    }
    assert sorted(path.name for path in tmp_path.glob(".*")) == [".shapes.yaml.lock"]


@pytest.mark.parametrize(("cuda", "of_child"), [(False, 7), (True, 0)])
def test_a_fork_counts_also_what_is_counted_elsewhere(
    tmp_path: Path, cuda: bool, of_child: int
) -> None:
    """`use_native()` counts elsewhere. Where CUDA was in use, a fork has none, and asks nobody."""
    path = tmp_path / "shapes.yaml"
    text = (
        "import os, torch, normforge\n"
        "from normforge.serve.collect import Called, count_also\n"
        "calls = 0\n"
        "def totals():\n"
        "    yield Called('rmsnorm_backward', 8, 16, 'bf16', 'bf16'), calls\n"
        "count_also(totals)\n"
        f"torch.cuda.is_initialized = lambda: {cuda}\n"
        f"normforge.collect({str(path)!r})\n"
        "calls = 100\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    calls += 7\n"
        "    normforge.collect().write()\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)"
    )
    run_side_by_side([text])
    assert count_in(path) == 100 + of_child


def test_what_was_counted_outlives_an_interrupted_write(
    package: Package, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(package, 6, 16)
    with monkeypatch.context() as patched:
        patched.setattr(collect, "add_to_file", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            recorder.write()
    assert counted(recorder) == {"rmsnorm_backward 6x16:bf16": 1}


def test_a_call_counts_by_the_recorder_that_it_found(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may stop it at any time."""
    found = [Mock(), None]

    class Stopping:
        @property
        def recorder(self) -> Any:
            return found.pop(0) if found else None

    given = (rows(4, 16), rows(4, 16), torch.ones(4), torch.ones(16))
    monkeypatch.setattr(package._calls, "find_recent", lambda _: lambda *_: given[:2])
    monkeypatch.setattr(server, "collecting", Stopping())
    (counting, _) = found
    assert package._quick(*given) is not None
    counting.count.assert_called_once()


def test_a_shape_that_stands_twice_counts_twice() -> None:
    """Somebody may put two files into one."""
    text = collected.written({("rmsnorm_backward", "64x64:bf16"): 2})
    again = text[text.index("  rmsnorm_backward") :]
    assert collected.read(text + again) == {("rmsnorm_backward", "64x64:bf16"): 4}


def test_many_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "shapes.yaml"
    writers = [
        "for _ in range(50):\n"
        f"    add_to_file(Path({str(path)!r}), {{('rmsnorm_backward', {shape!r}): 2}}, 60)"
        for shape in ("64x64:bf16", "64x64:bf16", "32x64:bf16", "16x64:bf16")
    ]
    known = "from pathlib import Path; from normforge.collected import add_to_file"
    run_side_by_side(writers, before=known)
    assert list(collected.read(path.read_text()).values()) == [200, 100, 100]


def test_a_fork_does_not_keep_the_lock_of_a_file_that_was_being_written(tmp_path: Path) -> None:
    path = tmp_path / "shapes.yaml"
    text = (
        "import os, signal, time; from pathlib import Path\n"
        "from normforge.collected import _locked, add_to_file\n"
        f"path = Path({str(path)!r})\n"
        "with _locked(path.with_name('.shapes.yaml.lock'), 1):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        time.sleep(3600)\n"
        "try:\n"
        "    add_to_file(path, {('rmsnorm_backward', '8x8:bf16'): 1}, 0.5)\n"
        "finally:\n"
        "    os.kill(child, signal.SIGKILL)"
    )
    run_side_by_side([text])
    assert count_in(path) == 1


def test_who_waits_for_the_lock_in_vain_says_so_and_goes_on(
    package: Package, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(package, 6, 16)
    hasty = partial(collected.add_to_file, lock_seconds=0.05)
    monkeypatch.setattr(collect, "add_to_file", hasty)
    with (
        collected._locked(recorder.path.with_name(".shapes.yaml.lock"), 1.0),
        pytest.warns(UserWarning, match=r"another process has held .*shapes\.yaml\.lock"),
    ):
        recorder.write()
    assert counted(recorder) == {"rmsnorm_backward 6x16:bf16": 1}


def test_a_killed_process_has_written_what_it_counted_before(tmp_path: Path) -> None:
    before = "from normforge.serve import collect\ncollect._FIRST_SECONDS = 0.05"
    done = f"Path(r'{tmp_path / 'done'}').touch()\ntime.sleep(3600)"
    line = program(tmp_path, 5, before, done)
    path, until = tmp_path / "shapes.yaml", time.monotonic() + patience(120)
    settings = {**os.environ, **environment(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", line], env=settings, cwd=REPOSITORY) as process:
        while not ((tmp_path / "done").exists() and path.exists() and count_in(path) >= 1):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert 1 <= count_in(path) <= 5
    collected.add_to_file(path, {("rmsnorm_backward", "8x8:bf16"): 1}, 1.0)  # nothing is stale


def test_a_file_that_cannot_be_written_costs_one_warning(package: Package, tmp_path: Path) -> None:
    folder = tmp_path / "missing"
    recorder = normforge.collect(folder / "shapes.yaml")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            train(package, 6, 16)
            recorder.write()
    (sentence,) = (str(one.message) for one in said)
    assert "shapes.yaml" in sentence
    assert "No such file or directory" in sentence
    assert "choose a file that can be written" in sentence
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning would end a thread
        folder.mkdir()
        recorder.stop()
    assert count_in(recorder.path) == 3, "nothing was lost"


def test_an_error_of_a_warning_is_none_of_the_program(
    package: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = normforge.collect(tmp_path / "missing" / "shapes.yaml")
    train(package, 6, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorder.stop()
    assert "does not get the calls" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("shapes: [64x64:bf16]\n", "line "),
        ("collected:\n  rmsnorm_backward:\n    64x64:bf16: many\n", "line "),
        (None, "it is no file"),  # a pipe would never end, and root would have replaced /dev/null
    ],
)
def test_something_else_is_neither_read_nor_replaced(
    package: Package, tmp_path: Path, content: str | None, said: str
) -> None:
    path = tmp_path / "shapes.yaml"
    path.symlink_to(os.devnull) if content is None else path.write_text(content)
    recorder = normforge.collect(path)
    train(package, 6, 16)
    with pytest.warns(UserWarning, match=said):
        recorder.stop()
    assert path.is_symlink() if content is None else path.read_text() == content


def test_more_shapes_than_are_kept_apart_are_said(
    package: Package, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "_MOST", 2)
    with pytest.warns(UserWarning, match="more than 2 shapes") as said:
        for M in (1, 2, 3, 4, 1):
            train(package, M, 16)
    assert len(said) == 1
    assert counted(recorder) == {"rmsnorm_backward 1x16:bf16": 2, "rmsnorm_backward 2x16:bf16": 1}
    train(package, 3, 16)  # those are written
    assert counted(recorder)["rmsnorm_backward 3x16:bf16"] == 1


def test_calls_that_are_counted_elsewhere_go_to_one_of_two_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go on while one file takes the place of the other."""
    total = 0

    def calls() -> Iterator[tuple[Called, int]]:
        nonlocal total
        total += 5
        yield Called("rmsnorm_backward", 8, 16, "bf16", "bf16"), total

    monkeypatch.setattr(collect, "_sources", [calls])
    one = normforge.collect(tmp_path / "one.yaml")
    begin = total
    two = normforge.collect(tmp_path / "two.yaml")
    two.stop()
    assert count_in(one.path) + count_in(two.path) == total - begin


def test_there_is_one_file_at_a_time(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="name a file"):
        normforge.collect()
    with pytest.raises(ValueError, match="name a file"):
        normforge.collect("")
    monkeypatch.chdir(tmp_path)
    one = normforge.collect("one.yaml")
    assert normforge.collect() is normforge.collect("one.yaml") is one
    train(package, 6, 16)
    monkeypatch.chdir("/")  # files are where they were named
    two = normforge.collect(tmp_path / "two.yaml")
    train(package, 7, 16)
    two.stop()
    one.stop()
    texts = [(tmp_path / name).read_text() for name in ("one.yaml", "two.yaml")]
    assert ["6x16" in text for text in texts] == [True, False]
    assert ["7x16" in text for text in texts] == [False, True]
    assert collecting.recorder is None


# ---- What the tuner makes of it ------------------------------------------------------------------


def test_the_tuner_takes_first_what_takes_longest(package: Package, recorder: Recorder) -> None:
    train(package, 64, 32)
    for _ in range(5):
        train(package, 4, 32)
        train(package, 16, 32)
    recorder.write()
    found = [str(problem) for problem in load_problems(str(recorder.path))]
    assert found == ["16x32:bf16", "64x32:bf16", "4x32:bf16"]
