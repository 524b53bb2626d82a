"""Bad input, over all commands: one sentence that says what, where and what to do, exit code 2, no
traceback, and nothing written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tune
from generator.cli import main
from generator.cli.arguments import device_list
from generator.cli.main import make_parser
from generator.cli.tune import _plan
from generator.paths import GENERATED, REPOSITORY
from generator.problem import Problem
from generator.space.load import SPACE_FILE
from generator.target import find_target
from generator.tuner.plan import Plan
from tests.support.entry_points import write_package

RUN = "--gpu gb200 --shapes 4096x1024:bf16 --trials 3"
H200 = f"--out {GENERATED / 'h200'}"
ARGUMENTS = [
    ("", "--gpu; see tune.py --help"),
    ("--gpu", "--gpu: expected one argument"),
    ("--gpu gb20", "unknown GPU 'gb20': did you mean 'gb200'?"),
    ("--gpu H200", "unknown GPU 'H200': did you mean 'h200'?"),
    ("--gpu=", "rtx-5090, auto"),
    ("gb200", "there is no command 'gb200': a run starts with --gpu"),
    ("reprot --gpu gb200", "did you mean 'report'?"),
    ("Explain --gpu gb200", "did you mean 'explain'?"),
    ("--gpu gb200 --shaps smoke", "there is no option '--shaps': did you mean '--shapes'?"),
    ("--gpu gb200 --speed 11", "did you mean '--seed'?"),
    ("--gpu gb200 --xyzzy", "there is no option '--xyzzy'; see tune.py --help"),
    ("--shapes smoke", "--gpu"),
    (f"{RUN} more", "unrecognized arguments: more"),
    (f"{RUN} --json=5", "--json: ignored explicit argument '5'"),
    # Shapes.
    ("--gpu gb200 --shapes 4096", "unknown shape list '4096'"),
    ("--gpu gb200 --shapes defualt", "known lists are compare, default"),
    ("--gpu gb200 --shapes 4096x4096", "has no dtype: write for example 4096x4096:bf16"),
    ("--gpu gb200 --shapes 4096x4096:", "malformed shape '4096x4096:': expected MxN:dtype"),
    ("--gpu gb200 --shapes 4096*4096:bf16", "malformed shape"),
    ("--gpu gb200 --shapes 4.5x4:bf16", "malformed shape"),
    ("--gpu gb200 --shapes 4096x1024:bf16,oops:bf16", "malformed shape 'oops:bf16'"),
    ("--gpu gb200 --shapes 4096x1024:bfloat16", "unknown dtype 'bfloat16' in shape"),
    ("--gpu gb200 --shapes 4096x1024:bf17", "unknown dtype 'bf17'"),
    ("--gpu gb200 --shapes 4096x1024:bf16:fp16", "of x's dtype (bf16) or fp32"),
    ("--gpu gb200 --shapes 4096x1024:bf16+resid", "unknown option '+resid'"),
    ("--gpu gb200 --shapes 4096x1024:bf16+residual_fp16", "the residual's gradient is of"),
    ("--gpu gb200 --shapes 12345678901234x64:bf16", "has more than 12 digits"),
    ("--gpu gb200 --shapes 4096x99999999:bf16", "N may be at most 1048576"),
    ("--gpu gb200 --shapes 0x1024:bf16", "at least 1"),
    ("--gpu gb200 --shapes 4096x0:bf16", "at least 1"),
    ("--gpu gb200 --shapes=-4x1024:bf16", "at least 1"),
    ("--gpu gb200 --shapes 4096x-1:bf16", "at least 1"),
    ("--gpu gb200 --shapes ,", "names no shape"),
    ("--gpu gb200 --shapes {folder}/", "malformed shape"),
    ("--gpu gb200 --shapes /nowhere/shapes.yaml", "cannot read the shape file"),
    (f"{RUN} --shapes 1x65537:bf16", "no legal config for 1x65537:bf16 on gb200"),
    # Numbers.
    (f"{RUN} --trials 0", "--trials: '0' must be above 0"),
    (f"{RUN} --trials +0", "--trials: '0' must be above 0"),
    (f"{RUN} --trials ++5", "--trials: '+5' is not a whole number"),
    (f"{RUN} --trials -5", "--trials: '-5' must be above 0"),
    (f"{RUN} --trials many", "--trials: 'many' is not a whole number"),
    (f"{RUN} --trials 1.5", "--trials: '1.5' is not a whole number"),
    (f"{RUN} --trials -123456789", "--trials: '-123456789' must be above 0"),
    (f"{RUN} --trials 12345678901", "--trials: '12345678901' has more than 9 digits"),
    (f"{RUN} --seconds -1", "--seconds: '-1' must be above 0"),
    (f"{RUN} --seconds nan", "must be above 0 and finite"),
    (f"{RUN} --seconds inf", "must be above 0 and finite"),
    (f"{RUN} --seconds ten", "--seconds: 'ten' is not a number"),
    (f"{RUN} --storage postgres://me@host/db", "write postgresql+psycopg:// in its place"),
    (f"{RUN} --devices 0,x", "'0,x' is not a list of indices like 0,1,2,3"),
    (f"{RUN} --devices 0,,1", "is not a list of indices"),
    (f"{RUN} --devices -1", "is not a list of indices"),
    (f"{RUN} --seed x", "--seed: invalid int value: 'x'"),
    (f"{RUN} --fallbacks some", "--fallbacks: invalid choice: 'some'"),
    # Places.
    (f"{RUN} --storage foo", "'foo' is not the URL of a database"),
    (f"{RUN} --storage=", "'' is not the URL of a database"),
    (f"{RUN} --storage nonsense://x", "cannot open the storage"),
    (f"{RUN} --storage sqlite:////nowhere/at/all.db", "unable to open database file"),
    (f"{RUN} --storage postgresql+psycopg://u:pw@127.0.0.1:1/db", "Connection refused"),
    (f"{RUN} --storage postgresql+psycopg://u:pw@[bad/db", "psycopg://[bad/db (Op"),
    (f"{RUN} --storage postgresql+psycopg://h:port/db", "check the URL"),
    (f"{RUN} --storage postgresql+psycopg:/u:pw@h/db", "'h/db' is not the URL of a database"),
    (f"{RUN} --storage postgresql:/h/db", "is not the URL of a database"),
    (f"{RUN} --storage mysql://h:port/db", "check the URL"),
    (f"{RUN} --storage sqlite://", "the storage sqlite:// is in memory"),
    (f"{RUN} --storage sqlite:///file:x?mode=memory&uri=true", "is in memory and ends with"),
    (f"{RUN} --storage postgresql+nosuchdriver://h/db", "check the URL, the driver"),
    (f"{RUN} --space /nowhere/space.yaml", "cannot read the search space"),
    (f"{RUN} --space {{folder}}", "Is a directory"),
    (f"{RUN} --out=", "--out: an empty name is not a folder"),
    (f"{RUN} --out /dev/null", "choose another folder with --out"),
    (f"{RUN} --out /proc/nothing", "choose another folder with --out"),
    # Looking at runs.
    ("report", "name the studies: --gpu h200, --out FOLDER or --storage URL"),
    ("report --gpu H200", "unknown GPU 'H200': did you mean 'h200'?"),
    ("report --out {folder}/nothing", "no studies in"),
    (f"report --out {{folder}}/{'x' * 300}", "cannot read the studies ([Errno 36] File name too"),
    ("report --storage foo", "'foo' is not the URL of a database"),
    ("report --storage nonsense://x", "cannot open the storage"),
    ("report --storage mysql://h:port/db", "cannot open the storage mysql://h:port/db"),
    ("report --storage sqlite:///file:/no/u.db?uri=true", "no studies in /no/u.db: there is no"),
    ("report --gpu h200 more", "unrecognized arguments: more"),
    ("report --htlm x", "there is no option '--htlm': did you mean '--html'?"),
    ("explain", "write --shape 4096x4096:bf16"),
    ("explain 5x5", "write --shape 5x5"),
    (f"explain {H200} --shape 5x5", "has no dtype: write for example 5x5:bf16"),
    ("explain --gpu nope --shape 4096x4096:bf16", "unknown GPU 'nope'"),
    (f"explain {H200} --shape 4096x4096:bf16 --config foo=1", "unknown knob 'foo'"),
    (f"explain {H200} --shape 4096x4096:bf16 --config stages=99", "stages is one of"),
    (f"explain {H200} --shape 4096x4096:bf16 --config=", "--config names no knob"),
    (f"explain {H200} --shape 4096x4096:bf16 --space /nowhere.yaml", "cannot read the search"),
    # Taking packages elsewhere.
    (
        "export",
        "one of the arguments --standalone --hf --t4 --kernel-tuner is required; see tune.py",
    ),
    ("export --hf", "--hf: expected one argument"),
    ("export --hf=", "--hf: an empty name is not a folder"),
    ("export --fh {folder}/new", "there is no option '--fh': did you mean '--hf'?"),
    ("export --hf {folder}/new more", "unrecognized arguments: more"),
    ("exprot --hf {folder}/new", "there is no command 'exprot': did you mean 'export'?"),
    ("export --hf {folder}/new --gpu h20", "unknown GPU 'h20': did you mean 'h200'?"),
    ("export --hf {folder}/new --gpu l40s", "l40s/rmsnorm_backward: choose one with --gpu or"),
    ("export --hf {folder}/new --out {folder}/no", "there is no package at {folder}/no/rmsnorm"),
    ("export --hf {folder}/new --op rmsnorm", "no operation 'rmsnorm': did you mean 'rmsnorm_"),
    ("export --hf {folder}/new --op layernorm_backward", "layernorm_backward has no layers to"),
    (f"export --hf {{folder}}/new --gpu gb200 {H200}", "is for h200, not for gb200"),
    (f"export --hf {GENERATED}", "is not empty and no earlier export: choose another folder"),
    ("export --hf /dev/null", "/dev/null is a file): choose another folder with --hf"),
    ("export --hf /proc/nothing", "choose another folder with --hf"),
]
FILES = [
    ("--shapes", "shapes: [4096x1024:bf16]\nmore: 1\n", "unknown key 'more'"),
    ("--shapes", "shapes:\n  - {M: [1], N: [64], dtype: [bf16], hue: [1]}\n", "'hue': [1]"),
    ("--shapes", "shapes:\n  - {M: 4096, N: [64], dtype: [bf16]}\n", "needs the lists M, N"),
    ("--shapes", "shapes:\n  - {M: [x], N: [64], dtype: [bf16]}\n", "malformed shape 'xx64:"),
    (
        "--shapes",
        "shapes:\n  - {M: [1], N: [64], dtype: [bf16], options: [5]}\n",
        "malformed shape '1x64:bf165'|unknown dtype 'bf165'",
    ),
    ("--shapes", "shapes: [1, 2]\n", "a block has lists M, N"),
    ("--shapes", "shapes: [\n", "cannot read the shape file"),
    ("--shapes", "", "expected a list under 'shapes'"),
    ("--shapes", b"\xff\xfe\0", "cannot read the shape file"),
    ("--space", "knobs: {}\nrules: []\n", "is missing; one value is enough"),
    ("--space", "knobs: {}\nrules: []\nmore: 1\n", "expected the keys 'knobs' and 'rules'"),
    ("--space", "knobs: {hue: {values: [1], why: x}}\nrules: []\n", "knob 'hue' is unknown"),
    ("--space", "knobs: [\n", "cannot read the search space"),
    ("--space", "- 1\n", "expected the keys 'knobs' and 'rules'"),
    ("--space", b"\xff\xfe\0", "cannot read the search space"),
]


def everything(*folders: Path) -> set[str]:
    """All below some folders, but for byte code, which other tests may write meanwhile."""
    paths = {str(path) for folder in folders for path in folder.rglob("*")}
    return {path for path in paths if "__pycache__" not in path}


@pytest.fixture
def refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[[list[str], str], None]:
    """Checks what a command line in a folder of its own says."""

    def check(arguments: list[str], says: str) -> None:
        if "--out" not in " ".join(arguments) and "--gpu" in arguments[:1]:
            arguments = [*arguments, "--out", str(tmp_path / "out")]
        before = everything(tmp_path), set(Path().iterdir()), everything(GENERATED)
        assert tune.main(arguments) == 2
        after = everything(tmp_path), set(Path().iterdir()), everything(GENERATED)
        said = capfd.readouterr()
        assert said.out == ""
        assert "Traceback" not in said.err
        assert "pw@" not in said.err, "a password was shown"
        sentence = said.err.splitlines()[-1]
        assert sentence.startswith("tune.py"), said.err
        assert any(part in sentence for part in says.split("|")), sentence
        assert after == before, "something was written"

    return check


@pytest.mark.parametrize(("arguments", "says"), ARGUMENTS, ids=[a for a, _ in ARGUMENTS])
def test_bad_argument(
    tmp_path: Path, refused: Callable[[list[str], str], None], arguments: str, says: str
) -> None:
    refused(arguments.format(folder=tmp_path).split(), says.replace("{folder}", str(tmp_path)))


@pytest.mark.parametrize(("option", "content", "says"), FILES)
def test_damaged_file(
    tmp_path: Path,
    refused: Callable[[list[str], str], None],
    option: str,
    content: str | bytes,
    says: str,
) -> None:
    path = tmp_path / "given.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(["--gpu", "gb200", "--trials", "3", option, str(path)], says)


# ---- The terminal --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "stdout", "code", "says"),
    [
        (["--help"], "/dev/full", 2, "cannot write to the standard output (No space left"),
        (["--help"], os.devnull, 0, ""),
        (["--gpu", "gb200", "--shapes", "f\u00fcnf"], os.devnull, 2, "f\\xfcnf"),
    ],
    ids=["full disk", "null", "ASCII"],
)
def test_output_that_cannot_be_written(
    arguments: list[str], stdout: str, code: int, says: str
) -> None:
    with Path(stdout).open("w") as file:
        done = subprocess.run(
            [sys.executable, "tune.py", *arguments],
            cwd=REPOSITORY,
            stdout=file,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
            check=False,
        )
    said = done.stderr.decode("ascii")
    assert done.returncode == code, said
    assert says in said
    assert len(said.splitlines()) == bool(code)


@pytest.mark.parametrize("arguments", ["--version", "explain --help"])
def test_output_that_is_closed(arguments: str) -> None:
    line = f"{sys.executable} tune.py {arguments} >&-"
    done = subprocess.run(["bash", "-c", line], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_studies_that_a_disk_does_not_give(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(path: Path, mode: str) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr("lzma.open", fail)
    assert tune.main(["report", "--gpu", "gb200"]) == 2
    assert "cannot read the studies ([Errno 5] Input/output error: " in capsys.readouterr().err


def run_without(module: str) -> subprocess.CompletedProcess[str]:
    hidden = f"import sys; sys.modules['{module}'] = None"
    script = f"{hidden}; import tune; sys.exit(tune.main({RUN.split()}))"
    return subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True
    )


def test_missing_package_is_said() -> None:
    """tune.py may be started by another Python than that of the environment."""
    done = run_without("optuna")
    assert done.returncode == 2 and done.stdout == ""
    (sentence,) = done.stderr.splitlines()
    assert "has no package 'optuna': install what is needed" in sentence


@pytest.mark.parametrize("module", ["generator.cli.main", "generator.problem", "normforge.table"])
def test_missing_file_of_the_checkout_is_no_package_to_install(module: str) -> None:
    done = run_without(module)
    assert done.returncode == 1 and "install" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"ModuleNotFoundError: import of {module} ")


IMPORTED = """
import sys, tune
code = tune.main(sys.argv[1:])
known = {"torch", "optuna", "sqlalchemy", "sklearn"}
print(*sorted({name.split(".")[0] for name in sys.modules} & known))
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("arguments", "code", "imported"),
    [
        ("--gpu gb20", 2, []),
        ("explain --gpu h20 --shape 4096x4096:bf16", 2, []),
        ("explain --gpu h200 --shape 4096x4096:bf16 --config stage=3", 2, []),
        ("report --gpu h200 --bad", 2, []),
        ("export --gpu h200", 2, []),
        ("export --gpu h20 --hf {folder}/new", 2, []),
        ("explain --gpu gb200 --shape 4096x4097:bf16", 2, ["optuna"]),
        ("explain --gpu gb200 --shape 4096x4096:bf16", 0, ["optuna"]),
    ],
)
def test_nothing_is_imported_that_takes_seconds_and_is_not_needed(
    tmp_path: Path, arguments: str, code: int, imported: list[str]
) -> None:
    line = [word.format(folder=tmp_path) for word in arguments.split()]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, *line], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines()[-1].split() == imported


def test_a_path_without_the_folder_of_the_script(tmp_path: Path) -> None:
    """`python -P` makes such a path, here with another package of the generator's name."""
    (tmp_path / "generator").mkdir()
    (tmp_path / "generator" / "__init__.py").touch()
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "tune.py"), "--version"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("normforge ")


def test_program_from_standard_input(tmp_path: Path) -> None:
    """No process of the compiler could import it, and every candidate would seem to crash."""
    line = [*RUN.split(), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-"],
        input=f"import sys, tune\nsys.exit(tune.main({line}))\n",
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "the program is not a file (<stdin>)" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "out").glob("studies*"))


def test_reader_that_has_seen_enough_is_no_error() -> None:
    line = f"{sys.executable} tune.py --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode in (0, 1)  # 0 where the reader was slow to go
    assert done.stderr == ""


def test_an_error_that_no_write_has_is_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(argv: list[str], command: str) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(main, "_run", refused)
    with pytest.raises(OSError, match="Too many open files"):
        main.main(["--help"])


# ---- The functions of a package ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        (["4096x4096:bf16"], "a shape is a tuple like .*got '4096x4096:bf16'"),
        ((4096, 4096, "bf16"), "a shape is a tuple like .*got 4096"),
        ([(4096, 4096)], "a shape is a tuple"),
        ([("4096", 4096, "bf16")], "a shape is a tuple"),
        ([(4096.5, 4096, "bf16")], "a shape is a tuple"),
        ([(4096, 4096, "float64")], "dtype must be one of bf16, fp16, fp32, got float64"),
        ([(4096, 4096, torch.int8)], "dtype must be one of"),
        ([(4096, 4096, 5)], "dtype must be one of bf16, fp16, fp32, got 5"),
        ([(-1, 4096, "bf16")], "M must be at least 0"),
        ([(4096, 0, "bf16")], "N at least 1"),
    ],
)
def test_bad_shape_for_warmup(tmp_path: Path, shapes: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        write_package(tmp_path).warmup(shapes)


def test_a_device_that_is_named_twice_is_one() -> None:
    assert device_list("3,0,3") == (3, 0)


def test_every_option_of_a_run_reaches_its_plan(tmp_path: Path) -> None:
    """Each is given a value that it has not by itself."""
    given = f"--gpu h100 --trials +7 --seconds 5 --seed 3 --devices 2,1 --out {tmp_path}"
    given += " --storage postgresql+psycopg://h/d --fallbacks all --standalone --space"
    args = make_parser().parse([*given.split(), str(SPACE_FILE)])
    target, problems = find_target("h100"), [Problem.parse("64x256:bf16")]
    plan = _plan(args, problems, target, measured=True)
    by_itself = _plan(make_parser().parse(["--gpu", "h100"]), problems, target, measured=False)
    assert plan == Plan(
        target=target,
        problems=tuple(problems),
        space_file=SPACE_FILE,
        out=tmp_path,
        trials=7,
        further=True,
        seconds=5.0,
        storage="postgresql+psycopg://h/d",
        seed=3,
        devices=(2, 1),
        fallbacks="all",
        standalone=True,
    )
    same = {name for name, value in vars(plan).items() if value == vars(by_itself)[name]}
    assert same <= {"target", "problems", "had"}, f"the test gives these no value: {same}"
