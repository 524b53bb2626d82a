"""The problem to compute: an operation, and the shape and dtypes of one call."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from generator.errors import NormforgeError
from normforge.operations import OPERATIONS, Signature, signature_of
from normforge.shape_names import is_interleaved, is_joined, rotated_columns, shape_name
from normforge.spec import ceil_div
from normforge.table import ITEMSIZE

MAX_COLUMNS = 1 << 20
HEADS = 32
"""Rows of a group, such as the heads of a token, where problems do not say it otherwise."""
RMSNORM_BACKWARD = "rmsnorm_backward"
RMSNORM_FORWARD = "rmsnorm_forward"
FORWARDS = {
    RMSNORM_FORWARD: RMSNORM_BACKWARD,
    "rmsnorm_invariant_forward": "rmsnorm_invariant_backward",
}
"""The forwards of RMSNorm, whose kernels have arguments of their own, by name, and the operations
in whose packages they are. Their problems have the same options; a residual is x's there."""


@dataclass(frozen=True)
class Sums:
    """The sums of an operation's kernels. Threads, registers, shared memory, workspace and
    predictions follow from them.

    row_sums: sums over a row, which all of its outputs need; column_sums: sums over the rows of one
    column, whose partial sums lie behind each other: N of the first, N of the second; statistics:
    fp32 numbers of each row that the forward saved.
    """

    row_sums: int = 1
    column_sums: int = 1
    statistics: int = 1


@cache
def sums_of(operation: str) -> Sums:
    """Return the sums of an operation, from its signature. Raises KeyError for an unknown
    operation."""
    signature = signature_of(operation)
    return Sums(signature.row_sums, signature.column_sums, len(signature.statistics))


_PROBLEM = re.compile(
    r"(?:(?P<operation>[a-z]\w*):)?(?P<M>-?\d+)x(?P<N>-?\d+):(?P<dtype>\w+?)(?::(?P<weight>\w+?))?"
    r"(?P<options>(\+\w+)*)"
)
_LONG_NAMES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"}
_MOST_DIGITS = 12
"""Digits of the largest M and N: more than any GPU holds."""
_OPTION = re.compile(
    rf"offset|residual(_.+)?|(rotary|joined)(?!0.)[0-9]{{1,{_MOST_DIGITS}}}|interleaved"
)
_FORM = (
    "MxN:dtype[:weight dtype][+offset][+residual[_dtype]][+rotary<columns>][+joined<columns>]"
    "[+interleaved]"
)
_ROTATION = ("rotary", "joined", "interleaved")


class ItemSizes:
    """The sizes that follow from the operation and the dtypes of a problem alone."""

    operation: str
    dtype: str
    weight_dtype: str
    residual: str
    rotation: str
    N: int

    @property
    def signature(self) -> Signature:
        """The tensors of the operation; of a forward of RMSNorm, those of its backward."""
        return signature_of(FORWARDS.get(self.operation, self.operation))

    @property
    def sums(self) -> Sums:
        """The sums of the operation's kernels."""
        return sums_of(FORWARDS.get(self.operation, self.operation))

    @property
    def itemsize(self) -> int:
        """Bytes of one element of x, dy and dx."""
        return ITEMSIZE[self.dtype]

    @property
    def weight_itemsize(self) -> int:
        """Bytes of one element of weight and dw."""
        return ITEMSIZE[self.weight_dtype]

    @property
    def residual_itemsize(self) -> int:
        """Bytes of one element of the residual's gradient, 0 without one."""
        return ITEMSIZE[self.residual] if self.residual else 0

    @property
    def rotated(self) -> int:
        """Columns of a row that are rotated, where pairs of columns are."""
        return rotated_columns(self.rotation, self.N)

    @property
    def interleaved(self) -> bool:
        """True where neighbouring columns are pairs, and not those of two halves."""
        return is_interleaved(self.rotation)

    @property
    def joined(self) -> bool:
        """True where a row is several heads, each of which is rotated."""
        return is_joined(self.rotation)


@dataclass(frozen=True, order=True)
class Problem(ItemSizes):
    """One call of an operation: x, dy, dx are (M, N) of `dtype`; weight and dw are (N,) of
    `weight_dtype`; rstd is (M,) fp32.

    offset: a number is added to the weight in fp32, as in models that store w - 1; residual: dtype
    of a residual gradient (M, N) that is added to dx in fp32, "" for none; where it is not `dtype`,
    dx is written in both; rotation: of heads, as normforge/shape_names.py has it.

    `str(problem)` is `MxN:dtype[:weight dtype]` and the options, such as `+offset`, `+residual`,
    `+residual_fp32`, `+rotary64`: the form used on the command line, in study names and in logs. In
    front of it stands `operation:` but for the backward of RMSNorm."""

    M: int
    N: int
    dtype: str
    weight_dtype: str
    offset: bool = False
    residual: str = ""
    operation: str = RMSNORM_BACKWARD
    rotation: str = ""

    def __post_init__(self) -> None:
        if self.operation not in (*OPERATIONS, *FORWARDS):
            known = ", ".join(OPERATIONS)
            raise NormforgeError(f"unknown operation '{self.operation}': known are {known}")
        for name, dtype in (("dtype", self.dtype), ("weight dtype", self.weight_dtype)):
            if dtype not in ITEMSIZE:
                meant = _LONG_NAMES.get(dtype)
                hint = f"write {meant}" if meant else f"use one of {', '.join(ITEMSIZE)}"
                raise NormforgeError(f"unknown {name} '{dtype}' in shape {self}: {hint}")
        self._check_options()
        if self.weight_dtype not in (self.dtype, "fp32"):
            raise NormforgeError(
                f"shape {self}: the weight is either of x's dtype ({self.dtype}) or fp32"
            )
        if self.residual not in ("", self.dtype, "fp32"):
            raise NormforgeError(
                f"shape {self}: the residual's gradient is of x's dtype ({self.dtype}) or fp32"
            )
        if self.M < 1 or self.N < 1:
            raise NormforgeError(f"shape {self}: M and N must be at least 1 to be tuned")
        if self.N > MAX_COLUMNS:
            raise NormforgeError(f"shape {self}: N may be at most {MAX_COLUMNS}")

    @property
    def heads(self) -> int:
        """Rows of a group, where groups of rows share something: one where heads are joined."""
        return 1 if self.joined else HEADS

    @property
    def group_shape(self) -> tuple[int, int]:
        """The shape of what groups of rows share, such as cos: a number for every pair."""
        return ceil_div(self.M, self.heads), self.rotated // 2

    def _check_options(self) -> None:
        """Raises NormforgeError for what the operation's signature does not have."""
        signature = self.signature
        weighted = signature.columns or signature.sums
        options = {tensor.option for tensor in signature.late}
        for has, given, what in (
            (weighted, self.weight_dtype != self.dtype, "weight dtype"),
            (signature.columns, self.offset, "option +offset"),
            ("residual" in options, self.residual, "option +residual"),
            (signature.groups, self.rotation, f"option +{self.rotation}"),
            ("joined" in signature.names, self.joined, f"option +{self.rotation}"),
        ):
            if given and not has:
                raise NormforgeError(f"shape {self}: {self.operation} has no {what}; leave it out")
        if self.rotation.startswith("rotary") and self.rotated not in range(2, self.N, 2):
            raise NormforgeError(
                f"shape {self}: +rotary has the number of rotated columns, an even number below N"
            )
        if self.joined and (self.rotated not in range(2, self.N, 2) or self.N % self.rotated):
            raise NormforgeError(
                f"shape {self}: +joined has the columns of a head, an even number below N of which "
                "N is a multiple"
            )

    def __str__(self) -> str:
        shape = (self.M, self.N, self.dtype, self.weight_dtype)
        prefix = "" if self.operation == RMSNORM_BACKWARD else f"{self.operation}:"
        return prefix + shape_name(*shape, self.offset, self.residual, self.rotation)

    @classmethod
    def parse(cls, text: str, operation: str = RMSNORM_BACKWARD) -> Problem:
        """Read `MxN:dtype[:weight dtype]` and options, for example `4096x1024:bf16`,
        `8192x4096:bf16:fp32` or `4096x2048:bf16+offset+residual`. operation: where the text names
        none.

        Raises NormforgeError with the expected form when the text does not fit it.
        """
        match = _PROBLEM.fullmatch(text.strip())
        if match is None and re.fullmatch(r"\d+x\d+", text.strip()):
            raise NormforgeError(
                f"shape '{text.strip()}' has no dtype: write for example {text.strip()}:bf16"
            )
        if match is None:
            raise NormforgeError(
                f"malformed shape '{text.strip()}': expected {_FORM}, "
                "for example 4096x1024:bf16 or 8192x4096:bf16:fp32"
            )
        dtype = match["dtype"]
        options: dict[str, str] = {}
        for option in match["options"].split("+")[1:]:
            if not _OPTION.fullmatch(option):
                raise NormforgeError(
                    f"shape '{text.strip()}': unknown option '+{option}'; expected {_FORM}"
                )
            name = option.rstrip("0123456789").partition("_")[0]
            if name in options:
                raise NormforgeError(f"shape '{text.strip()}' has the option +{name} twice")
            options[name] = option
        if max(len(match["M"]), len(match["N"])) > _MOST_DIGITS:
            raise NormforgeError(
                f"shape '{text.strip()[:80]}' has more than {_MOST_DIGITS} digits in a number, and "
                "no GPU holds as many rows: write it smaller"
            )
        shape = (int(match["M"]), int(match["N"]), dtype, match["weight"] or dtype)
        residual = options["residual"][len("residual_") :] or dtype if "residual" in options else ""
        if "rotary" in options and "joined" in options:
            raise NormforgeError(
                f"shape '{text.strip()}': of joined heads all columns are rotated; leave out "
                f"+{options['rotary']}"
            )
        rotation = "+".join(options[name] for name in _ROTATION if name in options)
        return cls(*shape, "offset" in options, residual, match["operation"] or operation, rotation)
