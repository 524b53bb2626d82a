"""The lists of mutants: the files `*.mutants` beside this one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from generator.paths import REPOSITORY

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Mutant:
    """One bug. what: one sentence, unique; file: where it is planted; old: text that occurs there
    once, and `new` what stands there instead; tests: what pytest is given; unseen: why nothing
    without a GPU can find it, "" for all others."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    unseen: str = ""

    def plant(self, root: Path) -> str:
        """Plant it in the copy at `root`. Returns the text that was there. Raises ValueError when
        the list is out of date."""
        path = root / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(
                f"'{self.what}': its old text occurs {text.count(self.old)} times in {self.file}; "
                "bring tests/mutate up to date"
            )
        path.write_text(text.replace(self.old, self.new))
        return text


def load_mutants(folder: Path = FOLDER) -> list[Mutant]:
    """All mutants, file by file."""
    return [m for path in sorted(folder.glob("*.mutants")) for m in _read(path.read_text())]


def _read(text: str) -> Iterator[Mutant]:
    """The mutants of one list. Paragraphs: `file` and `tests` lines hold for what follows; a mutant
    is its sentence, perhaps `unseen` and the reason, then lines of old text behind `- ` and lines
    of new text behind `+ `."""
    known = {"file": "", "tests": ""}
    for paragraph in text.split("\n\n"):
        lines = [line for line in paragraph.strip("\n").split("\n") if not line.startswith("#")]
        fields = {"unseen": ""}
        while lines and (word := lines[0].partition(" ")[0]) in ("file", "tests"):
            known[word] = lines.pop(0).partition(" ")[2]
        if not any(lines):
            continue
        what, *rest = lines
        if rest[0].startswith("unseen "):
            fields["unseen"] = rest.pop(0).partition(" ")[2]
        old, new = ([line[2:] for line in rest if line[:1] == sign] for sign in "-+")
        tests = tuple(f"tests/{name}" for name in known["tests"].split())
        yield Mutant(what, known["file"], "\n".join(old), "\n".join(new), tests, **fields)


def fault_in(mutants: list[Mutant], root: Path = REPOSITORY) -> list[str]:
    """Return what is out of date in the list: texts that are gone, tests that there are not."""
    faults = [f"'{what}' twice" for what in {m.what for m in mutants if _count(mutants, m) > 1}]
    for mutant in mutants:
        times = (root / mutant.file).read_text().count(mutant.old)
        if times != 1:
            faults.append(f"'{mutant.what}': its old text occurs {times} times in {mutant.file}")
        if mutant.old == mutant.new:
            faults.append(f"'{mutant.what}' changes nothing")
        for test in mutant.tests:
            file, _, name = test.partition("::")
            place = root / file
            if not place.exists() or f"def {name.partition('[')[0]}" not in place.read_text():
                faults.append(f"'{mutant.what}': there is no {test}")
    return faults


def _count(mutants: list[Mutant], mutant: Mutant) -> int:
    return sum(other.what == mutant.what for other in mutants)
