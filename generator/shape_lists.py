"""Reads which problems to tune: names of shapes, and files of them."""

from __future__ import annotations

import re
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any

from generator.collected import collected_shapes
from generator.disk import read_yaml
from generator.errors import NormforgeError
from generator.paths import SEARCH_SPACES
from generator.problem import RMSNORM_BACKWARD, Problem
from normforge.collected import KEY

SHAPES_FOLDER = SEARCH_SPACES / "shapes"


def load_problems(shapes: str, operation: str = RMSNORM_BACKWARD) -> list[Problem]:
    """The problems named by `--shapes`: comma-separated entries, each either the name of a file in
    search_spaces/shapes/, the path of such a file, or one `MxN:dtype[:weight dtype][options]`.
    They are of one operation.

    Order is kept, but for files that a program has recorded, whose problems come in the order of
    the time that they took. Repeated problems appear once.
    """
    problems: dict[Problem, None] = {}
    for entry in shapes.split(","):
        entry = entry.strip()
        if not entry:
            continue
        lists = {path.stem: path for path in sorted(SHAPES_FOLDER.glob("*.yaml"))}
        if entry in lists:
            found = _load_file(lists[entry], operation)
        elif entry.endswith((".yaml", ".yml")):
            found = _load_file(Path(entry), operation)
        elif re.fullmatch(r"(?!\d+x\d+$)[\w-]+", entry):
            near = get_close_matches(entry.lower(), lists, n=1)
            hint = f"did you mean '{near[0]}'? " if near else ""
            raise NormforgeError(
                f"unknown shape list '{entry}': {hint}known lists are {', '.join(lists)}; "
                "a single shape is written MxN:dtype, for example 4096x1024:bf16"
            )
        else:
            found = [Problem.parse(entry, operation)]
        for problem in found:
            if problem.operation != operation:
                raise NormforgeError(f"shape {problem} in a run of {operation}: choose with --op")
        problems.update(dict.fromkeys(found))
    if not problems:
        raise NormforgeError(f"--shapes '{shapes}' names no shape")
    return list(problems)


def _load_file(path: Path, operation: str) -> list[Problem]:
    content = read_yaml(path, "the shape file ")
    if isinstance(content, dict) and KEY in content:
        texts = collected_shapes(path, content, operation)
    else:
        texts = _listed_shapes(path, content)
    try:
        return [Problem.parse(text, operation) for text in texts]
    except NormforgeError as error:
        raise NormforgeError(f"{path}: {error}") from error


def _listed_shapes(path: Path, content: Any) -> list[str]:
    if isinstance(content, dict) and (other := sorted(map(str, content.keys() - {"shapes"}))):
        raise NormforgeError(f"{path}: unknown key '{other[0]}': expected 'shapes' and no other")
    blocks = content.get("shapes") if isinstance(content, dict) else None
    if not isinstance(blocks, list) or not blocks:
        raise NormforgeError(f"{path}: expected a list under 'shapes'")
    texts: list[str] = []
    for block in blocks:
        if isinstance(block, str):
            texts.append(block)
            continue
        known = {"M", "N", "dtype", "weight_dtype", "options"}
        if not isinstance(block, dict) or set(block) - known:
            raise NormforgeError(
                f"{path}: a block has lists M, N, dtype and optionally weight_dtype and options, "
                f"got {block!r}"
            )
        weights = block.get("weight_dtype", [None])
        options = block.get("options", [""])
        lists = [block.get("dtype"), weights, options, block.get("N"), block.get("M")]
        if not all(isinstance(values, list) and values for values in lists):
            raise NormforgeError(
                f"{path}: a block needs the lists M, N and dtype with a value each, got {block!r}"
            )
        texts += [
            f"{M}x{N}:{dtype}" + (f":{weight}" if weight else "") + str(option or "")
            for dtype, weight, option, N, M in product(*lists)
        ]
    return texts
