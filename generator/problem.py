"""What is computed: the shape and dtypes of one RMSNorm backward."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import yaml

from generator.errors import NormforgeError

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of one element of each supported dtype."""

MAX_COLUMNS = 1 << 20
SHAPES_FOLDER = Path(__file__).resolve().parent.parent / "search_spaces" / "shapes"

# Twelve digits are more rows than any GPU holds.
_PROBLEM = re.compile(r"(?P<M>-?\d{1,12})x(?P<N>-?\d{1,12}):(?P<dtype>\w+)(?::(?P<weight>\w+))?")


@dataclass(frozen=True, order=True)
class Problem:
    """One RMSNorm backward: x, dy, dx are (M, N) of `dtype`; weight and dw are (N,) of
    `weight_dtype`; rstd is (M,) fp32. `str(problem)` is `MxN:dtype[:weight dtype]`, the form
    used on the command line, in study names and in logs."""

    M: int
    N: int
    dtype: str
    weight_dtype: str

    def __post_init__(self) -> None:
        for name, dtype in (("dtype", self.dtype), ("weight dtype", self.weight_dtype)):
            if dtype not in ITEMSIZE:
                raise NormforgeError(
                    f"unknown {name} '{dtype}' in shape {self}: use one of {', '.join(ITEMSIZE)}"
                )
        if self.weight_dtype not in (self.dtype, "fp32"):
            raise NormforgeError(
                f"shape {self}: the weight is either of x's dtype ({self.dtype}) or fp32"
            )
        if self.M < 1 or self.N < 1:
            raise NormforgeError(f"shape {self}: M and N must be at least 1 to be tuned")
        if self.N > MAX_COLUMNS:
            raise NormforgeError(f"shape {self}: N may be at most {MAX_COLUMNS}")

    def __str__(self) -> str:
        weight = "" if self.weight_dtype == self.dtype else f":{self.weight_dtype}"
        return f"{self.M}x{self.N}:{self.dtype}{weight}"

    @property
    def itemsize(self) -> int:
        """Bytes of one element of x, dy and dx."""
        return ITEMSIZE[self.dtype]

    @property
    def weight_itemsize(self) -> int:
        """Bytes of one element of weight and dw."""
        return ITEMSIZE[self.weight_dtype]

    @property
    def traffic_bytes(self) -> int:
        """Bytes that any implementation moves: x and dy read once, dx written once.
        The same three streams as `torch.add(x, dy, out=dx)`."""
        return 3 * self.M * self.N * self.itemsize

    @classmethod
    def parse(cls, text: str) -> Problem:
        """Read `MxN:dtype[:weight dtype]`, for example `4096x1024:bf16` or `8192x4096:bf16:fp32`.

        Raises NormforgeError with the expected form when the text does not fit it.
        """
        match = _PROBLEM.fullmatch(text.strip())
        if match is None:
            raise NormforgeError(
                f"malformed shape '{text.strip()}': expected MxN:dtype[:weight dtype], "
                "for example 4096x1024:bf16 or 8192x4096:bf16:fp32"
            )
        dtype = match["dtype"]
        return cls(int(match["M"]), int(match["N"]), dtype, match["weight"] or dtype)


def load_problems(shapes: str) -> list[Problem]:
    """The problems named by `--shapes`: comma-separated entries, each either the name of a file in
    search_spaces/shapes/, the path of such a file, or one `MxN:dtype[:weight dtype]`.

    Order is kept and repeated problems appear once.
    """
    problems: dict[Problem, None] = {}
    for entry in shapes.split(","):
        entry = entry.strip()
        if not entry:
            continue
        lists = {path.stem: path for path in sorted(SHAPES_FOLDER.glob("*.yaml"))}
        if entry in lists:
            found = _load_file(lists[entry])
        elif entry.endswith((".yaml", ".yml")):
            found = _load_file(Path(entry))
        elif re.fullmatch(r"[\w-]+", entry):
            raise NormforgeError(
                f"unknown shape list '{entry}': known lists are {', '.join(lists)}; "
                "a single shape is written MxN:dtype, for example 4096x1024:bf16"
            )
        else:
            found = [Problem.parse(entry)]
        problems.update(dict.fromkeys(found))
    if not problems:
        raise NormforgeError(f"--shapes '{shapes}' names no shape")
    return list(problems)


def _load_file(path: Path) -> list[Problem]:
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise NormforgeError(f"cannot read the shape file {path}: {reason}") from error
    blocks = content.get("shapes") if isinstance(content, dict) else None
    if not isinstance(blocks, list) or not blocks:
        raise NormforgeError(f"{path}: expected a list under 'shapes'")
    texts: list[str] = []
    for block in blocks:
        if isinstance(block, str):
            texts.append(block)
            continue
        if not isinstance(block, dict) or set(block) - {"M", "N", "dtype", "weight_dtype"}:
            raise NormforgeError(
                f"{path}: a block has lists M, N, dtype and optionally weight_dtype, got {block!r}"
            )
        weights = block.get("weight_dtype", [None])
        lists = [block.get("dtype"), weights, block.get("N"), block.get("M")]
        if not all(isinstance(values, list) and values for values in lists):
            raise NormforgeError(
                f"{path}: a block needs the lists M, N and dtype with a value each, got {block!r}"
            )
        texts += [
            f"{M}x{N}:{dtype}" + (f":{weight}" if weight else "")
            for dtype, weight, N, M in product(*lists)
        ]
    try:
        return [Problem.parse(text) for text in texts]
    except NormforgeError as error:
        raise NormforgeError(f"{path}: {error}") from error
